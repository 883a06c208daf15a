"""Files that the subcommands read and write: those that the user names, those in folders, and where outputs go.

Wrong paths are reported before a model is loaded. Suffixes only select files in a folder; the type of a file is
detected from its content.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final
from unicodedata import normalize

from mmdec import InputError
from mmdec.checks.files import error_reason, failure_message, open_regular, printable, quote_path, write_atomically
from mmdec.io.suffixes import PICTURE_SUFFIXES, SOUND_SUFFIXES


@final
@dataclass(frozen=True)
class FileKind:
    """A kind of input files."""

    argument: str  # the call's argument that takes them, for errors
    suffixes: tuple[str, ...]  # the files to take from folders


AUDIO_FILES = FileKind("audio", SOUND_SUFFIXES)
IMAGE_FILES = FileKind("image", PICTURE_SUFFIXES)


@final
@dataclass(frozen=True)
class InputFile:
    """A file that the user named, or a file in a folder that the user named.

    Args:
        refusal: Why the file cannot be read; "" if it can be read.
    """

    name: str
    refusal: str = ""

    @property
    def path(self) -> Path:
        return Path(self.name)


def input_files(paths: Iterable[str | Path], kind: FileKind, output: Path | None) -> list[InputFile]:
    """List the given files, and the files in given folders and their subfolders, sorted by name.

    Args:
        output: The folder of the outputs, whose files are not inputs; None: there is none.
    """
    return [file for name in paths for file in _files(str(name), kind, output)]


def combine_files(files: Sequence[InputFile]) -> InputFile:
    """Combine files into one input, for a question about several pictures.

    If one file cannot be read, the input cannot be read.
    """
    refusal = next((file.refusal for file in files if file.refusal), "")
    return InputFile(", ".join(file.name for file in files), refusal)


def _files(name: str, kind: FileKind, output: Path | None) -> Iterator[InputFile]:
    argument, suffixes = kind.argument, kind.suffixes
    if not os.path.isdir(name):
        yield InputFile(name, _refusal(name, argument))
        return
    output_path, count = None if output is None else os.path.realpath(output), 0
    for folder, folders, names in os.walk(name, onerror=(errors := list[OSError]()).append):
        inside = (folder_name for folder_name in sorted(folders) if not folder_name.startswith("."))
        folders[:] = [
            folder_name for folder_name in inside if os.path.realpath(os.path.join(folder, folder_name)) != output_path
        ]
        for file in sorted(names):
            if file.lower().endswith(tuple(suffixes)) and not file.startswith("."):
                count += 1
                path = os.path.join(folder, file)
                yield InputFile(path, _refusal(path, argument))
    for error in errors:
        place = str(error.filename)
        rule = f"`{argument}` must be a folder that can be read, but '{quote_path(place)}' is not"
        yield InputFile(place, f"{rule} ({error_reason(error)}). Check its permissions.")
    if not count and not errors:
        ending = ", ".join(suffixes)
        rule = f"`{argument}` must be a file or hold some, but '{quote_path(name)}' is a folder"
        yield InputFile(name, f"{rule} without any that ends in {ending}. Name the files in it.")


def _refusal(name: str, argument: str) -> str:
    try:
        with open_regular(name, argument):
            return ""
    except InputError as error:
        return str(error)


def output_paths(
    inputs: Sequence[Path], output: Path | None, suffixes: Sequence[str], suffix: str, count: int | None = None
) -> Sequence[Path | None]:
    """Choose the output file of each input.

    If `output` ends in one of `suffixes`, it is the file of the only input. Else it is a folder, and each input gets
    a file there, with its own name and `suffix`. Inputs with the same name get different files. Names that differ only
    in case or in the encoding of accents count as the same, because some file systems do not distinguish them.

    Args:
        count: Only the first `count` inputs get a file; None: all do.

    Returns:
        The paths; if `output` is None, None for each input: nothing is written.

    Raises:
        InputError: For an impossible output, or an output that would overwrite an input.
    """
    named = inputs[:count]
    if output is None:
        return [None] * len(named)
    above = next((folder for folder in output.parents if os.path.lexists(folder)), None)
    if above is not None and not os.path.isdir(above):
        raise InputError(f"`--output` must lie in a folder, but '{above}' is not one.")
    if output.suffix.lower() in suffixes and not os.path.isdir(output):
        if len(named) > 1:
            raise InputError(f"`--output` must be a folder for {len(named)} inputs, but is '{output}'. Name a folder.")
        targets = [output]
    else:
        if os.path.lexists(output) and not os.path.isdir(output):
            raise InputError(f"`--output` must be a folder or a {suffix} file, but is '{output}'.")
        used_paths = set[str]()
        targets = []
        for source in named:
            name, number = source.stem, 2
            while (same := normalize("NFC", name).casefold()) in used_paths:
                name, number = f"{source.stem}-{number}", number + 1
            targets.append(output / f"{name}{suffix}")
            used_paths.add(same)
    sources = {os.path.realpath(source) for source in inputs}  # Path.resolve() would raise for circular links
    for target in targets:
        if os.path.realpath(target) in sources:
            raise InputError(f"`--output` must not overwrite an input, but '{target}' is one. Name another folder.")
    return targets


def write_error(path: Path, error: OSError) -> str:
    """Return the error message for an output file that could not be written."""
    return f"the output '{printable(str(path))}' cannot be written: {error_reason(error)}"


def try_write(target: Path | None, text: str) -> str:
    """Write `text` to a file.

    Args:
        target: The file; None: write nothing.

    Returns:
        The error message; "" if the file was written.
    """
    if target is None:
        return ""
    try:
        write_atomically(target, text.encode())
    except OSError as error:
        return write_error(target, error)
    except InputError as error:  # from `write_atomically`, if it cannot replace the file in one step, such as a pipe
        return failure_message(error)
    return ""
