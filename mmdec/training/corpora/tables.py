"""What the readers of all corpora share: tab-separated tables, and samples of their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from mmdec.training.corpora.text_files import check_text, shown, text_lines

T = TypeVar("T")


def read_table(path: Path, argument: str = "corpus") -> Iterator[tuple[int, list[str]]]:
    """Number and columns of each line of a tab-separated table; nothing if there is no file. Quotes mean nothing."""
    if not path.exists():
        return
    for number, line in text_lines(path, argument):
        fields = line.split("\t")
        for field in fields:
            check_text(field, argument, f"line {number} of {shown(path)}")
        yield number, fields


def evenly_spaced(rows: Sequence[T], limit: int | None) -> list[T]:
    """`limit` of the rows at equal distances, in their order; all rows if there are no more, or `limit` is None."""
    if limit is None or limit >= len(rows):
        return list(rows)
    return [rows[number * len(rows) // limit] for number in range(limit)]
