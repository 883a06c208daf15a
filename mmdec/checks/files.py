"""Files that people name: only regular ones are opened, and each is written in one step.

A name may hold any bytes and a path may lead anywhere: a pipe that would wait for ever, a folder that cannot be
entered, a disk that is full. Each is named as what it is.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mmdec.checks.errors import InputError

PART = ".mmdec-"  # how the names begin that files have until they are whole
KINDS = (
    (stat.S_ISDIR, "a directory", "Name the files in it"),
    (stat.S_ISFIFO, "a pipe", "Save what comes out of it to a file"),
    (stat.S_ISSOCK, "a socket", "Save what comes out of it to a file"),
    (stat.S_ISCHR, "a device", "Name a file"),
    (stat.S_ISBLK, "a device", "Name a file"),
)
MAX_PATH = 4096  # letters of a file's name with its folders
SHOWN = 240  # of which an error shows so many
ADDRESS = re.compile(r"^[a-z][a-z0-9+.-]{1,20}:/|^data:", re.IGNORECASE)  # pathlib makes one slash of two


def printable(text: str) -> str:
    """`text` in one line that every UTF-8 stream takes: bytes that are no UTF-8, line ends and the like are escaped."""
    return text if text.isprintable() else repr(text)[1:-1]


def shown_path(path: str | os.PathLike[str]) -> str:
    """A path for an error: in one line, and not longer than one reads."""
    text = printable(os.fsdecode(path))
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


@contextmanager
def open_regular(path: str | os.PathLike[str], argument: str) -> Iterator[int]:
    """A descriptor of an existing regular file, open for reading. Raises InputError about `argument` for all else.

    A pipe is not opened, and so not waited for; what is at an address is not downloaded.
    """
    text, name = os.fsdecode(path), f"'{shown_path(path)}'"
    if ADDRESS.match(text) and not os.path.lexists(text.partition("\0")[0]):
        raise InputError(
            f"`{argument}` must be a file, but is the address {name}. Download it first: nothing is fetched."
        )
    if len(text) > MAX_PATH:
        raise InputError(f"`{argument}` must be an existing file, but {name} is no name. Check the path.")
    try:
        file = Path(os.fsdecode(path))  # "" is the current directory
        _check_regular(os.stat(file).st_mode, name, argument)
        flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe may take its place
        descriptor = os.open(file, flags)
    except FileNotFoundError as error:
        raise InputError(
            f"`{argument}` must be an existing file, but {name} does not exist. Check the path."
        ) from error
    except InputError:  # a ValueError, too
        raise
    except (OSError, ValueError) as error:
        remedy = "the permissions of the file and its folders" if isinstance(error, PermissionError) else "the path"
        raise unreadable(argument, name, error, f"Check {remedy}.") from error
    try:
        _check_regular(os.fstat(descriptor).st_mode, name, argument)
        yield descriptor
    finally:
        os.close(descriptor)


def unreadable(argument: str, name: str, error: Exception, remedy: str) -> InputError:
    """What is said of a file that the system does not give."""
    return InputError(f"`{argument}` must be a file that can be read, but {name} is not ({reason(error)}). {remedy}")


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write in, with the folders it needs: beside `path` under another name, renamed where the block ends.

    It has the mode that `open(path, "w")` would leave: the caller's umask decides, or the earlier file. Where the block
    raises there is nothing new, and an earlier file is as it was. Raises OSError with `path` in it (a full disk, a
    folder that nobody may write to), InputError where `path` is something else than a file.
    """
    path = Path(path)
    try:
        mode = _replaced_mode(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{PART}{secrets.token_hex(8)}.part")
        try:
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            if mode is not None:
                os.chmod(temporary, mode)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error  # not the temporary file's name


def write_whole(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write a file as `whole_file` does."""
    with whole_file(path) as file:
        file.write(content)
    return Path(path)


def _replaced_mode(path: Path) -> int | None:
    """The permissions of the file that is to be replaced; None where there is none. Raises InputError for what is no
    file."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    _check_regular(mode, f"'{printable(str(path))}'", "path")
    return stat.S_IMODE(mode) & 0o777


def reason(error: Exception) -> str:
    """An error in a few words: the system's own where it is the system's."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return printable(str(error)) or type(error).__name__


def one_line(error: BaseException) -> str:
    """What an error of another library says, with its type, in one line that is not too long."""
    return printable(f"{type(error).__name__}: {' '.join(str(error).split())}"[:300])


def _check_regular(mode: int, name: str, argument: str) -> None:
    if stat.S_ISREG(mode):
        return
    kind, remedy = next((kind, remedy) for is_kind, kind, remedy in KINDS if is_kind(mode))
    raise InputError(f"`{argument}` must be a file, but {name} is {kind}. {remedy}.")


def read_object(path: Path) -> dict[str, Any]:
    """A file's JSON object; an empty one where there is no file. Raises InputError where it holds something else."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"'{path}' must be JSON, but is not ({error}). Write it anew, or remove it.") from error
    if not isinstance(found, dict):
        raise InputError(f"'{path}' must hold a JSON object, but holds another value. Write it anew, or remove it.")
    return found
