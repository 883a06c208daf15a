"""Samples of a corpus's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def evenly_spaced(rows: Sequence[T], limit: int | None) -> list[T]:
    """`limit` of the rows at equal distances, in their order; all rows if there are no more, or `limit` is None."""
    if limit is None or limit >= len(rows):
        return list(rows)
    return [rows[number * len(rows) // limit] for number in range(limit)]
