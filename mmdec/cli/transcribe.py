"""`mmdec transcribe`: sound files to text, subtitles or JSON. Heavy imports wait inside the verb."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmdec.checks.files import printable
from mmdec.cli.output_files import failure, json_text, output_paths, print_failures, unwritten, write_text
from mmdec.pipelines.transcription.transcript import FORMATS, SUBTITLES, clock
from mmdec.types import InputError, MmdecError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from mmdec.pipelines.transcription.transcript import Transcript

SUFFIXES = {"text": ".txt", "json": ".json", "srt": ".srt", "vtt": ".vtt"}


def transcribe(
    inputs: Annotated[list[Path], typer.Argument(metavar="IN...", help="Sound files with speech.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="OUT", help="A directory; for one input also a .txt, .json, .srt or .vtt file."
        ),
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--format", "-f", help="text, json, srt or vtt: of what is written or printed.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line for each file.")] = False,
    timestamps: Annotated[
        str | None, typer.Option("--timestamps", "-t", help="segment or word; subtitles have segments by themselves.")
    ] = None,
    model: Annotated[
        str, typer.Option("--model", "-m", help="A shipped name, a directory or a hub id.")
    ] = "whisper-phrasebook",
    drafter: Annotated[
        str, typer.Option("--drafter", "-d", help="medusa, lookup, recycling, a directory with heads, or none.")
    ] = "medusa",
    language: Annotated[
        str | None, typer.Option("--language", "-l", help="A name or a code; detected if left out.")
    ] = None,
    task: Annotated[str, typer.Option(help="transcribe, or translate (into English).")] = "transcribe",
    prompt: Annotated[str | None, typer.Option(help="Text that might have come before: names, spelling.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Recordings decoded together.")] = 8,
    temperature: Annotated[
        list[float] | None, typer.Option(help="0 is greedy; several, the fallback ladder. May be given several times.")
    ] = None,
    logprob_threshold: Annotated[
        float | None, typer.Option(help="Fall back below this mean log-probability; Whisper's own is -1.")
    ] = None,
    compression_ratio_threshold: Annotated[
        float | None, typer.Option(help="Fall back above this compression; Whisper's own is 1.35.")
    ] = None,
    no_speech_threshold: Annotated[
        float | None, typer.Option(help="Above this probability an unlikely window is silence; Whisper's own is 0.6.")
    ] = None,
    condition_on_prev_tokens: Annotated[
        bool, typer.Option("--condition-on-prev-tokens", help="Each window sees the text of the one before.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; a GPU is taken where there is one.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; torch chooses if left out.")] = None,
) -> None:
    """Write down what is said, with drafts for Whisper's decoder: its own text, in fewer passes.

    A file that cannot be transcribed does not stop the others: it is named at the end, and the exit code is 1.
    """
    kind = _kind(kind, output)
    if as_json and output is None and kind not in ("text", "json"):
        raise InputError(f"`--format` must be left out with `--json`, but is {kind!r}. Name an `--output` for it.")
    if kind in SUBTITLES:
        timestamps = timestamps or "segment"
    targets: list[Path | None] = [None] * len(inputs)
    if output is not None:
        targets = [*output_paths(inputs, output, tuple(SUFFIXES.values()), SUFFIXES[kind])]
    options: dict[str, Any] = {
        "drafter": None if drafter == "none" else drafter,
        "timestamps": timestamps,
        "language": language,
        "task": task,
        "prompt": prompt,
        "batch_size": batch_size,
        "threads": threads,
        "temperature": tuple(temperature) if temperature and len(temperature) > 1 else temperature and temperature[0],
        "logprob_threshold": logprob_threshold,
        "compression_ratio_threshold": compression_ratio_threshold,
        "no_speech_threshold": no_speech_threshold,
        "condition_on_prev_tokens": condition_on_prev_tokens or None,
    }
    errors: list[tuple[Path, str]] = []
    for at, found in _batches(inputs, batch_size, model, device, options):
        for source, target, result in zip(inputs[at:], targets[at:], found, strict=False):
            if isinstance(result, str):
                errors.append((source, result))
                continue
            if target is not None:
                try:
                    write_text(target, result.format(kind))
                except OSError as error:
                    errors.append((source, unwritten(target, error)))
                    continue
                except InputError as error:  # the output is a pipe, say
                    errors.append((source, failure(error)))
                    continue
            print(_report(source, target, result, kind, as_json, len(inputs) > 1), flush=True)
    print_failures(errors, len(inputs))
    if errors:
        raise typer.Exit(1)


def _batches(
    inputs: Sequence[Path], size: int, model: str, device: str | None, options: dict[str, Any]
) -> Iterator[tuple[int, list[Transcript | str]]]:
    """Batches of inputs, by the place of their first: what each gave, or why it gave nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    from transformers.utils import logging

    from mmdec.hub.whisper import load_whisper
    from mmdec.pipelines.transcription.transcribe import transcribe

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    whisper = load_whisper(model, device)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        for at in range(0, len(inputs), size):
            batch = list(inputs[at : at + size])
            task = progress.add_task(batch[0].name if len(batch) == 1 else f"{batch[0].name} ...", total=None)
            heard = partial(_advance, progress, task)
            found = _results(batch, partial(transcribe, model=whisper, progress=heard, **options))
            progress.remove_task(task)
            yield at, found


def _advance(progress: Progress, task: TaskID, done: float, whole: float) -> None:
    progress.update(task, completed=done, total=whole)


def _results(batch: list[Path], call: Callable[[Any], Any]) -> list[Transcript | str]:
    """What each file of a batch gave, or why it gave nothing."""
    from mmdec.pipelines.inputs import BatchError

    try:
        return [*call(batch)]
    except BatchError as error:
        return [one or str(error.errors[place]) for place, one in enumerate(error.results)]
    except MmdecError:
        raise  # the call was wrong, not a file
    except Exception as error:  # one file's doing, and nobody knows whose: each by itself
        if len(batch) == 1:
            return [failure(error)]
        return [result for one in batch for result in _results([one], call)]


def _kind(kind: str | None, output: Path | None) -> str:
    """The format: what is asked for, or what the output's name says."""
    named = next((name for name, suffix in SUFFIXES.items() if output and output.suffix.lower() == suffix), None)
    if output is not None and os.path.isdir(output):
        named = None
    if kind is not None and kind not in FORMATS:
        raise InputError(f"`--format` must be one of {', '.join(FORMATS)}, but is {kind!r}. Choose one.")
    if kind is not None and named is not None and kind != named:
        raise InputError(f"`--format` must fit `--output`, '{output}', but is {kind!r}. Leave it out.")
    return kind or named or "text"


def _report(source: Path, target: Path | None, result: Transcript, kind: str, as_json: bool, several: bool) -> str:
    """What is printed for a file."""
    if as_json:
        where = {"input": str(source), "output": None if target is None else str(target)}
        return json_text({**where, **result.to_dict()})
    if target is not None:
        spent = ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in result.timings.items())
        return (
            f"{printable(str(source))} -> {printable(str(target))}\n  {result.text}\n"
            f"  {result.seconds:.2f} s of audio in "
            f"{result.timings['total']:.3f} s: {spent}; {result.tokens_per_round:.2f} tokens a round"
        )
    if kind != "text":
        return result.format(kind).rstrip("\n")
    lines = [f"[{clock(one.start)} --> {clock(one.end)}] {one.text}" for one in result.segments] or [result.text]
    return "\n".join([f"{printable(str(source))}:", *(f"  {line}" for line in lines)] if several else lines)
