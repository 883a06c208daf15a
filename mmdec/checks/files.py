"""Opens regular files only, and writes files atomically.

A path from the caller may be a pipe that blocks, an unreadable folder or on a full disk, and its name may hold any
bytes. Each of these cases has its own error message.
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

from mmdec.errors import InputError, MmdecError

TEMPORARY_PREFIX = ".mmdec-"  # name prefix of temporary files, which are still being written
SPECIAL_FILES = (
    (stat.S_ISDIR, "a folder", "Name the files in it"),
    (stat.S_ISFIFO, "a pipe", "Save what comes out of it to a file"),
    (stat.S_ISSOCK, "a socket", "Save what comes out of it to a file"),
    (stat.S_ISCHR, "a device", "Name a file"),
    (stat.S_ISBLK, "a device", "Name a file"),
)
MAX_PATH = 4096  # maximum characters of a path: longer ones are rejected
MAX_QUOTED_PATH = 240  # maximum characters of a path that an error message quotes
# a URL, such as http://; a single slash is enough, because pathlib turns // into /
URL_PATTERN = re.compile(r"^[a-z][a-z0-9+.-]{1,20}:/|^data:", re.IGNORECASE)


def printable(text: str) -> str:
    """Return `text` in one line that every UTF-8 stream accepts: invalid bytes, line ends and the like are escaped."""
    return text if text.isprintable() else repr(text)[1:-1]


def quote_path(path: str | os.PathLike[str]) -> str:
    """Convert a path to text for an error message: one line of limited length."""
    text = printable(os.fsdecode(path))
    return text if len(text) <= MAX_QUOTED_PATH else f"{text[:MAX_QUOTED_PATH]}..."


@contextmanager
def open_regular(path: str | os.PathLike[str], argument: str) -> Iterator[int]:
    """Open an existing regular file for reading. Yields its descriptor.

    A pipe is not opened, because that may block; a URL is not downloaded.

    Raises:
        InputError: If there is no such file, or it is no regular file.
    """
    text, name = os.fsdecode(path), f"'{quote_path(path)}'"
    if URL_PATTERN.match(text) and not os.path.lexists(text.partition("\0")[0]):
        raise InputError(
            f"`{argument}` must be a file, but is the address {name}. Download it first: nothing is fetched.",
            argument=argument,
        )
    if len(text) > MAX_PATH:
        raise InputError(
            f"`{argument}` must be an existing file, but {name} is not a file name. Check the path.", argument=argument
        )
    try:
        file = Path(os.fsdecode(path))  # pathlib reads "" as the current directory
        _check_regular(os.stat(file).st_mode, name, argument)
        # O_NONBLOCK: do not wait for a writer if a pipe has replaced the file meanwhile
        flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)
        descriptor = os.open(file, flags)
    except FileNotFoundError as error:
        raise InputError(
            f"`{argument}` must be an existing file, but {name} does not exist. Check the path.",
            argument=argument,
        ) from error
    except InputError:  # must come before ValueError, its base class
        raise
    except (OSError, ValueError) as error:
        remedy = "the permissions of the file and its folders" if isinstance(error, PermissionError) else "the path"
        raise unreadable_error(argument, name, error, f"Check {remedy}.") from error
    try:
        _check_regular(os.fstat(descriptor).st_mode, name, argument)
        yield descriptor
    finally:
        os.close(descriptor)


def read_text(path: str | os.PathLike[str], argument: str, max_bytes: int) -> str:
    """Read a text file in UTF-8.

    Raises:
        InputError: If it cannot be read, has more than `max_bytes` bytes, or is not UTF-8.
    """
    with open_regular(path, argument) as descriptor, os.fdopen(os.dup(descriptor), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise InputError(
            f"`{argument}` must have at most {max_bytes} bytes a file, but '{quote_path(path)}' has more. Cut it.",
            argument=argument,
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"`{argument}` must be text in UTF-8, but '{quote_path(path)}' is not ({error}). Save it as UTF-8.",
            argument=argument,
        ) from error


def unreadable_error(argument: str, name: str, error: Exception, remedy: str) -> InputError:
    """Make the error for a file that the system cannot read.

    Args:
        argument: The caller's argument that names the file.
        name: The file's name, for the message.
        remedy: The message's last sentence.
    """
    return InputError(
        f"`{argument}` must be a file that can be read, but {name} is not ({error_reason(error)}). {remedy}",
        argument=argument,
    )


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Context manager that yields a temporary file to write in.

    When the block ends, the file is renamed to `path`. Missing folders are made.

    The file gets the permissions of the file that it replaces, else those of the umask. If the block raises, an
    existing file stays as it was.

    Raises:
        OSError: If the disk is full or there is no permission; the error names `path`.
        InputError: If `path` exists and is no regular file.
    """
    path = Path(path)
    try:
        mode = _replaced_mode(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}.part")
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
        # the error names `path`, not the temporary file
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


def write_atomically(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write a file atomically: if writing fails, an existing file is not changed."""
    with atomic_file(path) as file:
        file.write(content)
    return Path(path)


def _replaced_mode(path: Path) -> int | None:
    """Return the permissions of the file that will be replaced; None if there is no file.

    Raises:
        InputError: If `path` is not a regular file.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    _check_regular(mode, f"'{printable(str(path))}'", "path")
    return stat.S_IMODE(mode) & 0o777


def error_reason(error: Exception) -> str:
    """Describe an error in a few words: an OSError by the system's text, others by their message."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return printable(str(error)) or type(error).__name__


def error_line(error: BaseException) -> str:
    """Return the type and message of another library's error, in one line of limited length without a final stop.

    Objects' addresses are left out.
    """
    message = re.sub(r" at 0x[0-9a-f]+", "", " ".join(str(error).split()))
    return printable(f"{type(error).__name__}: {message}"[:300].rstrip("."))


def _check_regular(mode: int, name: str, argument: str) -> None:
    if stat.S_ISREG(mode):
        return
    kind, remedy = next((kind, remedy) for is_kind, kind, remedy in SPECIAL_FILES if is_kind(mode))
    raise InputError(f"`{argument}` must be a file, but {name} is {kind}. {remedy}.", argument=argument)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if there is no file.

    Raises:
        InputError: If the file holds anything else.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"'{path}' must be JSON, but is not ({error}). Write it again, or remove it.") from error
    if not isinstance(content, dict):
        raise InputError(f"'{path}' must hold a JSON object, but holds another value. Write it again, or remove it.")
    return content


def json_text(value: Any, indent: int | None = None) -> str:
    """Convert a value to readable JSON text.

    File names with bytes that are not valid UTF-8 are escaped, so that a program that reads the JSON gets the same
    name.
    """
    return json.dumps(value, indent=indent, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()


def failure_message(error: Exception) -> str:
    """Return a one-line message for an input that failed.

    For errors that are not mmdec's it begins with the error's type.
    """
    return str(error) if isinstance(error, MmdecError) else f"{type(error).__name__}: {printable(str(error))}"
