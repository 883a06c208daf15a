"""Reads and writes decoding statistics as JSON; every number that is read is checked against bounds.

A file may come from anywhere. An invalid one raises ValueError, TypeError or KeyError, which `DecodingStatistics.load`
turns into one message.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from mmdec.decode.acceptance import DEEPEST, Acceptance
from mmdec.decode.cost_model import WINDOW, CostCurve
from mmdec.decode.tree_shape import HeadAccuracy

FORMAT = {"format": "mmdec decoding statistics", "version": 1}
LARGEST = 16 << 20  # maximum bytes of a file
LONGEST = 4096  # maximum characters of a name
POWERS = 31  # maximum log2 of a batch size
COLUMNS = 1 << 20  # maximum columns of a draft
LEVELS, WIDTH = 64, 64  # maximum depth and width of a drafter's heads
SECONDS = 1e6  # maximum seconds of one pass
ROUNDS = 1e15


def check_header(content: Any) -> None:
    """Raise an error unless the content has this format's name and version."""
    for name, value in FORMAT.items():
        if content[name] != value:
            raise ValueError(f"`{name}` is {content[name]!r:.80} instead of {value!r}")


def entries(value: Any, most: int) -> list[Any]:
    """Check for a list with at most `most` items."""
    if not isinstance(value, list) or len(items := cast(list[Any], value)) > most:
        raise ValueError(f"a list of at most {most} items is {value!r:.80}")
    return items


def text(value: Any) -> str:
    """Check for a string of limited length."""
    if not isinstance(value, str) or len(value) > LONGEST:
        raise ValueError(f"a name is {value!r:.80}")
    return value


def number(value: Any, least: float, most: float) -> float:
    """Check for a finite float in [least, most]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"a number is {value!r:.80}")
    if not least <= value <= most:
        raise ValueError(f"a number between {least} and {most} is {value}")
    return float(value)


def count(value: Any, least: int, most: int) -> int:
    """Check for a whole number in [least, most]."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"a whole number between {least} and {most} is {value!r:.80}")
    return value


def curves_to(curves: dict[int, CostCurve]) -> list[dict[str, Any]]:
    """Write the cost curves of each batch size."""
    return [
        {
            "power": power,
            "reach": curve.reach,
            "timed": curve.timed,
            "windows": [[bucket, [list(timing) for timing in window]] for bucket, window in curve.windows.items()],
        }
        for power, curve in curves.items()
    ]


def curves_from(value: Any, make: Callable[[], CostCurve]) -> dict[int, CostCurve]:
    """Read the cost curves of each batch size. make: returns an empty curve of the right kind."""
    curves: dict[int, CostCurve] = {}
    for item in entries(value, POWERS + 1):
        windows: dict[int, deque[tuple[float, int]]] = {}
        for pair in entries(item["windows"], COLUMNS.bit_length() + 1):
            bucket, timings = pair
            window = [(number(s, 0, SECONDS), count(n, 1, COLUMNS)) for s, n in entries(timings, WINDOW)]
            if not window or any((n - 1).bit_length() != bucket for _, n in window):
                raise ValueError(f"bucket {bucket!r:.80} holds counts of other buckets, or none")
            windows[bucket] = deque(window, maxlen=WINDOW)
        largest = max((n for window in windows.values() for _, n in window), default=0)
        curve = curves[count(item["power"], 0, POWERS)] = make()
        if windows:
            curve.restore(windows, count(item["reach"], largest, COLUMNS), count(item["timed"], 1, int(ROUNDS)))
    return curves


def acceptance_to(acceptance: Acceptance) -> dict[str, Any]:
    """Write acceptance statistics."""
    return {
        "prior": acceptance.prior,
        "hits": acceptance.hits,
        "trials": acceptance.trials,
        "ending": acceptance.ending,
        "trees": [[*shape, *mean] for shape, mean in acceptance.trees.items()],
        "of_trees": list(acceptance.of_trees),
        "offered": acceptance.offered,
        "chains_only": acceptance.chains_only,
        "gap": acceptance.gap,
    }


def acceptance_from(value: Any) -> Acceptance:
    """Read acceptance statistics."""
    acceptance = Acceptance([number(chance, 0, 1) for chance in entries(value["prior"], DEEPEST)])
    for name in ("hits", "trials"):
        counts = [number(item, 0, ROUNDS) for item in entries(value[name], DEEPEST + 1)]
        if len(counts) != DEEPEST + 1:
            raise ValueError(f"`{name}` has {len(counts)} numbers instead of {DEEPEST + 1}")
        setattr(acceptance, name, counts)
    ending = [
        [number(item, 0, ROUNDS) for item in entries(row, DEEPEST + 1)] for row in entries(value.get("ending", []), 4)
    ]
    if ending:  # absent from files of earlier versions
        if [len(row) for row in ending] != [DEEPEST + 1] * 4:
            raise ValueError(f"`ending` must have 4 rows of {DEEPEST + 1} numbers")
        for rounds, hits, drafts, reached in zip(*ending, strict=True):
            if hits > rounds or drafts > rounds or reached > drafts:
                raise ValueError("`ending` counts more than there were rounds")
        acceptance.ending = ending
    for nodes, depth, weight, accepted in entries(value["trees"], 1024):
        shape = (count(nodes, 1, COLUMNS), count(depth, 1, COLUMNS))
        acceptance.trees[shape] = (number(weight, 0, ROUNDS), number(accepted, 0, ROUNDS))
    accepted, expected = value["of_trees"]
    acceptance.of_trees = (number(accepted, 0, ROUNDS), number(expected, 0, ROUNDS))
    acceptance.offered = number(value["offered"], 0, 1)
    acceptance.chains_only = count(value["chains_only"], -1, int(ROUNDS))
    acceptance.gap = count(value["gap"], 1, 1 << 20)
    return acceptance


def accuracy_to(accuracy: HeadAccuracy) -> dict[str, Any]:
    """Write the hits and trials of a drafter's heads."""
    hits, trials = accuracy.counts()
    return {"hits": hits, "trials": trials}


def accuracy_from(value: Any) -> HeadAccuracy:
    """Read the hits and trials of a drafter's heads."""
    trials = [number(item, 1e-9, ROUNDS) for item in entries(value["trials"], LEVELS)]
    hits = [[number(item, 0, ROUNDS) for item in entries(row, WIDTH)] for row in entries(value["hits"], LEVELS)]
    if not hits:
        raise ValueError("`hits` has no row")
    return HeadAccuracy.of_counts(hits, trials)
