"""Takes a part of a list that represents all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def evenly_spaced(rows: Sequence[T], limit: int | None) -> list[T]:
    """Take `limit` rows at equal distances, in their order.

    Take all rows if there are not more, or if `limit` is None.
    """
    if limit is None or limit >= len(rows):
        return list(rows)
    return [rows[number * len(rows) // limit] for number in range(limit)]
