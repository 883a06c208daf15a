"""What the readers of all corpora share: tab-separated tables, and samples of their rows."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def read_table(path: Path) -> Iterator[list[str]]:
    """The lines of a tab-separated table, split into columns; nothing if there is no file. Quotes mean nothing."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", newline="") as file:
        yield from (line for line in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE) if line)


def evenly_spaced(rows: Sequence[T], limit: int | None) -> list[T]:
    """`limit` of the rows at equal distances, in their order; all rows if there are no more, or `limit` is None."""
    if limit is None or limit >= len(rows):
        return list(rows)
    return [rows[number * len(rows) // limit] for number in range(limit)]
