"""`mmdec translate`: French audio files to English audio files."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmdec.checks.arguments import check_threads
from mmdec.checks.files import failure_message, json_text, printable
from mmdec.cli.jobs import (
    SOUNDS,
    CommandJobs,
    InputFile,
    input_files,
    loading,
    output_paths,
    print_note,
    progress_bar,
    write_error,
)
from mmdec.cli.options import (
    SPEECH_MODEL,
    Device,
    Dtype,
    Inputs,
    JsonLines,
    MinConfidence,
    Model,
    Strict,
    Threads,
    dtype_or_quick,
)
from mmdec.cli.spread import SpreadOptions, Work, with_spread

if TYPE_CHECKING:
    from mmdec import Translation

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3", ".opus", ".aiff", ".aif", ".au", ".caf", ".w64")

Strategy = Annotated[
    str | None,
    typer.Option(
        "--strategy",
        "-s",
        help="How text is decoded: lookahead, greedy, viterbi, joint-viterbi or beam through the DAG; reranked (the "
        "best of the DAG's texts); autoregressive; or verified (its output, in fewer passes). Default: what the "
        "model's config.json says.",
    ),
]


@with_spread
def translate(
    inputs: Inputs,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT",
            help="A directory; for one input also a .wav, .flac, .ogg or .mp3 file. Default: no sound, the text alone.",
        ),
    ] = None,
    strategy: Strategy = None,
    verify: Annotated[bool, typer.Option("--verify", help="The same as --strategy verified.")] = False,
    model: Model = SPEECH_MODEL,
    as_json: JsonLines = False,
    device: Device = None,
    dtype: Dtype = None,
    threads: Threads = None,
    vocoder: Annotated[
        str | None,
        typer.Option(help="HiFi-GAN weights: a directory or a Hugging Face id. Default: the model's own."),
    ] = None,
    min_confidence: MinConfidence = None,
    strict: Strict = False,
    spread: SpreadOptions = SpreadOptions(),
) -> None:
    """Translate French speech into English speech.

    If a file fails, the others are still translated. Failed files are listed, and the exit code is 1.
    """
    with loading(model, quiet=as_json):
        import mmdec
        from mmdec.daspeech.translate import load, resolve_strategy

        strategy = resolve_strategy(strategy, verify)
        check_threads(threads)
        options: dict[str, Any] = {"strategy": strategy, "min_confidence": min_confidence}
        options |= {"threads": threads, "strict": strict}
        if spread.has_many_inputs(inputs):
            work = Work("translate", model, options=options, files=".wav", device=device, dtype=dtype, vocoder=vocoder)
            return spread.run(work, inputs, output, ("audio", SOUNDS), {})
        files = input_files(inputs, "audio", SOUNDS, output)
        targets = output_paths([file.path for file in files], output, AUDIO_SUFFIXES, ".wav")
        jobs = CommandJobs(files, targets, model)
        translator = load(model, device, vocoder=vocoder, dtype=dtype_or_quick(dtype, device))
    call = partial(mmdec.translate_speech, model=translator, **options)
    _translate_all(jobs, call, as_json)
    jobs.end()


def _translate_all(jobs: CommandJobs, call: Callable[[Path], Translation], as_json: bool) -> None:
    """Translate all readable files with a progress bar, print the results, and record failures in `jobs`.

    Args:
        call: Translates one path.
    """
    with progress_bar(count=True) as progress:
        task = progress.add_task("translating", total=len(jobs.todo))
        for source, target in jobs.todo:
            progress.update(task, description=source.path.name)
            report = _json_line if as_json else partial(_plain_lines, several=jobs.several)
            done = _translate_file(source, target, call, report)
            if isinstance(done, str):
                jobs.failed(source.name, done)
            else:
                jobs.done(source.name, done)
            progress.advance(task)


def _translate_file(
    source: InputFile, target: Path | None, call: Callable[[Path], Translation], report: Callable[..., str]
) -> float | str:
    """Translate one file, and print the result.

    Args:
        target: Where the sound is written; None: nowhere.
        call: Translates a path.
        report: Formats the result from (source, target, result, seconds).

    Returns:
        The confidence of the translation, or the error message.
    """
    start = time.monotonic()
    try:
        result = call(source.path)
        if target is not None:
            result.save(target)
    except OSError as error:  # writing the output failed; errors of reading the input are InputErrors
        return failure_message(error) if target is None else write_error(target, error)
    except Exception as error:  # all exceptions, because an error in one file must not stop the others
        return failure_message(error)
    seconds = time.monotonic() - start
    sys.stderr.flush()
    print(report(source.path, target, result, seconds), flush=True)
    print_note(source.name, result.note)
    return result.confidence


def _json_line(source: Path, target: Path | None, result: Translation, seconds: float) -> str:
    """Format one translation as a line of JSON.

    Args:
        seconds: Wall clock of the call.
    """
    content = result.to_dict()
    return json_text(
        {
            "input": str(source),
            "output": None if target is None else str(target),
            "text": content["text"],
            "units": content["units"],
            "seconds_audio": round(content["seconds_source"], 3),
            "seconds_taken": round(seconds, 4),
            "passes": content["passes"],
            "confidence": round(content["confidence"], 4),
            "note": content["note"],
            "timings": {stage: round(value, 5) for stage, value in content["timings"].items()},
        }
    )


def _plain_lines(source: Path, target: Path | None, result: Translation, seconds: float, several: bool) -> str:
    """Format one translation as text.

    Args:
        several: There are other inputs, so this input's name is printed.
    """
    if target is None:
        return f"{printable(str(source))}:\n  {result.text}" if several else result.text
    stages = ", ".join(f"{stage} {value:.3f}" for stage, value in result.timings.items())
    names = f"{printable(str(source))} -> {printable(str(target))}"
    return (
        f"{names}\n  {result.text}\n  {result.seconds_source:.2f} s of audio in {seconds:.3f} s: {stages}\n"
        f"  confidence {result.confidence:.2f}"
    )
