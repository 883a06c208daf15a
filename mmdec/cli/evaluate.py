"""`mmdec eval`: scores a model on a split of a corpus, and formats the report as tables of 80 columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from mmdec.bench.report import MIN_FIRST_COLUMN, hardware_line
from mmdec.cli.options import (
    SPEECH_CORPUS,
    SPEECH_TEXT,
    AbsolutePaths,
    BenchThreads,
    Device,
    Limit,
    Model,
    command_arguments,
    log,
    with_option_groups,
)
from mmdec.cli.reports import JsonTo, deliver_report
from mmdec.daspeech.options import DEFAULT_TRANSLATOR
from mmdec.evaluation.options import AsrEvalOptions, VlmEvalOptions
from mmdec.pretrained import DEFAULT_VLM
from mmdec.whisper.options import DEFAULT_WHISPER

app = typer.Typer(
    help="Score a model on a split of a corpus.",
    no_args_is_help=True,
    epilog="Example: mmdec eval asr --split test --limit 50",
)


@app.command(**command_arguments("eval speech --split test --limit 50"))
def speech(
    split: Annotated[str, typer.Option(help="Split of the corpus: test, test_voices or dev.")] = "test",
    corpus: Annotated[
        Path, typer.Option(help="Folder of the corpus, or a .tsv or .jsonl with path, split and text (then --text).")
    ] = SPEECH_CORPUS,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="DIR",
            help="Folder of pairs with the translations of a .tsv or .jsonl. Repeat. Default: the default corpus's.",
        ),
    ] = None,
    model: Model = DEFAULT_TRANSLATOR,
    strategy: Annotated[
        list[str] | None,
        typer.Option("--strategy", "-s", help="Decoding strategy, as for `mmdec translate`. Repeat it for several."),
    ] = None,
    judge: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="The Whisper that transcribes the translations for ASR-BLEU. One that knows French is compared, too.",
        ),
    ] = DEFAULT_WHISPER,
    common_voice: Annotated[
        Path | None, typer.Option(help="Folder of Common Voice, if it is not inside the corpus.")
    ] = None,
    cvss: Annotated[Path | None, typer.Option(help="Folder of CVSS, if it is not inside the corpus.")] = None,
    allow_absolute_paths: AbsolutePaths = False,
    limit: Limit = None,
    asr: Annotated[bool, typer.Option(help="Compute ASR-BLEU: --judge transcribes the translations.")] = True,
    json_to: JsonTo = None,
    device: Device = None,
    threads: BenchThreads = 2,
) -> None:
    """Score speech translation: BLEU, chrF, exact sentences, numbers, phones, ASR-BLEU and latency.

    With a --judge that knows French, also score the judge's own translation and a cascade.
    """
    from mmdec.checks.arguments import check_threads
    from mmdec.daspeech.translate import load_translator
    from mmdec.evaluation.judge import Judge, comparison_systems
    from mmdec.evaluation.translation import cvss_corpus, evaluate_speech, manifest_corpus, own_systems

    check_threads(threads)
    common = {"allow_absolute_paths": allow_absolute_paths, "limit": limit}
    if corpus.suffix in (".tsv", ".jsonl"):
        pairs = SPEECH_TEXT if corpus == SPEECH_CORPUS and not text else text or ()
        clips = manifest_corpus(split, corpus, pairs, **common)
    else:
        clips = cvss_corpus(split, corpus, common_voice=common_voice, cvss=cvss, **common)
    hearing = Judge(judge, device, threads)
    systems = own_systems(model, strategy or None, device, threads)
    if hearing.knows_french:
        systems = systems.with_others(comparison_systems(hearing, load_translator(model, device)))
    report = evaluate_speech(clips, systems, hearing if asr else None, log)
    deliver_report(report, json_to, speech_table)


@app.command(**command_arguments("eval asr --split test --limit 50"))
@with_option_groups
def asr(options: AsrEvalOptions, model: Model = DEFAULT_WHISPER, json_to: JsonTo = None) -> None:
    """Score a Whisper: word and character error rate, tokens per round, seconds and speedup."""
    from mmdec.evaluation.transcription import evaluate_asr

    deliver_report(evaluate_asr(model, options, log), json_to, asr_table)


@app.command(**command_arguments("eval vlm --questions data/samples/images/samples.tsv"))
@with_option_groups
def vlm(options: VlmEvalOptions, model: Model = DEFAULT_VLM, json_to: JsonTo = None) -> None:
    """Score a vision-language model: what is right by task, tokens per round, and the drafter's share of the time."""
    from mmdec.evaluation.description import evaluate_vlm

    report = evaluate_vlm(model, options, log)
    deliver_report(report, json_to, vlm_table)
    if report["refused"]:
        raise typer.Exit(1)


MAX_FIGURE_COLUMNS = 2  # number of columns of figures side by side; more do not fit into 80 columns
LABEL_WIDTH = 30  # most characters of a label on one line; longer labels are wrapped, figures are not


