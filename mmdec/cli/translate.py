"""`mmdec translate`: French audio files to English audio files."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmdec.checks.files import failure_message, json_text, printable
from mmdec.cli.inputs import AUDIO_FILES, InputFile, input_files, output_paths, write_error
from mmdec.cli.job_options import JobOptions
from mmdec.cli.options import (
    Device,
    Dtype,
    Inputs,
    JsonLines,
    Model,
    resolve_dtype,
    with_option_groups,
)
from mmdec.cli.outcomes import Outcomes, print_note
from mmdec.cli.progress import progress_bar, show_loading
from mmdec.daspeech.options import DEFAULT_TRANSLATOR, TranslateOptions
from mmdec.jobs.many import Work

if TYPE_CHECKING:
    from mmdec import Translation

AUDIO_SUFFIXES = (".wav", ".flac", ".ogg", ".mp3", ".opus", ".aiff", ".aif", ".au", ".caf", ".w64")


@with_option_groups
def translate(
    inputs: Inputs,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT",
            help="A folder; for one input also a .wav, .flac, .ogg or .mp3 file. Default: no sound, only the text.",
        ),
    ] = None,
    model: Model = DEFAULT_TRANSLATOR,
    as_json: JsonLines = False,
    device: Device = None,
    dtype: Dtype = None,
    options: TranslateOptions = TranslateOptions(),
    job: JobOptions = JobOptions(),
) -> None:
    """Translate French speech into English speech.

    If a file fails, the others are still translated. Failed files are listed, and the exit code is 1.
    """
    with show_loading(model, quiet=as_json):
        import mmdec
        from mmdec.daspeech.translate import load_translator

        keywords = replace(options, vocoder=None).changed()  # the vocoder is loaded with the model
        if job.has_many_inputs(inputs):
            work = Work(
                "translate",
                model,
                options=keywords,
                files=".wav",
                device=device,
                dtype=dtype,
                vocoder=None if options.vocoder is None else str(options.vocoder),
            )
            return job.run(work, inputs, output, AUDIO_FILES, {})
        files = input_files(inputs, AUDIO_FILES, output)
        targets = output_paths([file.path for file in files], output, AUDIO_SUFFIXES, ".wav")
        outcomes = Outcomes(files, targets, model)
        translator = load_translator(model, device, vocoder=options.vocoder, dtype=resolve_dtype(dtype, device))
    call = partial(mmdec.translate_speech, model=translator, **keywords)
    _translate_all(outcomes, call, as_json)
    outcomes.finish()


def _translate_all(outcomes: Outcomes, call: Callable[[Path], Translation], as_json: bool) -> None:
    """Translate all readable files with a progress bar, print the results, and record failures in `outcomes`.

    Args:
        call: Translates one path.
    """
    with progress_bar(count=True) as progress:
        task = progress.add_task("translating", total=len(outcomes.todo))
        for source, target in outcomes.todo:
            progress.update(task, description=source.path.name)
            report = _json_line if as_json else partial(_plain_lines, has_many_files=outcomes.has_many_files)
            done = _translate_file(source, target, call, report)
            if isinstance(done, str):
                outcomes.add_failure(source.name, done)
            else:
                outcomes.add_output(source.name, done)
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
            "seconds_audio": round(content["source_seconds"], 3),
            "seconds_taken": round(seconds, 4),
            "passes": content["passes"],
            "confidence": round(content["confidence"], 4),
            "note": content["note"],
            "timings": {stage: round(value, 5) for stage, value in content["timings"].items()},
        }
    )


def _plain_lines(source: Path, target: Path | None, result: Translation, seconds: float, has_many_files: bool) -> str:
    """Format one translation as text.

    Args:
        has_many_files: There are other inputs, so this input's name is printed.
    """
    if target is None:
        return f"{printable(str(source))}:\n  {result.text}" if has_many_files else result.text
    stages = ", ".join(f"{stage} {value:.3f}" for stage, value in result.timings.items())
    names = f"{printable(str(source))} -> {printable(str(target))}"
    return (
        f"{names}\n  {result.text}\n  {result.source_seconds:.2f} s of audio in {seconds:.3f} s: {stages}\n"
        f"  confidence {result.confidence:.2f}"
    )
