"""`mmdec` on the command line: translate, transcribe, eval, bench, train, promote, demo.

Heavy imports wait inside the verbs.

Results go to stdout, progress and errors to stderr. Exit codes: 0 done, 1 some inputs failed, 2 the call was wrong.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmdec import __version__
from mmdec.checks.arguments import check_finite, check_threads
from mmdec.checks.files import printable
from mmdec.cli import asr as cli_asr
from mmdec.cli.asr import Output, write_json
from mmdec.cli.output_files import failure, json_text, output_paths, print_failures, unwritten
from mmdec.cli.transcribe import transcribe
from mmdec.types import MmdecError

if TYPE_CHECKING:
    from mmdec.pipelines.translation.translate import Translation

SOUND_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3", ".opus", ".aiff", ".aif", ".au", ".caf", ".w64")

app = typer.Typer(
    name="mmdec",
    help="French speech in, English speech out; speech in, text out: decoded in parallel.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
eval_app = typer.Typer(help="Score a model on a split of its corpus.", no_args_is_help=True)
bench_app = typer.Typer(help="Time a model, interleaved with its baseline.", no_args_is_help=True)
convert_app = typer.Typer(help="Bring published weights into mmdec's form.", no_args_is_help=True)
app.add_typer(convert_app, name="convert")
app.add_typer(eval_app, name="eval")
app.add_typer(bench_app, name="bench")
app.command()(transcribe)
eval_app.command("asr")(cli_asr.eval_asr)
bench_app.command("asr")(cli_asr.bench_asr)

Strategy = Annotated[
    str, typer.Option("--strategy", "-s", help="lookahead, greedy, viterbi, joint-viterbi, autoregressive or verified.")
]
Model = Annotated[str, typer.Option("--model", "-m", help="A shipped name, a directory or a hub id.")]
Device = Annotated[str | None, typer.Option("--device", help="cpu or cuda; a GPU is taken where there is one.")]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; torch chooses if left out.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@convert_app.command("medusa")
def convert_medusa(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A directory with the published checkpoint.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="A new directory for the heads.")],
) -> None:
    """Medusa heads for Whisper as published by aiola, safetensors only."""
    from mmdec.hub.medusa import convert

    print(convert(source, output))


@convert_app.command("hifigan")
def convert_hifigan(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The generator file, its config.json beside it.")],
    output: Annotated[Path, typer.Argument(metavar="OUT", help="A new directory for --vocoder.")],
) -> None:
    """A HiFi-GAN generator as its authors publish it, a pickle, of which tensors alone are read."""
    from mmdec.nn.hifigan import convert

    print(convert(source, output))


@app.command()
def translate(
    inputs: Annotated[list[Path], typer.Argument(metavar="IN...", help="Sound files with French speech.")],
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="OUT", help="A directory; for one input also a .wav, .flac, .ogg or .mp3 file."
        ),
    ],
    strategy: Strategy = "lookahead",
    verify: Annotated[
        bool, typer.Option("--verify", help="The autoregressive decoder's own output, in a few passes over drafts.")
    ] = False,
    model: Model = "daspeech-phrasebook",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line for each file.")] = False,
    device: Device = None,
    threads: Threads = None,
    vocoder: Annotated[
        str | None,
        typer.Option(help="griffin-lim, or HiFi-GAN weights: a directory or hub id. The model's own if none."),
    ] = None,
) -> None:
    """Translate French speech into English speech.

    A file that cannot be translated does not stop the others: it is named at the end, and the exit code is 1.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from mmdec.pipelines.translation.load import load
    from mmdec.pipelines.translation.translate import translate_speech
    from mmdec.pipelines.translation.translator import check_strategy
    from mmdec.runtime import Stopwatch

    if verify:
        strategy = "verified"
    check_strategy(strategy)
    targets = output_paths(inputs, output, SOUND_SUFFIXES, ".wav")
    count = check_threads(threads)
    if count is not None:
        import torch

        torch.set_num_threads(count)
    translator = load(model, device, vocoder=vocoder)
    errors: list[tuple[Path, str]] = []
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("translating", total=len(inputs))
        for source, target in zip(inputs, targets, strict=True):
            progress.update(task, description=source.name)
            stopwatch = Stopwatch()
            try:
                result = translate_speech(source, model=translator, strategy=strategy)
                result.save(target)
            except OSError as error:  # not the input's: reading raises InputError
                errors.append((source, unwritten(target, error)))
            except Exception as error:  # whatever one file does, the others are translated
                errors.append((source, failure(error)))
            else:
                taken = stopwatch.lap()
                report = _json_line if as_json else _plain_lines
                progress.console.file.flush()
                print(report(source, target, result, taken), flush=True)
            progress.advance(task)
    print_failures(errors, len(inputs))
    if errors:
        raise typer.Exit(1)