def grid_of(*names: str) -> Table:
    """Make an empty table: a column of labels, and one column of figures for each name."""
    grid = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    grid.add_column("", max_width=LABEL_WIDTH)
    for name in names:
        grid.add_column(name, justify="right", no_wrap=True)
    return grid


def speech_table(report: dict[str, Any]) -> RenderableType:
    """Make the table of a report of `evaluate_speech`.

    It has a column for each strategy or other translator, at most two side by side.
    """
    names = [*report["systems"]]
    shown = [label for label, show in _LINES if any(show(scores) != "-" for scores in report["systems"].values())]
    grids = []
    for start in range(0, len(names), MAX_FIGURE_COLUMNS):
        some = names[start : start + MAX_FIGURE_COLUMNS]
        grid = grid_of(*some)
        for label, show in _LINES:
            if label in shown:
                grid.add_row(label, *(show(report["systems"][name]) for name in some))
        grids.append(grid)
    title = f"{report['model']} on {report['split']}, n = {report['n']}"
    return Group(Text(title), *grids, Text("\n".join(_speech_notes(report))))


def _speech_notes(report: dict[str, Any]) -> list[str]:
    systems = report["systems"]
    first, scores = next(iter(systems.items()))
    notes = [f"BLEU {scores['bleu']['signature']}"]
    if len(systems) > 1:
        notes.append(f"p: of the paired bootstrap against {first}")
    if "recogniser" in report:
        notes.append("ASR-BLEU: {name}; {normalisation}".format(**report["recogniser"]))
    if "recordings" in report:
        recordings = report["recordings"]
        notes.append(
            f"reference recordings: ASR-BLEU {recordings['asr_bleu']:.1f}, word errors of the recogniser "
            f"{100 * recordings['judge_word_error_rate']:.1f} %; noise {report['asr_bleu_noise']:.1f}"
        )
    return [*notes, hardware_line(report["hardware"])]


def asr_table(report: dict[str, Any]) -> RenderableType:
    """Make the table of a report of `evaluate_asr`: one column for each decoding method."""
    methods: dict[str, Any] = report["decoding"]
    title = f"{report['model']} on {report['split'] or 'the whole corpus'}, n = {report['n']}"
    grid = grid_of(*methods)
    for label, key in _ASR_RATES:
        entry = report[key]
        edits = (
            ""
            if "length" not in entry
            else f"{entry['substitutions']} S {entry['deletions']} D {entry['insertions']} I"
        )
        grid.add_row(label, f"{_percent(key)(report)}\n{edits}".strip(), *[""] * (len(methods) - 1))
    for label, show in _ASR_COSTS:
        grid.add_row(label, *(show(cost) if cost else "-" for cost in methods.values()))
    notes = [f"normaliser: {report['normaliser']}, batch {report['batch_size']}"]
    if "speedup" in report:
        same, faster = report["identical"], report["speedup"]
        notes.append(
            f"identical to greedy: {same['count']} of {same['n']}; "
            + ", ".join(f"{faster[key]['value']:.2f} times in {key} seconds" for key in ("decoder", "wall"))
        )
    notes += [
        f"{row['errors']} of {row['words']} wrong: {row['reference']!r} transcribed as {row['transcript']!r}"
        for row in report["worst"]
    ]
    notes += [f"refused {name}: {error}" for name, error in report["refused"].items()]
    notes.append(hardware_line(report["hardware"]))
    return Group(Text(title), grid, Text("\n".join(notes)))


Show = Callable[[dict[str, Any]], str]  # a function from a report to one of its figures, as text


def _rate(entry: Any) -> str:
    """Format a share in percent, with its interval if there is one.

    Args:
        entry: A share in [0, 1]; or a dict with "value", optionally "low" and "high", all in [0, 1], and "n", the
            number of cases.

    Returns:
        The text; "-" if there is no value or no case.
    """
    if not isinstance(entry, dict):
        return f"{100 * entry:.1f}"
    if entry.get("n") == 0 or entry["value"] is None:
        return "-"
    spread = f" [{100 * entry['low']:.1f}, {100 * entry['high']:.1f}]" if "low" in entry else ""
    return f"{100 * entry['value']:.1f}{spread}"


def _percent(key: str) -> Show:
    return lambda scores: "-" if scores.get(key) is None else _rate(scores[key])


def _points(key: str) -> Show:
    def show(scores: dict[str, Any]) -> str:
        entry = scores.get(key)
        return "-" if entry is None else f"{entry['value']:.1f} [{entry['low']:.1f}, {entry['high']:.1f}]"

    return show


def _p_value(key: str) -> Show:
    return lambda scores: _decimals((scores.get(key) or {}).get("p"), 3)


def _number(kind: str) -> Show:
    return lambda scores: _percent(kind)(scores["number_accuracy"])


