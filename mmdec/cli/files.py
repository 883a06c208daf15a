"""Files of the command line: input files and folders, output files and how they are written, and messages about
failures.

Wrong paths are reported before a model is loaded. Suffixes only select files in a folder; the type of a file is
detected from its content.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from mmdec import InputError
from mmdec.checks.files import failure, open_regular, printable, reason, shown_path, write_whole

SOUNDS = (
    *(".wav", ".flac", ".ogg", ".oga", ".mp3", ".opus", ".aiff", ".aif", ".au", ".caf", ".w64"),
    *(".m4a", ".m4b", ".mp4", ".mov", ".webm", ".mka", ".mkv"),
)
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff")


@final
@dataclass(frozen=True)
class InputFile:
    """A given path, or one in a given folder. refusal: why it cannot be read, or ""."""

    name: str
    refusal: str = ""

    @property
    def path(self) -> Path:
        return Path(self.name)


def input_files(
    given: Iterable[str | Path], argument: str, suffixes: Sequence[str], output: Path | None
) -> list[InputFile]:
    """The given files, and the files in given folders and their subfolders, sorted by name.

    argument: the word for a file in errors. suffixes: suffixes of the files to take from a folder. output: a folder of
        outputs, whose files are not inputs.
    """
    return [file for name in given for file in _files(str(name), argument, suffixes, output)]


def together_as_one(files: Sequence[InputFile]) -> InputFile:
    """Combine several files that form one input; if one of them is refused, the input is refused."""
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


def output_paths(
    inputs: Sequence[Path], output: Path, suffixes: Sequence[str], suffix: str, count: int | None = None
) -> list[Path]:
    """The output file of each input: `output` itself, if it ends in one of `suffixes`, or a file in the directory
    `output` that ends in `suffix`. Inputs with the same name get different outputs; no input is overwritten.

    count: number of outputs, named after the first inputs; None: one for each input.
    """
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
    sources = {os.path.realpath(source) for source in inputs}  # resolve() raises for circular links
    for target in targets:
        if os.path.realpath(target) in sources:
            raise InputError(f"`--output` must not overwrite an input, but '{target}' is one. Name another directory.")
    return targets


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text in one step; on an error the old file stays. Missing folders are created."""
    write_whole(path, text.encode("utf-8"))


def unwritten(path: Path, error: OSError) -> str:
    """The message for an output that could not be written."""
    return f"the output '{printable(str(path))}' cannot be written: {reason(error)}"


def try_write(target: Path | None, text: str) -> str:
    """Write an output if it has a file. Returns the error message, or ""."""
    if target is None:
        return ""
    try:
        write_text(target, text)
    except OSError as error:
        return unwritten(target, error)
    except InputError as error:  # the output is a pipe, for example
        return failure(error)
    return ""
