"""`mmdec bench`: time a model and its baseline in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmdec import InputError
from mmdec.cli.options import (
    SPEECH_MODEL,
    VLM_CORPUS,
    VLM_MODEL,
    WHISPER_CORPUS,
    WHISPER_MODEL,
    AnswerTokens,
    AsJson,
    BenchDevice,
    BenchThreads,
    Heads,
    Language,
    MaxNewTokens,
    Model,
    Pictures,
    Plan,
    Questions,
    Report,
    WhisperCorpus,
    language_or_none,
    log,
    print_report,
)

app = typer.Typer(help="Time a model and its baseline in turn.", no_args_is_help=True)

Pairs = Annotated[int, typer.Option("--repeats", min=1, help="Pairs of runs timed for each row of the report.")]


@app.command()
def speech(
    recordings: Annotated[
        list[Path] | None, typer.Argument(metavar="IN...", help="French recordings. Default: data/samples/*.wav.")
    ] = None,
    output: Report = None,
    repeats: Pairs = 15,
    model: Model = SPEECH_MODEL,
    device: BenchDevice = "cpu",
    threads: BenchThreads = 2,
) -> None:
    """Time speech translation: the DAG against autoregressive decoding by source length, and file to samples."""
    from mmdec.evaluation.bench_translation import bench_speech

    paths = recordings or sorted(Path("data/samples").glob("*.wav"))
    print_report(bench_speech(paths, model, repeats=repeats, device=device, threads=threads), output)


@app.command()
def paper(output: Report = None, repeats: Pairs = 5, device: BenchDevice = "cpu", threads: BenchThreads = 2) -> None:
    """Time a DASpeech of the paper's size against an S2UT decoder, both with random weights."""
    from mmdec.evaluation.bench_translation import bench_paper

    print_report(bench_paper(repeats=repeats, device=device, threads=threads), output)


@app.command()
def core(
    output: Report = None,
    repeats: Pairs = 5,
    sizes: Annotated[str, typer.Option(help="Parameters of the models, comma-separated.")] = "2M,30M,130M",
    device: BenchDevice = "cpu",
    threads: BenchThreads = 2,
) -> None:
    """Time mmdec's loop against transformers' own, on language models with random weights."""
    from mmdec.evaluation.bench_core import bench_core

    print_report(bench_core(sizes.split(","), repeats, device=device, threads=threads), output)


@app.command()
def compressor(
    output: Report = None,
    size: Annotated[str, typer.Option(help="small, medium or 7B.")] = "medium",
    visual: Annotated[str, typer.Option(help="Visual tokens, comma-separated.")] = "64,256,1024",
    accepted: Annotated[int, typer.Option(min=0, help="Drafted tokens that the oracle accepts in a round.")] = 3,
    repeats: Pairs = 5,
    device: BenchDevice = "cpu",
    threads: BenchThreads = 2,
) -> None:
    """Time SpecVLM's drafter against EAGLE-2's by the number of visual tokens, with random weights."""
    from mmdec.evaluation.bench_compressor import SIZES, bench_compressor

    if size not in SIZES:
        raise InputError(f"`size` must be one of {', '.join(SIZES)}, but is {size!r:.60}. Choose one.")
    counts = [_visual_count(count) for count in visual.split(",")]
    print_report(
        bench_compressor(size, counts, accepted=accepted, repeats=repeats, device=device, threads=threads), output
    )


@app.command()
def kernels(output: Report = None, repeats: Pairs = 15, device: BenchDevice = "cpu", threads: BenchThreads = 1) -> None:
    """Time the operators alone: GPU kernels against SDPA, FlexAttention and dense torch; on a CPU the torch forms."""
    from mmdec.evaluation.bench_kernels import bench_kernels

    print_report(bench_kernels(repeats=repeats, device=device, threads=threads), output)


@app.command()
def asr(
    recordings: Annotated[
        list[Path] | None,
        typer.Argument(metavar="IN...", help="Audio files. Default: some of each length from the corpus."),
    ] = None,
    corpus: WhisperCorpus = WHISPER_CORPUS,
    splits: Annotated[str, typer.Option(help="Splits to choose recordings from, comma-separated.")] = "test,paragraphs",
    model: Model = WHISPER_MODEL,
    heads: Heads = None,
    assistant: Annotated[
        Path | None, typer.Option(help="Directory of a smaller Whisper. Default: some of the model's own layers.")
    ] = None,
    plan: Plan = "learned",
    sweep: Annotated[
        str, typer.Option(help="More draft sizes to time on long recordings, comma-separated, or 'all'.")
    ] = "",
    per_bin: Annotated[int, typer.Option(min=1, help="Recordings of each length.")] = 6,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each method decodes each recording.")] = 5,
    batch: Annotated[int, typer.Option(min=1, help="Long recordings in a batch.")] = 8,
    peer: Annotated[str | None, typer.Option(help="Another engine with the same weights: ctranslate2.")] = None,
    language: Language = "en",
    max_new_tokens: MaxNewTokens = None,
    output: Report = None,
    device: BenchDevice = "cpu",
    threads: BenchThreads = 2,
) -> None:
    """Time Medusa heads against transformers' greedy decoding, prompt lookup and an assistant, tokens equal."""
    from mmdec.evaluation.bench_transcription import PLANS, bench_asr

    report = bench_asr(
        recordings or (),
        corpus,
        splits.split(","),
        model,
        heads=heads,
        assistant=assistant,
        plan=plan,
        sweep=PLANS if sweep == "all" else [size for size in sweep.split(",") if size],
        per_bin=per_bin,
        repeats=repeats,
        batch=batch,
        peer=peer,
        language=language_or_none(language),
        max_new_tokens=max_new_tokens,
        device=device,
        threads=threads,
        log=log,
    )
    print_report(report, output)


@app.command()
def vlm(
    questions: Questions = VLM_CORPUS / "test.json",
    images: Pictures = None,
    model: Model = VLM_MODEL,
    drafter: Annotated[
        list[str] | None,
        typer.Option("--drafter", "-d", help="As for `mmdec describe`. Repeat it to compare several. Default: auto."),
    ] = None,
    plan: Plan = "learned",
    per_task: Annotated[int, typer.Option(min=1, help="Questions of each task.")] = 6,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each method answers each question.")] = 5,
    max_new_tokens: AnswerTokens = None,
    output: Report = None,
    as_json: AsJson = False,
    device: BenchDevice = "cpu",
    threads: BenchThreads = 2,
) -> None:
    """Time drafters for pictures against transformers' greedy decoding, its prompt lookup and plain decoding."""
    from mmdec.evaluation.bench_description import bench_vlm
    from mmdec.evaluation.tables_description import bench_table

    report = bench_vlm(
        questions,
        images,
        model,
        drafters=drafter or ["auto"],
        plan=plan,
        per_task=per_task,
        repeats=repeats,
        max_new_tokens=max_new_tokens,
        device=device,
        threads=threads,
        log=log,
    )
    print_report(report, output, None if as_json else bench_table)


def _visual_count(count: str) -> int:
    if not count.strip().isdecimal() or not 1 <= int(count) <= 16384:
        raise InputError(f"`visual` must be whole numbers from 1 to 16384, but one is {count!r:.60}. Correct it.")
    return int(count)
