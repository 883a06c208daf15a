"""Two things timed in turn, A B A B: on a noisy machine only the ratio of neighbours means something."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Paired:
    """Two sides timed in turn: medians in milliseconds, and the median of the ratios b / a with its quartiles."""

    a_ms: float
    b_ms: float
    ratio: float
    low: float
    high: float
    n: int


def paired(a: Callable[[], object], b: Callable[[], object], repeats: int, device: torch.device) -> Paired:
    """Time a and b alternately, after one warm-up of each."""
    times: list[tuple[float, float]] = []
    for number in range(repeats + 1):
        pair = []
        for side in (a, b):
            _wait(device)
            start = time.perf_counter()
            side()
            _wait(device)
            pair.append(time.perf_counter() - start)
        if number:
            times.append((pair[0], pair[1]))
    ratios = [y / x for x, y in times]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Paired(
        a_ms=1e3 * statistics.median(x for x, _ in times),
        b_ms=1e3 * statistics.median(y for _, y in times),
        ratio=statistics.median(ratios),
        low=low,
        high=high,
        n=len(ratios),
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
