"""Output files of the command line: their names, how they are written, and messages about inputs that failed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from mmdec import InputError, MmdecError
from mmdec.checks.files import printable, reason, write_whole
from mmdec.cli.input_files import InputFile

LIKELY_WRONG = 0.5  # confidences below it are warned of


def output_paths(
    inputs: Sequence[Path], output: Path, suffixes: Sequence[str], suffix: str, count: int | None = None
) -> list[Path]:
    """The output file of each input: `output` itself, if it ends in one of `suffixes`, or a file in the directory
    `output` that ends in `suffix`. Inputs with the same name get different outputs; no input is overwritten.

    count: of outputs, named as the first inputs are; None: one for each input."""
    named = inputs[:count]
    above = next((folder for folder in output.parents if os.path.lexists(folder)), None)
    if above is not None and not os.path.isdir(above):
        raise InputError(f"`--output` must lie in a directory, but '{above}' is none. Name another.")
    if output.suffix.lower() in suffixes and not os.path.isdir(output):
        if len(named) > 1:
            raise InputError(
                f"`--output` must be a directory for {len(named)} inputs, but is '{output}'. Name a directory."
            )
        targets = [output]
    else:
        if os.path.lexists(output) and not os.path.isdir(output):
            raise InputError(f"`--output` must be a directory or a {suffix} file, but is '{output}'. Name another.")
        taken = set[Path]()
        targets = []
        for source in named:
            target, number = output / f"{source.stem}{suffix}", 2
            while target in taken:
                target, number = output / f"{source.stem}-{number}{suffix}", number + 1
            targets.append(target)
            taken.add(target)
    sources = {os.path.realpath(source) for source in inputs}  # resolve() raises where links go in circles
    for target in targets:
        if os.path.realpath(target) in sources:
            raise InputError(f"`--output` must not overwrite an input, but '{target}' is one. Name another directory.")
    return targets


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text in one step: on an error the old one stays. Missing folders are created."""
    write_whole(path, text.encode("utf-8"))


def json_text(value: Any, indent: int | None = None) -> str:
    """Readable JSON. Bytes of a file name that are no UTF-8 are escaped, so that JSON readers get the same name."""
    return json.dumps(value, indent=indent, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def unwritten(path: Path, error: OSError) -> str:
    """The message for an output that could not be written."""
    return f"the output '{printable(str(path))}' cannot be written: {reason(error)}"


def failure(error: Exception) -> str:
    """The message for an input that failed, in one line; for errors other than mmdec's own, with their type."""
    return str(error) if isinstance(error, MmdecError) else f"{type(error).__name__}: {printable(str(error))}"


def print_refused(files: Sequence[InputFile]) -> int:
    """Print on stderr, before anything is loaded, which paths cannot be read. Returns how many."""
    refused = [(file.path, file.refusal) for file in files if file.refusal]
    print_failures(refused)
    return len(refused)


def print_failures(failed: Sequence[tuple[Path, str]]) -> None:
    """Print the failed files with their messages on stderr."""
    for source, message in failed:
        print(f"failed: {printable(str(source))}: {message}", file=sys.stderr)


def end(failed: Sequence[tuple[Path, str]], refused: int, total: int) -> None:
    """Print the failed files, and how many there are with those refused at the beginning; exit with 1 if any."""
    print_failures(failed)
    if count := len(failed) + refused:
        print(f"{count} of {total} files failed", file=sys.stderr)
        raise typer.Exit(1)


def print_unsure(results: Sequence[tuple[object, float]], model: str) -> None:
    """Warn on stderr of each output, (its input's name, its confidence), that is likely wrong. Only a model whose
    confidence was fitted is believed."""
    unsure = [(name, value) for name, value in results if value < LIKELY_WRONG]
    if not unsure or not _fitted(model):
        return
    for name, value in unsure:
        print(
            f"warning: {printable(str(name))}: the output is likely wrong: its confidence is {value:.2f}, below "
            f"{LIKELY_WRONG}.",
            file=sys.stderr,
        )


def _fitted(model: str) -> bool:
    """Whether the model's folder holds a curve of confidence."""
    from mmdec.hub.find import find
    from mmdec.pipelines.confidence import FILE, read_calibrations

    try:
        return bool(read_calibrations(find(model, files=["config.json", FILE])))
    except InputError:  # gone meanwhile
        return False