@eval_app.command("speech")
def eval_speech(
    split: Annotated[str, typer.Option(help="test, test_voices or dev.")] = "test",
    corpus: Annotated[Path, typer.Option(help="The corpus's folder.")] = Path("data/corpus"),
    model: Model = "daspeech-phrasebook",
    strategy: Annotated[list[str] | None, typer.Option("--strategy", "-s", help="May be given several times.")] = None,
    common_voice: Annotated[Path | None, typer.Option(help="Common Voice's folder, if not in the corpus.")] = None,
    cvss: Annotated[Path | None, typer.Option(help="CVSS's folder, if not in the corpus.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="So many utterances, evenly spaced.")] = None,
    asr: Annotated[bool, typer.Option(help="ASR-BLEU too, with pocketsphinx.")] = True,
    output: Output = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of a table.")] = False,
    device: Device = None,
    threads: Annotated[int, typer.Option("--threads", min=1, help="CPU threads.")] = 2,
) -> None:
    """Phone errors, exact sentences, BLEU, numbers, ASR-BLEU and latency on a split."""
    from rich.console import Console

    from mmdec.evaluation import tables as scorecard
    from mmdec.evaluation import translation as evaluate

    report = evaluate.evaluate_speech(
        split,
        corpus,
        model,
        strategy or evaluate.COMPARED,
        common_voice=common_voice,
        cvss=cvss,
        limit=limit,
        asr=asr,
        device=device,
        threads=threads,
        log=lambda line: print(line, file=sys.stderr),
    )
    write_json(report, output)
    if as_json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        Console().print(scorecard.table(report))


@bench_app.command("speech")
def bench_speech(
    recordings: Annotated[
        list[Path] | None, typer.Argument(metavar="IN...", help="French; data/samples if none.")
    ] = None,
    output: Output = None,
    repeats: Annotated[int, typer.Option(min=1, help="Pairs timed for each length.")] = 15,
    model: Model = "daspeech-phrasebook",
    device: Device = "cpu",
    threads: Annotated[int, typer.Option("--threads", min=1, help="CPU threads.")] = 2,
) -> None:
    """The shipped model: graph against autoregressive decoding over length, and wav to wav."""
    from mmdec.evaluation import bench_translation as bench

    found = recordings or sorted(Path("data/samples").glob("*.wav"))
    report = bench.bench_speech(found, model, repeats=repeats, device=device or "cpu", threads=threads)
    write_json(report, output)
    print(json.dumps(report, indent=2))


@bench_app.command("paper")
def bench_paper(
    output: Output = None,
    repeats: Annotated[int, typer.Option(min=1, help="Pairs timed for each length.")] = 5,
    device: Device = "cpu",
    threads: Annotated[int, typer.Option("--threads", min=1, help="CPU threads.")] = 2,
) -> None:
    """The paper-sized model with random weights against an S2UT-shaped decoder: timing only."""
    from mmdec.evaluation import bench_translation as bench

    report = bench.bench_paper(repeats=repeats, device=device or "cpu", threads=threads)
    write_json(report, output)
    print(json.dumps(report, indent=2))


@bench_app.command("core")
def bench_core(
    output: Output = None,
    repeats: Annotated[int, typer.Option(min=1, help="Pairs timed for each ratio.")] = 5,
    sizes: Annotated[str, typer.Option(help="2M, 30M, 130M, with commas.")] = "2M,30M,130M",
    device: Device = "cpu",
    threads: Annotated[int, typer.Option("--threads", min=1, help="CPU threads.")] = 2,
) -> None:
    """The verification core against transformers' own loops, on language models with random weights."""
    from mmdec.evaluation import bench_core

    report = bench_core.bench_core(sizes.split(","), repeats, device=device or "cpu", threads=threads)
    write_json(report, output)
    print(json.dumps(report, indent=2))


@app.command()
def train(
    minutes: Annotated[float, typer.Option(min=0.1, max=100_000, help="How long to train or resume.")] = 25.0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start from random weights; runs/ is set aside.")] = False,
) -> None:
    """Train, or resume, every shipped model by priority within the time given."""
    begun = time.time()  # loading what trains is part of the minutes
    check_finite("minutes", minutes, "Give 25, for instance.")
    from mmdec.training.make_train import main as allot

    allot(minutes, fresh, begun=begun)


@app.command()
def promote(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A model that `make train` made: runs/whisper-phrasebook.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Also a model that is not better.")] = False,
    corpus: Annotated[Path | None, typer.Option(help="Where it is measured; the system's own if left out.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="So many utterances of each split, evenly spaced.")] = None,
    threads: Annotated[int, typer.Option("--threads", min=1, help="CPU threads.")] = 2,
) -> None:
    """Put a better model into models/, whole, with a card of what is measured here."""
    from mmdec.evaluation import promotion

    place = promotion.promote(
        run, force=force, corpus=corpus, limit=limit, threads=threads, log=lambda line: print(line, file=sys.stderr)
    )
    print(f"{place}: weights, card and provenance are new. README.md still has the old tables.")


@app.command()
def demo(
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to serve on.")] = 7860,
    share: Annotated[bool, typer.Option(help="Ask Gradio for a public link.")] = False,
) -> None:
    """Open the page that records or takes a file and plays its translation."""
    from runpy import run_path

    from mmdec.hub import demo_file

    run_path(str(demo_file()))["serve"](port=port, share=share)


def _json_line(source: Path, target: Path, result: Translation, taken: float) -> str:
    return json_text(
        {
            "input": str(source),
            "output": str(target),
            "text": result.text,
            "units": result.units,
            "seconds_audio": round(result.seconds_source, 3),
            "seconds_taken": round(taken, 4),
            "passes": result.passes,
            "timings": {stage: round(seconds, 5) for stage, seconds in result.timings.items()},
        }
    )


def _plain_lines(source: Path, target: Path, result: Translation, taken: float) -> str:
    stages = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in result.timings.items())
    names = f"{printable(str(source))} -> {printable(str(target))}"
    return f"{names}\n  {result.text}\n  {result.seconds_source:.2f} s of audio in {taken:.3f} s: {stages}"


def main() -> None:
    """The console script: mmdec's own errors become one line on stderr."""
    try:
        app()
    except MmdecError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