def _decimals(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _stages(scores: dict[str, Any]) -> str:
    return "\n".join(
        f"{stage} {1e3 * entry['median']:.1f} / {1e3 * entry['p90']:.1f}" for stage, entry in scores["latency"].items()
    )


_LINES: tuple[tuple[str, Show], ...] = (
    ("exact sentences, any reference, % [95 %]", _percent("exact")),
    ("  of sentences with one reference", _percent("exact_one_rendering")),
    ("  of sentences with several references", _percent("exact_several_renderings")),
    ("phone error rate, %, against the reference recording", _percent("phone_error_rate")),
    ("  against the nearest reference", _percent("phone_error_rate_nearest")),
    ("BLEU, all references [95 %]", _points("bleu")),
    ("  p", _p_value("bleu")),
    ("chrF, all references [95 %]", _points("chrf")),
    ("  p", _p_value("chrf")),
    ("numbers, times and prices right, %", _number("all")),
    ("  numbers", _number("numbers")),
    ("  times", _number("times")),
    ("  prices", _number("prices")),
    ("ASR-BLEU [95 %]", _points("asr_bleu")),
    ("  p", _p_value("asr_bleu")),
    ("ASR-chrF [95 %]", _points("asr_chrf")),
    ("  over that of the reference recordings, %", _percent("asr_bleu_ratio")),
    ("  shuffled", lambda scores: _decimals(scores.get("asr_bleu_shuffled"), 1)),
    ("refused recordings", lambda scores: str(len(scores["refused"])) if scores["refused"] else "-"),
    ("milliseconds, median / 90th percentile", _stages),
    ("real-time factor", lambda scores: _decimals(scores["real_time_factor"], 3)),
)

_ASR_RATES = (
    ("word error rate, %, normalised [95 %]", "wer"),
    ("character error rate, %", "cer"),
    ("word error rate with case and punctuation, %", "wer_raw"),
    ("character error rate with case and punctuation, %", "cer_raw"),
    ("exact transcripts, %, normalised", "exact"),
    ("  with case and punctuation", "exact_raw"),
)


def _seconds(stage: str) -> Show:
    return lambda cost: f"{cost['seconds'][stage]:.2f}"


_ASR_COSTS: tuple[tuple[str, Show], ...] = (
    ("seconds: features", _seconds("features")),
    ("  encoder", _seconds("encoder")),
    ("  decoder, drafter included", _seconds("decoder")),
    ("    drafter", _seconds("drafter")),
    ("  total", _seconds("total")),
    ("decoder's share, %", lambda cost: f"{100 * cost['decoder_share']:.1f}"),
    ("decoder passes", lambda cost: str(cost["decoder_passes"])),
    ("tokens per round, bonus included", lambda cost: _decimals(cost["tokens_per_round"], 2)),
    ("real-time factor", lambda cost: _decimals(cost["real_time_factor"], 3)),
)


def vlm_table(report: dict[str, Any]) -> RenderableType:
    """Make the table of a report of `evaluate_vlm`.

    It has one row for each task, and a row for all tasks if there are several.
    """
    other = ", pictures swapped" if report["swapped"] else ""
    title = f"{report['model']} on {report['questions']}{other}, n = {report['n']}, drafter {report['drafter']}"
    grid = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    grid.add_column("", max_width=MIN_FIRST_COLUMN, overflow="fold")
    for name in ("right, % [95 %]", "of", "tokens\na round", "accepted\na round", "drafter's\nshare, %", "s,\nmedian"):
        grid.add_column(name, justify="right", no_wrap=True)
    rows = list(report["by_task"].items())
    if len(rows) != 1:
        rows.append(("all", {"right": report["right"], "decoding": report["decoding"]}))
    for task, row in rows:
        cost = row["decoding"]
        share = cost.get("drafter_share", {}).get("of_all")
        grid.add_row(
            escape(task),
            _rate(row["right"]),
            str(row["right"]["n"]),
            _decimals(cost.get("tokens_per_round"), 2),
            _decimals(cost.get("accepted_per_round"), 2),
            "-" if share is None else f"{100 * share:.1f}",
            "-" if not cost else f"{cost['median_seconds']:.3f}",
        )
    compressed = {name: row["decoding"].get("compressors") for name, row in rows}
    notes = [
        f"images shortened, {name}: {', '.join(f'{how} {count}' for how, count in counts.items())}"
        for name, counts in compressed.items()
        if counts
    ]
    notes += [
        f"{name}, right in any words: {_rate(row['right_in_any_words'])}"
        for name, row in rows
        if "right_in_any_words" in row
    ]
    notes += [
        f"{row['task']} {row['id']}: {row['question']!r} answered {row['answer']!r}, expected {row['expected']!r}"
        for row in report["worst"]
    ]
    notes += [f"refused {name}: {error}" for name, error in report["refused"].items()]
    return Group(Text(title), grid, Text("\n".join([*notes, hardware_line(report["hardware"])])))
