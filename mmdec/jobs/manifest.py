"""Reads lists of many inputs, one per row: TSV, JSON lines or Parquet.

A row that cannot be used stays in the list, with the reason. So a bad row does not stop the run, and does not change
the positions of other rows. Result files are named after these positions.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, final

from mmdec.checks.files import error_reason, open_regular, printable, quote_path
from mmdec.errors import InputError

SUFFIXES = (".tsv", ".jsonl", ".parquet")
# possible names of the column that holds paths; the first one that exists is used
PATH_COLUMNS = ("path", "file", "audio", "image", "input")
MAX_LINE = 1 << 20  # maximum bytes of one line; the row of a longer line cannot be used
BYTE_ORDER_MARK = "\ufeff"  # byte order mark, which some editors write at the beginning of a file


@final
@dataclass(frozen=True, slots=True)
class Row:
    """One input of a list.

    Args:
        options: Arguments of the call for this row only, as (name, value).
    """

    index: int  # position in the list, from 0
    path: str  # path of the input file, as the list has it
    id: str = ""
    options: tuple[tuple[str, str], ...] = ()
    refusal: str = ""  # reason why the row cannot be used; "": it can be used


def is_manifest(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is an existing file that ends in one of `SUFFIXES`."""
    return os.fsdecode(path).lower().endswith(SUFFIXES) and os.path.isfile(path)


def read_manifest(path: Path, options: Sequence[str] = ()) -> list[Row]:
    """Read a list.

    Args:
        path: A .tsv with column names in its first line, a .jsonl or a .parquet. A row has `path` (or `file`, `audio`,
            `image`, `input`), and may have `id` and the columns in `options`; other columns are ignored.
        options: Names of columns that are arguments of the call.

    Returns:
        All rows in order, also those that cannot be used.

    Raises:
        InputError: If the file cannot be read, has no row, or no column of paths; if pyarrow is missing.
    """
    read = {".tsv": _tsv, ".jsonl": _jsonl, ".parquet": _parquet}[path.suffix.lower()]
    rows = [_row(index, values, options) for index, values in enumerate(read(path, [*PATH_COLUMNS, "id", *options]))]
    if not rows:
        raise InputError(f"`manifest` must have a row, but '{quote_path(path)}' has none. Write some.")
    return rows


def digest(rows: Iterable[Row]) -> str:
    """Return a hash of the rows, by which two lists are compared."""
    content = hashlib.sha256()
    for row in rows:
        text = json.dumps((row.path, row.id, row.options))
        content.update(text.encode() + b"\n")
    return content.hexdigest()


def _row(index: int, values: Mapping[str, Any] | str, options: Sequence[str]) -> Row:
    """Make a row.

    Args:
        index: Its position in the list.
        values: The row's columns by name, or a text: the reason why the row cannot be read.
        options: Names of columns that are arguments of the call.
    """
    if isinstance(values, str):
        return Row(index, "", refusal=values)
    wrong = next((name for name, value in values.items() if not isinstance(value, (str, int))), None)
    if wrong is not None:
        return Row(index, "", refusal=f"the row must have text as {wrong}, but has {type(values[wrong]).__name__}.")
    path = next((str(values[name]) for name in PATH_COLUMNS if values.get(name, "") != ""), "")
    row_options = tuple((name, str(values[name])) for name in options if values.get(name, "") != "")
    refusal = "" if path else f"the row must have a path ({', '.join(PATH_COLUMNS)}), but has none."
    return Row(index, path, str(values.get("id", "")), row_options, refusal)


def _tsv(path: Path, columns: Sequence[str]) -> Iterator[dict[str, str] | str]:
    lines = _lines(path)
    names = next(lines, "").removeprefix(BYTE_ORDER_MARK).split("\t")
    if not set(names).intersection(PATH_COLUMNS):
        raise InputError(
            f"`manifest` must name its columns in its first line, one of them {', '.join(PATH_COLUMNS)}, but "
            f"'{quote_path(path)}' names {printable(', '.join(names)):.100}. Add that line."
        )
    for line in lines:
        values = line.split("\t")
        if line.startswith("\0"):
            yield line[1:]
        elif len(values) != len(names):
            yield f"the row must have {len(names)} columns, but has {len(values)}."
        else:
            yield {name: value for name, value in zip(names, values, strict=True) if name in columns}


def _jsonl(path: Path, columns: Sequence[str]) -> Iterator[dict[str, Any] | str]:
    for line in _lines(path):
        if line.startswith("\0"):
            yield line[1:]
            continue
        try:
            value = json.loads(line.removeprefix(BYTE_ORDER_MARK))
        except (ValueError, RecursionError):
            yield "the row must be JSON, but is not."
            continue
        if not isinstance(value, dict):
            yield f"the row must be a JSON object, but is {type(value).__name__}."
        else:
            yield {name: value[name] for name in columns if value.get(name) is not None}


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file, without blank ones.

    For a line that is too long or not UTF-8, yield a NUL character followed by the reason.
    """
    with open_regular(path, "manifest") as descriptor, open(descriptor, "rb", closefd=False) as file:
        while raw := file.readline(MAX_LINE):
            if len(raw) == MAX_LINE and not raw.endswith(b"\n"):
                while (rest := file.readline(MAX_LINE)) and not rest.endswith(b"\n"):
                    pass
                yield f"\0the row must have at most {MAX_LINE} bytes, but has more."
                continue
            try:
                text = raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                yield f"\0the row must be UTF-8, but has the byte 0x{raw[error.start]:02x}."
                continue
            if text.strip():
                yield text.replace("\0", "\ufffd")


def _parquet(path: Path, column_names: Sequence[str]) -> Iterator[dict[str, Any]]:
    parquet = pyarrow_parquet()
    with open_regular(path, "manifest"):
        pass
    try:
        file = parquet.ParquetFile(path)
        columns = [name for name in column_names if name in file.schema_arrow.names]
        if not set(columns).intersection(PATH_COLUMNS):
            raise InputError(
                f"`manifest` must have a column {', '.join(PATH_COLUMNS)}, but '{quote_path(path)}' has none. "
                "Rename one."
            )
        for batch in file.iter_batches(columns=columns):
            for values in batch.to_pylist():
                yield {name: value for name, value in values.items() if value is not None}
    except InputError:
        raise
    except Exception as error:  # all exceptions, because pyarrow raises errors of many types
        raise InputError(
            f"`manifest` must be Parquet, but '{quote_path(path)}' is not ({error_reason(error):.200}). Write it again."
        ) from error


def pyarrow_parquet() -> Any:
    """Import pyarrow's module for Parquet.

    Raises:
        InputError: If it is missing.
    """
    try:
        return import_module("pyarrow.parquet")
    except ImportError as error:
        raise InputError("Parquet needs pyarrow, but that is missing. Run `pip install 'mmdec[parquet]'`.") from error
