"""Pairwise cover of a grid of parameters: any two values of any two parameters are together in at least one case."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np


def cover(grid: Mapping[str, Sequence[Any]], whole: bool = False) -> list[dict[str, Any]]:
    """Choose cases {parameter: value} that cover all pairs, greedily and deterministically. whole: return all cases."""
    sizes = [len(values) for values in grid.values()]
    every = np.indices(sizes).reshape(len(sizes), -1).T  # (cases, parameters): places of values
    chosen = every if whole else every[_cover(every, sizes)]
    return [{name: grid[name][place] for name, place in zip(grid, case, strict=True)} for case in chosen.tolist()]


def _cover(every: np.ndarray, sizes: Sequence[int]) -> list[int]:
    """Choose cases: always one that covers most of the pairs that are left. every: (cases, parameters), indices of
    values."""
    pairs, count = [], 0
    for first, second in combinations(range(len(sizes)), 2):
        pairs.append(count + every[:, first] * sizes[second] + every[:, second])
        count += sizes[first] * sizes[second]
    numbers, left, chosen = np.stack(pairs, 1), np.ones(count, dtype=bool), list[int]()
    while left.any():
        chosen.append(int(left[numbers].sum(1).argmax()))
        left[numbers[chosen[-1]]] = False
    return chosen


def each_value(cases: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Choose cases in which each value of each parameter occurs: what `make test` runs of a cover."""
    seen: set[tuple[str, str]] = set()
    chosen = []
    for case in cases:
        values = {(name, str(value)) for name, value in case.items()}
        if values - seen:
            chosen.append(case)
            seen |= values
    return chosen
