"""The report of an evaluation as a table for people. It formats; it computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.markup import escape
from rich.table import Table


def table(report: dict[str, Any]) -> Table:
    """The report for people: one column a strategy."""
    strategies = report["strategies"]
    grid = Table(title=f"{report['model']} on {report['split']}, n = {report['n']}", title_justify="left")
    grid.add_column("")
    for name in strategies:
        grid.add_column(name, justify="right")
    for label, show in _LINES:
        cells = [show(scores) for scores in strategies.values()]
        if any(cell != "-" for cell in cells):
            grid.add_row(label, *cells)
    notes = [f"BLEU {next(iter(strategies.values()))['bleu']['signature']}"]
    if "recordings" in report:
        recordings = report["recordings"]
        notes.append(
            f"reference recordings: ASR-BLEU {recordings['asr_bleu']:.1f}, "
            f"word errors of the judge {100 * recordings['judge_word_error_rate']:.1f} %; "
            f"noise {report['asr_bleu_noise']:.1f}"
        )
    machine = report["hardware"]
    notes.append(f"{machine['cpu']}, {machine['threads']} threads, torch {machine['versions']['torch']}")
    grid.caption = "\n".join(notes)
    grid.caption_justify = "left"
    return grid


def asr_table(report: dict[str, Any]) -> Table:
    """A Whisper's report for people: one column a way of decoding."""
    ways: dict[str, Any] = report["decoding"]
    title = f"{report['model']} on {report['split'] or 'the whole corpus'}, n = {report['n']}"
    grid = Table(title=title, title_justify="left")
    grid.add_column("")
    for name in ways:
        grid.add_column(name, justify="right")
    for label, key in _ASR_RATES:
        entry = report[key]
        edits = (
            ""
            if "length" not in entry
            else f"{entry['substitutions']} S {entry['deletions']} D {entry['insertions']} I"
        )
        grid.add_row(label, f"{_percent(key)(report)}\n{edits}".strip(), *[""] * (len(ways) - 1))
    for label, show in _ASR_COSTS:
        grid.add_row(label, *(show(cost) if cost else "-" for cost in ways.values()))
    notes = [f"normaliser: {report['normaliser']}, batch {report['batch_size']}"]
    if "speedup" in report:
        same, faster = report["identical"], report["speedup"]
        notes.append(
            f"identical to greedy: {same['count']} of {same['n']}; "
            + ", ".join(f"{faster[key]['value']:.2f} times in {key} seconds" for key in ("decoder", "wall"))
        )
    notes += [
        f"{row['errors']} of {row['words']} wrong: {row['reference']!r} heard as {row['transcript']!r}"
        for row in report["worst"]
    ]
    notes += [f"refused {name}: {why}" for name, why in report["refused"].items()]
    machine = report["hardware"]
    notes.append(f"{machine['cpu']}, {machine['threads']} threads, torch {machine['versions']['torch']}")
    grid.caption, grid.caption_justify = escape("\n".join(notes)), "left"
    return grid


def _percent(key: str) -> Callable[[dict[str, Any]], str]:
    def show(scores: dict[str, Any]) -> str:
        entry = scores.get(key)
        if entry is None or (isinstance(entry, dict) and (entry.get("n") == 0 or entry["value"] is None)):
            return "-"
        if not isinstance(entry, dict):
            return f"{100 * entry:.1f}"
        spread = f" [{100 * entry['low']:.1f}, {100 * entry['high']:.1f}]" if "low" in entry else ""
        return f"{100 * entry['value']:.1f}{spread}"

    return show


def _points(key: str) -> Callable[[dict[str, Any]], str]:
    def show(scores: dict[str, Any]) -> str:
        entry = scores.get(key)
        value = entry["value"] if isinstance(entry, dict) else entry
        return "-" if value is None else f"{value:.1f}"

    return show


def _number(kind: str) -> Callable[[dict[str, Any]], str]:
    return lambda scores: _percent(kind)(scores["number_accuracy"])


def _three(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _two(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _stages(scores: dict[str, Any]) -> str:
    return "\n".join(
        f"{stage} {1e3 * entry['median']:.1f} / {1e3 * entry['p90']:.1f}" for stage, entry in scores["latency"].items()
    )


_LINES: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("exact sentences, any rendering, % [95 %]", _percent("exact")),
    ("  of sentences with one rendering", _percent("exact_one_rendering")),
    ("  of sentences with several", _percent("exact_several_renderings")),
    ("phone errors, %, against the recorded rendering", _percent("phone_error_rate")),
    ("  against the nearest rendering", _percent("phone_error_rate_nearest")),
    ("BLEU, all references", _points("bleu")),
    ("chrF, all references", _points("chrf")),
    ("numbers, times and prices right, %", _number("all")),
    ("  numbers", _number("numbers")),
    ("  times", _number("times")),
    ("  prices", _number("prices")),
    ("ASR-BLEU", _points("asr_bleu")),
    ("  over that of the reference recordings, %", _percent("asr_bleu_ratio")),
    ("  shuffled", _points("asr_bleu_shuffled")),
    ("refused recordings", lambda scores: str(len(scores["refused"])) if scores["refused"] else "-"),
    ("milliseconds, median / 90 %", _stages),
    ("seconds of work per second of source", lambda scores: _three(scores["real_time_factor"])),
)

_ASR_RATES = (
    ("word errors, %, normalised [95 %]", "wer"),
    ("character errors, %", "cer"),
    ("word errors with case and marks, %", "wer_raw"),
    ("character errors with case and marks, %", "cer_raw"),
    ("exact transcripts, %, normalised", "exact"),
    ("  with case and marks", "exact_raw"),
)


def _spent(stage: str) -> Callable[[dict[str, Any]], str]:
    return lambda cost: f"{cost['seconds'][stage]:.2f}"


_ASR_COSTS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("seconds: features", _spent("features")),
    ("  encoder", _spent("encoder")),
    ("  decoder, drafter included", _spent("decoder")),
    ("    drafter", _spent("drafter")),
    ("  total", _spent("total")),
    ("decoder's share, %", lambda cost: f"{100 * cost['decoder_share']:.1f}"),
    ("decoder passes", lambda cost: str(cost["decoder_passes"])),
    ("tokens per round, bonus included", lambda cost: _two(cost["tokens_per_round"])),
    ("seconds of work per second of sound", lambda cost: _three(cost["real_time_factor"])),
)
