"""Lines of progress, which every evaluation and benchmark reports."""

from __future__ import annotations

from collections.abc import Callable

Log = Callable[[str], None]


def no_log(line: str) -> None:
    """Drop the line."""
