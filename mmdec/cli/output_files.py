"""Output files of the command line: their names, how they are written, and messages about inputs that failed."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmdec import InputError, MmdecError
from mmdec.checks.files import printable, reason, write_whole


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
