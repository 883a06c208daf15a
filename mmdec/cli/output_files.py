"""Where results go: one name on disk for each input, and what is said of those that gave none."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mmdec.checks.files import printable, reason, write_whole
from mmdec.types import InputError, MmdecError


def output_paths(inputs: Sequence[Path], output: Path, suffixes: Sequence[str], suffix: str) -> list[Path]:
    """Where each input's result goes: the file `output`, if it ends in one of `suffixes`, or a file in the directory
    `output` that ends in `suffix`. Two inputs of one name get two outputs; no input is overwritten."""
    if output.suffix.lower() in suffixes and not os.path.isdir(output):
        if len(inputs) > 1:
            raise InputError(
                f"`--output` must be a directory for {len(inputs)} inputs, but is '{output}'. Name a directory."
            )
        targets = [output]
    else:
        if os.path.lexists(output) and not os.path.isdir(output):
            raise InputError(f"`--output` must be a directory or a {suffix} file, but is '{output}'. Name another.")
        targets = []
        for source in inputs:
            target, number = output / f"{source.stem}{suffix}", 2
            while target in targets:
                target, number = output / f"{source.stem}-{number}{suffix}", number + 1
            targets.append(target)
    sources = {os.path.realpath(source) for source in inputs}  # resolve() raises where links go in circles
    for target in targets:
        if os.path.realpath(target) in sources:
            raise InputError(f"`--output` must not overwrite an input, but '{target}' is one. Name another directory.")
    return targets


def write_text(path: Path, text: str) -> None:
    """UTF-8, with the folder it needs."""
    write_whole(path, text.encode("utf-8"))


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON for people. A name's bytes that are no UTF-8 are escaped as JSON has it, and read back as the same name."""
    return json.dumps(value, indent=indent, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def unwritten(path: Path, error: OSError) -> str:
    """Why a result is not where it should be: the system's words, and not the input's fault."""
    return f"the output '{printable(str(path))}' cannot be written: {reason(error)}"


def failure(error: Exception) -> str:
    """Why a file gave nothing, in one line: mmdec's own words, or another's with the kind of its error."""
    return str(error) if isinstance(error, MmdecError) else f"{type(error).__name__}: {printable(str(error))}"


def print_failures(failed: Sequence[tuple[Path, str]], total: int) -> None:
    """Name the files that failed, and how many they are, on stderr."""
    for source, message in failed:
        print(f"failed: {printable(str(source))}: {message}", file=sys.stderr)
    if failed:
        print(f"{len(failed)} of {total} files failed", file=sys.stderr)
