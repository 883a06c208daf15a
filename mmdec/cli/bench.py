"""`mmdec bench`: compares the outputs of a model and its baseline, then times both; runs all benchmarks; shows saved
results."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from mmdec import InputError
from mmdec.bench.report import BenchReport, BenchRun, load_run, merge_runs
from mmdec.cli.inputs import SOUND_SUFFIXES, FileKind, input_files
from mmdec.cli.options import (
    OWN_PROMPT,
    SPEECH_MODEL,
    VLM_MODEL,
    WHISPER_CORPUS,
    WHISPER_MODEL,
    AbsolutePaths,
    AnswerTokens,
    AudioFiles,
    BenchDevice,
    BenchThreads,
    Heads,
    Judging,
    Language,
    MaxNewTokens,
    Model,
    OwnPrompt,
    Pictures,
    Plan,
    Questions,
    VerbGroup,
    WhisperCorpus,
    as_verb,
    language_or_none,
    log,
)
from mmdec.cli.reports import Against, Destinations, JsonTo, MarkdownTo, PlotsTo, reporting

ORDER = ("kernels", "speech", "asr", "vlm")  # the benchmarks of `bench all`
SAMPLES = Path("data/samples/english")  # recordings for `bench asr` if the corpus data/english is missing

Names = Annotated[
    list[str] | None, typer.Option("--only", metavar="NAME", help="One of all; repeat it for several. Default: all.")
]


@reporting
def everything(
    only: Names = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="Time limit in minutes of each benchmark.")] = 10.0,
    quick: Annotated[bool, typer.Option("--quick", help="The fewest repeats, sizes and inputs: does it work?")] = False,
    device: BenchDevice = "cpu",
    threads: BenchThreads = 2,
) -> BenchRun:
    """Run each benchmark in turn, in a process of its own, with a time limit.

    Benchmarks that did not finish are named. Then the exit code is 1.
    """
    unknown = sorted(set(only or ()) - set(ORDER))
    if unknown:
        raise InputError(f"`--only` must be one of {', '.join(ORDER)}, but is {unknown[0]!r:.60}. Choose from these.")
    chosen = [name for name in ORDER if not only or name in only]
    runs: list[BenchRun] = []
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mmdec-bench-") as folder:
        for name in chosen:
            path = Path(folder) / f"{name}.json"
            log(f"{name}: at most {minutes:g} minutes")
            reason = _run(_command(name, path, device, threads, quick), 60 * minutes)
            if reason:
                log(f"{name}: {reason}")
                left_out[name] = reason
            else:
                runs.append(load_run(path))
    return merge_runs([*runs, BenchRun((), left_out)])


QUICK: dict[str, list[str]] = {  # benchmark -> its options with `--quick`
    "asr": ["--per-bin", "1", "--batch", "2"],
    "vlm": ["--per-task", "1", "--max-new-tokens", "16"],
}


def _command(name: str, path: Path, device: str, threads: int, quick: bool) -> list[str]:
    words = [sys.executable, "-m", "mmdec", "bench", name, "--json", str(path)]
    words += ["--device", device, "--threads", str(threads)]
    return words + (["--repeats", "1", *QUICK.get(name, [])] if quick else [])


def sample_recordings() -> list[Path]:
    """Return the sample recordings, which `bench asr` uses if there is no corpus; [] if there is a corpus. Print on
    stderr that they are measured."""
    recordings = [] if WHISPER_CORPUS.exists() else sorted(SAMPLES.glob("*.flac"))
    if recordings:
        log(f"no corpus is here: the samples are measured, {SAMPLES}")
    return recordings


def _run(command: Sequence[str], seconds: float) -> str:
    """Run a benchmark in another process, whose errors go to this process's stderr.

    Args:
        command: Program and arguments.
        seconds: Time limit.

    Returns:
        Why there is no report; "" if there is one.
    """
    try:
        code = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        return f"not done in {seconds / 60:g} minutes"
    return f"it ended with exit code {code}" if code else ""


def show_saved(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="JSON of `mmdec bench`.")],
    metrics: Annotated[
        Path | None, typer.Option(metavar="CSV", help="With --plots: a metrics.csv of Lightning, as training curves.")
    ] = None,
    json_to: JsonTo = None,
    markdown: MarkdownTo = None,
    plots: PlotsTo = None,
    against: Against = None,
) -> None:
    """Show saved runs again: as a table, as Markdown, as plots, beside another run. Nothing is measured."""
    to = Destinations(None, json_to, markdown, plots, against, metrics)
    to.deliver(merge_runs([load_run(path) for path in files]))


app = typer.Typer(
    cls=VerbGroup,
    help="Time a model and its baseline in turn. Outputs are compared first: without equality there are no figures.",
    no_args_is_help=True,
    epilog="Example: mmdec bench all --quick",
)
app.command("all", **as_verb("bench all --quick --json out/bench.json"))(everything)
app.command("show", **as_verb("bench show out/bench.json --markdown out/bench.md"))(show_saved)

Pairs = Annotated[int, typer.Option("--repeats", min=1, help="Pairs of runs timed for each row of the report.")]


@app.command(**as_verb("bench speech --repeats 3"))
@reporting
def speech(
    recordings: Annotated[
        list[Path] | None, typer.Argument(metavar="[IN]...", help="French recordings. Default: data/samples/*.wav.")
    ] = None,
    audio: AudioFiles = None,
    repeats: Pairs = 15,
    model: Model = SPEECH_MODEL,
    judge: Judging = None,
    device: BenchDevice = "cpu",
    threads: BenchThreads = 2,
) -> BenchReport:
    """Time speech translation: the DAG against autoregressive decoding by source length, file to samples, and both
    against the translation of --judge."""
    from mmdec.bench.translation import bench_speech
    from mmdec.evaluation.judge import Judge

    paths = [*(recordings or ()), *(audio or ())] or sorted(Path("data/samples").glob("*.wav"))
    other = None if judge is None else Judge(judge, device, threads)
    return bench_speech(paths, model, repeats=repeats, device=device, threads=threads, judge=other, log=log)


@app.command(**as_verb("bench core --model Qwen/Qwen2.5-0.5B-Instruct --repeats 3"))
@reporting
def core(
    model: Annotated[str, typer.Option("--model", "-m", help="A language model: a directory or a Hugging Face id.")],
    repeats: Pairs = 5,
    draft: Annotated[str | None, typer.Option(help="A smaller model or a drafter for it.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Prompts, a line each, or a .jsonl. Default: a built-in set.")
    ] = None,
    per_kind: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Maximum new tokens of an answer.")] = 128,
    device: BenchDevice = "cpu",
    threads: BenchThreads = 2,
) -> BenchReport:
    """Time mmdec's loop on a language model against transformers' own: lookup, recycling and --draft against prompt
    lookup and assisted generation."""
    from mmdec.bench.language_models import bench_language

    return bench_language(
        model,
        draft,
        data,
        per_kind=per_kind,
        repeats=repeats,
        max_new_tokens=max_new_tokens,
        device=device,
        threads=threads,
        log=log,
    )


@app.command(**as_verb("bench kernels --device cuda"))
@reporting
def kernels(
    repeats: Pairs = 15,
    device: BenchDevice = "cpu",
    threads: BenchThreads = 1,
) -> BenchReport:
    """Time the operators alone: on a GPU, Triton kernels against SDPA, FlexAttention and dense torch; on a CPU, mmdec's
    fast versions against plain torch."""
    from mmdec.bench.kernels import bench_kernels

    return bench_kernels(repeats=repeats, device=device, threads=threads, log=log)


@app.command(**as_verb("bench asr data/samples/english/two_cities.flac"))
@reporting
def asr(
    recordings: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[IN]...", help="Audio files. Default: some of each length from the corpus."),
    ] = None,
    audio: AudioFiles = None,
    corpus: WhisperCorpus = WHISPER_CORPUS,
    allow_absolute_paths: AbsolutePaths = False,
    splits: Annotated[str, typer.Option(help="Splits to choose recordings from, comma-separated.")] = "test,paragraphs",
    model: Model = WHISPER_MODEL,
    heads: Heads = None,
    assistant: Annotated[
        Path | None, typer.Option(help="Directory of a smaller Whisper. Default: some of the model's own layers.")
    ] = None,
    plan: Plan = "learned",
    per_bin: Annotated[int, typer.Option(min=1, help="Recordings of each length.")] = 6,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each method decodes each recording.")] = 5,
    batch: Annotated[int, typer.Option(min=1, help="Long recordings in a batch.")] = 8,
    peer: Annotated[
        str | None, typer.Option(help="Time another engine instead, with the same weights: ctranslate2.")
    ] = None,
    language: Language = "en",
    max_new_tokens: MaxNewTokens = None,
    device: BenchDevice = "cpu",
    threads: BenchThreads = 2,
) -> BenchReport:
    """Time Medusa heads against transformers' greedy decoding, prompt lookup and an assistant; all must give the same
    tokens. With --peer, time any Whisper here, in transformers and in another engine, in float32 and int8."""
    paths = _expand_folders([*(recordings or ()), *(audio or ())])
    how: dict[str, Any] = {"repeats": repeats, "language": language_or_none(language), "threads": threads, "log": log}
    if peer is not None:
        from mmdec.bench.peer_transcription import bench_peer

        return bench_peer(paths, model, peer, heads=heads or "auto", **how)
    from mmdec.bench.transcription import bench_asr

    return bench_asr(
        paths or (sample_recordings() if corpus == WHISPER_CORPUS else []),
        corpus,
        splits.split(","),
        model,
        allow_absolute_paths=allow_absolute_paths,
        heads=heads,
        assistant=assistant,
        plan=plan,
        per_bin=per_bin,
        batch=batch,
        max_new_tokens=max_new_tokens,
        device=device,
        **how,
    )


def _expand_folders(paths: Sequence[Path]) -> list[Path]:
    """Replace each folder by the audio files in it.

    Raises:
        InputError: For a folder without audio files.
    """
    files = [
        file for path in paths if path.is_dir() for file in input_files([path], FileKind("IN", SOUND_SUFFIXES), None)
    ]
    for refusal in (file.refusal for file in files if file.refusal):
        raise InputError(refusal)
    return [*(path for path in paths if not path.is_dir()), *(file.path for file in files)]


@app.command(**as_verb("bench vlm --drafter eagle --drafter msd"))
@reporting
def vlm(
    questions: Questions = None,
    images: Pictures = None,
    allow_absolute_paths: AbsolutePaths = False,
    prompt: OwnPrompt = OWN_PROMPT,
    model: Model = VLM_MODEL,
    drafter: Annotated[
        list[str] | None,
        typer.Option("--drafter", "-d", help="As for `mmdec describe`. Repeat it to compare several. Default: auto."),
    ] = None,
    plan: Plan = "learned",
    per_task: Annotated[int, typer.Option(min=1, help="Questions of each task.")] = 6,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each method answers each question.")] = 5,
    max_new_tokens: AnswerTokens = None,
    device: BenchDevice = "cpu",
    threads: BenchThreads = 2,
) -> BenchReport:
    """Time drafters for pictures against transformers' greedy decoding, its prompt lookup and plain decoding."""
    from mmdec.bench.description import bench_vlm

    return bench_vlm(
        questions,
        images,
        model,
        allow_absolute_paths=allow_absolute_paths,
        prompt=prompt,
        drafters=drafter or ["auto"],
        plan=plan,
        per_task=per_task,
        repeats=repeats,
        max_new_tokens=max_new_tokens,
        device=device,
        threads=threads,
        log=log,
    )
