"""Where results go on disk: one name for each input, and files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mmdec.types import InputError


def output_paths(inputs: Sequence[Path], output: Path, suffixes: Sequence[str], suffix: str) -> list[Path]:
    """Where each input's result goes: the file `output`, if it ends in one of `suffixes`, or a file in the directory
    `output` that ends in `suffix`. Two inputs of one name get two outputs; no input is overwritten."""
    if output.suffix.lower() in suffixes and not output.is_dir():
        if len(inputs) > 1:
            raise InputError(
                f"`--output` must be a directory for {len(inputs)} inputs, but is '{output}'. Name a directory."
            )
        targets = [output]
    else:
        if output.exists() and not output.is_dir():
            raise InputError(f"`--output` must be a directory or a {suffix} file, but is '{output}'. Name another.")
        targets = []
        for source in inputs:
            target, number = output / f"{source.stem}{suffix}", 2
            while target in targets:
                target, number = output / f"{source.stem}-{number}{suffix}", number + 1
            targets.append(target)
    sources = {source.resolve() for source in inputs}
    for target in targets:
        if target.resolve() in sources:
            raise InputError(f"`--output` must not overwrite an input, but '{target}' is one. Name another directory.")
    return targets


def write_text(path: Path, text: str) -> None:
    """UTF-8, with the folder it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
