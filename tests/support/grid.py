"""What `make test` runs of a grid of cases; the others are slow, or run with MMDEC_ALL=1 (`make test-all`)."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any, TypeVar

import pytest

WHOLE = bool(os.environ.get("MMDEC_ALL"))
Case = TypeVar("Case")


def sample(cases: Iterable[Case], keep: Collection[Case] | slice) -> list[Case]:
    """Choose the cases to run: those to keep, or all of them with MMDEC_ALL=1.

    A grid that repeats one check over many cases costs minutes, and a few cases that differ most show nearly as much:
    name the ones that reach each branch.

    Args:
        cases: The whole grid, in order.
        keep: The cases for `make test`, each of them in `cases`; or a slice of `cases`.

    Returns:
        The chosen cases, in the order of `cases`.
    """
    every = list(cases)
    chosen_cases = every[keep] if isinstance(keep, slice) else list(keep)
    assert chosen_cases, "a grid must keep a case"
    assert all(case in every for case in chosen_cases), f"{chosen_cases} must be among {every}"
    return every if WHOLE else [case for case in every if case in chosen_cases]


def slow_but(cases: Iterable[Case], quick: Collection[Case] | slice) -> list[Any]:
    """Mark all cases but a few as slow: `make test` runs the few, and `make test-slow` the others.

    Args:
        cases: The values of a parameter, or tuples of the values of several, in order.
        quick: Those that are not slow, each of them in `cases`; or a slice of `cases`.
    """
    every = list(cases)
    quick_cases = every[quick] if isinstance(quick, slice) else list(quick)
    assert quick_cases, "a grid must keep a case"
    assert all(case in every for case in quick_cases), f"{quick_cases} must be among {every}"
    slow = [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in every]
    return [case if case in quick_cases else other for case, other in zip(every, slow, strict=True)]
