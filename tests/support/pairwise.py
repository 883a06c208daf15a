"""Pairwise cover of a grid: every two values of any two parameters meet in at least one case."""

from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any


def cover(grid: Mapping[str, Sequence[Any]], whole: bool = False) -> list[dict[str, Any]]:
    """Cases as {parameter: value}; all of the grid's with `whole`. Deterministic: the greedy choice of a case."""
    names = list(grid)
    every = [dict(zip(names, values, strict=True)) for values in product(*(range(len(grid[name])) for name in names))]
    chosen = every if whole else []
    left = {pair for case in every for pair in _pairs(case)} if not whole else set()
    while left:
        best = max(every, key=lambda case: len(left & _pairs(case)))
        left -= _pairs(best)
        chosen.append(best)
    return [{name: grid[name][place] for name, place in case.items()} for case in chosen]


def _pairs(case: Mapping[str, int]) -> set[tuple[tuple[str, int], tuple[str, int]]]:
    return set(combinations(sorted(case.items()), 2))
