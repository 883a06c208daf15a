"""`mmdec bench`: checks outputs against a baseline's and times both; runs all benchmarks; shows saved results."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mmdec import InputError
from mmdec.bench.options import DrafterBenchOptions
from mmdec.bench.report import BenchReport, BenchRun, load_run, merge_runs
from mmdec.cli.inputs import FileKind, input_files
from mmdec.cli.options import (
    AudioFiles,
    BenchDevice,
    BenchThreads,
    Heads,
    Judging,
    Language,
    Model,
    command_arguments,
    log,
)
from mmdec.cli.reports import Against, Destinations, DrafterDestinations, JsonTo, MarkdownTo, PlotTo, with_report
from mmdec.daspeech.options import DEFAULT_TRANSLATOR
from mmdec.drafters.built_in import AUTO
from mmdec.io.suffixes import SOUND_SUFFIXES
from mmdec.pretrained import DEFAULT_VLM
from mmdec.whisper.options import DEFAULT_WHISPER

COMMANDS: dict[str, list[str]] = {  # the benchmarks of `bench all` and their words
    "kernels": ["kernels"],
    "speech": ["speech"],
    "drafters-audio": ["drafters", "--model", DEFAULT_WHISPER],
    "drafters-images": ["drafters", "--model", DEFAULT_VLM],
}

Names = Annotated[
    list[str] | None, typer.Option("--only", metavar="NAME", help="One of all; repeat it for several. Default: all.")
]


@with_report
def bench_all(
    only: Names = None,
    minutes: Annotated[float, typer.Option(min=0.01, help="Time limit in minutes of each benchmark.")] = 10.0,
    quick: Annotated[bool, typer.Option("--quick", help="The fewest repeats, sizes and inputs: does it work?")] = False,
    device: BenchDevice = "cpu",
    threads: BenchThreads = 2,
) -> BenchRun:
    """Run each benchmark in turn, in a process of its own, with a time limit.

    Benchmarks that did not finish are named. Then the exit code is 1.
    """
    unknown = sorted(set(only or ()) - COMMANDS.keys())
    if unknown:
        raise InputError(f"`--only` must be one of {', '.join(COMMANDS)}, but is {unknown[0]!r:.60}.")
    chosen = [name for name in COMMANDS if not only or name in only]
    runs: list[BenchRun] = []
    left_out: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mmdec-bench-") as folder:
        for name in chosen:
            path = Path(folder) / f"{name}.json"
            log(f"{name}: at most {minutes:g} minutes")
            reason = _run(_command(name, path, device, threads, quick, minutes), 60 * minutes)
            if reason:
                log(f"{name}: {reason}")
                left_out[name] = reason
            else:
                runs.append(load_run(path))
    return merge_runs([*runs, BenchRun((), left_out)])


QUICK: dict[str, list[str]] = {  # benchmark -> its options with `--quick`
    "drafters-audio": ["--max-new-tokens", "32"],
    "drafters-images": ["--per-kind", "1", "--max-new-tokens", "16"],
}


MEASURING_SHARE = 0.8  # of the time limit, after which a comparison of drafters begins no further input


def _command(name: str, path: Path, device: str, threads: int, quick: bool, minutes: float) -> list[str]:
    words = [sys.executable, "-m", "mmdec", "bench", *COMMANDS[name], "--json", str(path)]
    words += ["--device", device, "--threads", str(threads)]
    if COMMANDS[name][0] == "drafters":
        words += ["--minutes", str(MEASURING_SHARE * minutes)]
    return words + (["--repeats", "1", *QUICK.get(name, [])] if quick else [])


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
        Path | None, typer.Option(metavar="CSV", help="With --plot: a metrics.csv of Lightning, as training curves.")
    ] = None,
    json_to: JsonTo = None,
    markdown: MarkdownTo = None,
    plot: PlotTo = None,
    against: Against = None,
) -> None:
    """Show saved runs again: as a table, as Markdown, as plots, beside another run. Nothing is measured."""
    to = Destinations(json_to, markdown, plot, against, metrics)
    to.deliver(merge_runs([load_run(path) for path in files]))


app = typer.Typer(
    help="Time a model and its baseline in turn. Outputs are compared first: without equality there are no figures.",
    no_args_is_help=True,
    epilog="Example: mmdec bench all --quick",
)
app.command("all", **command_arguments("bench all --quick --json out/bench.json"))(bench_all)
app.command("show", **command_arguments("bench show out/bench.json --markdown out/bench.md"))(show_saved)

Pairs = Annotated[int, typer.Option("--repeats", min=1, help="Pairs of runs timed for each row of the report.")]


@app.command(**command_arguments("bench speech --repeats 3"))
@with_report
def speech(
    recordings: Annotated[
        list[Path] | None, typer.Argument(metavar="[IN]...", help="French recordings. Default: data/samples/*.wav.")
    ] = None,
    audio: AudioFiles = None,
    repeats: Pairs = 15,
    model: Model = DEFAULT_TRANSLATOR,
    judge: Judging = None,
    device: BenchDevice = "cpu",
    threads: BenchThreads = 2,
) -> BenchReport:
    """Time speech translation, file to samples: the DAG against autoregressive decoding.

    The times are by source length. Both are also compared with the translation of --judge.
    """
    from mmdec.bench.translation import bench_speech
    from mmdec.evaluation.judge import Judge

    paths = [*(recordings or ()), *(audio or ())] or sorted(Path("data/samples").glob("*.wav"))
    other = None if judge is None else Judge(judge, device, threads)
    return bench_speech(paths, model, repeats=repeats, device=device, threads=threads, judge=other, log=log)


@app.command(**command_arguments("bench kernels --device cuda"))
@with_report
def kernels(
    repeats: Pairs = 15,
    device: BenchDevice = "cpu",
    threads: BenchThreads = 1,
) -> BenchReport:
    """Time single operators of mmdec against torch's.

    On a GPU, Triton kernels against SDPA, FlexAttention and dense torch; on a CPU, mmdec's fast versions against plain
    torch.
    """
    from mmdec.bench.kernels import bench_kernels

    return bench_kernels(repeats=repeats, device=device, threads=threads, log=log)


@app.command(**command_arguments("bench drafters --model whisper-tiny.en --drafter medusa --drafter ctc"))
@partial(with_report, destinations=DrafterDestinations)
def drafters(model: Model, options: DrafterBenchOptions) -> BenchRun:
    """Time drafters in turn on the same inputs, against plain decoding and transformers' own loops.

    The inputs are prompts, recordings or pictures. A line is printed after each input.

    A drafter whose text differs from plain decoding has no figures. Then the exit code is 1.
    """
    from mmdec.bench.drafters import bench_drafters

    return bench_drafters(model, replace(options, audio=_expand_folders(options.audio)), log)


@app.command(**command_arguments("bench peer data/samples/english --model whisper-tiny.en"))
@with_report
def peer(
    recordings: Annotated[list[Path] | None, typer.Argument(metavar="[IN]...", help="Audio files, or folders.")] = None,
    audio: AudioFiles = None,
    model: Model = DEFAULT_WHISPER,
    engine: Annotated[str, typer.Option(help="The other engine: ctranslate2.")] = "ctranslate2",
    heads: Heads = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each engine decodes each recording.")] = 5,
    language: Language = "en",
    threads: BenchThreads = 2,
) -> BenchReport:
    """Time a Whisper here, in transformers and in another engine with the same weights, in float32 and int8."""
    from mmdec.bench.peer_transcription import bench_peer
    from mmdec.evaluation.harness import parse_language

    return bench_peer(
        _expand_folders([*(recordings or ()), *(audio or ())]),
        model,
        engine,
        heads=heads or AUTO,
        repeats=repeats,
        language=parse_language(language),
        threads=threads,
        log=log,
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
