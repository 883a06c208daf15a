"""Inputs of the command line: files, and folders of them. What is wrong with a path is found before a model is loaded.

The suffixes only say which files of a folder are meant; what a file is, its content says.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from mmdec import InputError
from mmdec.checks.files import open_regular, reason, shown_path

SOUNDS = (
    *(".wav", ".flac", ".ogg", ".oga", ".mp3", ".opus", ".aiff", ".aif", ".au", ".caf", ".w64"),
    *(".m4a", ".m4b", ".mp4", ".mov", ".webm", ".mka", ".mkv"),
)
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


@final
@dataclass(frozen=True)
class InputFile:
    """A path as it was given, or one of a given folder; refusal: why it cannot be read, or ""."""

    name: str
    refusal: str = ""

    @property
    def path(self) -> Path:
        return Path(self.name)


def input_files(
    given: Iterable[str | Path], argument: str, suffixes: Sequence[str], output: Path | None
) -> list[InputFile]:
    """The files, those of folders and of the folders in them in the order of their names.

    argument: what an error calls a file. suffixes: of the files of a folder. output: a folder of outputs, whose files
    are no inputs.
    """
    return [file for name in given for file in _files(str(name), argument, suffixes, output)]


def together_as_one(files: Sequence[InputFile]) -> InputFile:
    """Several files that are one input: what is wrong with one of them is wrong with it."""
    refusal = next((file.refusal for file in files if file.refusal), "")
    return InputFile(", ".join(file.name for file in files), refusal)


def _files(name: str, argument: str, suffixes: Sequence[str], output: Path | None) -> Iterator[InputFile]:
    if not os.path.isdir(name):
        yield InputFile(name, _refusal(name, argument))
        return
    own, found = None if output is None else os.path.realpath(output), 0
    for folder, folders, names in os.walk(name, onerror=(errors := list[OSError]()).append):
        inside = (one for one in sorted(folders) if not one.startswith("."))
        folders[:] = [one for one in inside if os.path.realpath(os.path.join(folder, one)) != own]
        for file in sorted(names):
            if file.lower().endswith(tuple(suffixes)) and not file.startswith("."):
                found += 1
                path = os.path.join(folder, file)
                yield InputFile(path, _refusal(path, argument))
    for error in errors:
        place = str(error.filename)
        rule = f"`{argument}` must be a folder that can be read, but '{shown_path(place)}' is not"
        yield InputFile(place, f"{rule} ({reason(error)}). Check its permissions.")
    if not found and not errors:
        ending = ", ".join(suffixes)
        rule = f"`{argument}` must be a file or hold some, but '{shown_path(name)}' is a directory"
        yield InputFile(name, f"{rule} without any that ends in {ending}. Name the files in it.")


def _refusal(name: str, argument: str) -> str:
    try:
        with open_regular(name, argument):
            return ""
    except InputError as error:
        return str(error)
