"""The verbs `eval asr` and `bench asr`. Heavy imports wait inside them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from mmdec.cli.output_files import write_text

Corpus = Annotated[Path, typer.Option(help="LibriSpeech's layout, or a manifest (.tsv, .jsonl) of path and text.")]
Model = Annotated[str, typer.Option("--model", "-m", help="A shipped name, a directory or a hub id of a Whisper.")]
Heads = Annotated[Path | None, typer.Option(help="Medusa heads; the model's own if left out.")]
Plan = Annotated[str, typer.Option(help="Drafts: learned, 8 (a chain of 8 nodes), 16x6 (a tree of 16, 6 deep).")]
Language = Annotated[str, typer.Option(help="The recordings' language; auto has it detected.")]
Longest = Annotated[int | None, typer.Option(min=1, help="At most so many tokens a window.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda.")]
Threads = Annotated[int, typer.Option("--threads", min=1, help="CPU threads.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", dir_okay=False, help="Also write the JSON here.")]


def eval_asr(
    split: Annotated[str | None, typer.Option(help="test, test_voices, paragraphs, dev; all if empty.")] = "test",
    corpus: Corpus = Path("data/english"),
    model: Model = "whisper-phrasebook",
    heads: Heads = None,
    plan: Plan = "learned",
    plain: Annotated[bool, typer.Option(help="Time transformers' own loop, too, and compare.")] = True,
    language: Language = "en",
    batch_size: Annotated[int, typer.Option(min=1, help="Recordings decoded together.")] = 1,
    limit: Annotated[int | None, typer.Option(min=1, help="So many utterances, evenly spaced.")] = None,
    max_new_tokens: Longest = None,
    worst: Annotated[int, typer.Option(min=0, help="So many of the worst transcripts.")] = 10,
    output: Output = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
    device: Device = "cpu",
    threads: Threads = 2,
) -> None:
    """Word and character errors of a Whisper on a split, tokens per round, seconds and speedup."""
    from rich.console import Console

    from mmdec.evaluation import tables as scorecard
    from mmdec.evaluation import transcription as evaluate_asr
    from mmdec.evaluation.harness import parse_plan

    report = evaluate_asr.evaluate_asr(
        split or None,
        corpus,
        model,
        heads=heads,
        plan=parse_plan(plan),
        plain=plain,
        language=_language(language),
        batch_size=batch_size,
        limit=limit,
        max_new_tokens=max_new_tokens,
        device=device,
        threads=threads,
        worst=worst,
        log=_progress,
    )
    write_json(report, output)
    if as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        Console().print(scorecard.asr_table(report))


def bench_asr(
    recordings: Annotated[
        list[Path] | None,
        typer.Argument(metavar="IN...", help="Sound files; some of every length of the corpus if none."),
    ] = None,
    corpus: Corpus = Path("data/english"),
    splits: Annotated[str, typer.Option(help="Splits to choose from, with commas.")] = "test,paragraphs",
    model: Model = "whisper-phrasebook",
    heads: Heads = None,
    assistant: Annotated[
        Path | None, typer.Option(help="A smaller Whisper; layers of the model itself if left out.")
    ] = None,
    plan: Plan = "learned",
    sweep: Annotated[str, typer.Option(help="More plans, with commas, or 'all': on long recordings.")] = "",
    per_bin: Annotated[int, typer.Option(min=1, help="Recordings of each length.")] = 6,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each way decodes each recording.")] = 5,
    batch: Annotated[int, typer.Option(min=1, help="Long recordings decoded together.")] = 8,
    language: Language = "en",
    max_new_tokens: Longest = None,
    output: Output = None,
    device: Device = "cpu",
    threads: Threads = 2,
) -> None:
    """Medusa heads against transformers' greedy decoding, prompt lookup and an assistant: tokens equal, then timed."""
    from mmdec.evaluation import bench_transcription as bench_asr

    plans = bench_asr.PLANS if sweep == "all" else [one for one in sweep.split(",") if one]
    report = bench_asr.bench_asr(
        recordings or (),
        corpus,
        splits.split(","),
        model,
        heads=heads,
        assistant=assistant,
        plan=plan,
        sweep=plans,
        per_bin=per_bin,
        repeats=repeats,
        batch=batch,
        language=_language(language),
        max_new_tokens=max_new_tokens,
        device=device,
        threads=threads,
        log=_progress,
    )
    write_json(report, output)
    print(json.dumps(report, indent=2, ensure_ascii=False))


def write_json(result: Any, output: Path | None) -> None:
    """JSON to a file, if one is named."""
    if output is not None:
        write_text(output, json.dumps(result, indent=2, ensure_ascii=False) + "\n")


def _language(given: str) -> str | None:
    return None if given == "auto" else given


def _progress(line: str) -> None:
    print(line, file=sys.stderr)
