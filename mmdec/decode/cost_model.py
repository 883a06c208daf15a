"""Cost curves: seconds as a function of a count, robust to timings that are off by several times."""

from __future__ import annotations

import math
from collections import deque
from typing import final

WINDOW = 15  # the newest timings kept per bucket


@final
class CostCurve:
    """Monotone piecewise-linear seconds of a count, through the lower quartiles of buckets 1, 2, 3-4, 5-8, ..."""

    def __init__(self, slope: float, origin: bool, enough: int) -> None:
        """slope: factor on the last slope beyond the last bucket. origin: whether a count of 0 takes 0 seconds.
        enough: timings before a bucket other than the first is used.
        """
        self._slope = slope
        self._enough = enough
        self._start = [(0.0, 0.0)] if origin else []
        self.windows: dict[int, deque[tuple[float, int]]] = {}  # bucket -> its newest (seconds, count)
        self._quartiles: dict[int, tuple[float, float]] = {}  # bucket -> count, seconds
        self._points: list[tuple[float, float]] = [*self._start]  # count, seconds
        self.reach = 0  # the largest count that was timed
        self.timed = 0  # number of timings so far

    def samples(self, count: int) -> int:
        """Number of timings in the count's bucket."""
        return len(self.windows.get((count - 1).bit_length(), ()))

    def add(self, count: int, seconds: float) -> None:
        """Add a timing: the seconds that `count` items took."""
        self.timed += 1
        bucket = (count - 1).bit_length()
        window = self.windows.setdefault(bucket, deque(maxlen=WINDOW))
        window.append((seconds, count))
        self._summarise(bucket)
        self.reach = max(self.reach, count)
        self._connect()

    def restore(self, windows: dict[int, deque[tuple[float, int]]], reach: int, timed: int) -> None:
        """Replace the timings by those of a saved curve; no window is empty."""
        self.windows, self.reach, self.timed = windows, reach, timed
        self._quartiles = {}
        for bucket in windows:
            self._summarise(bucket)
        self._connect()

    def _summarise(self, bucket: int) -> None:
        window = self.windows[bucket]
        quartile = sorted(sample for sample, _ in window)[(len(window) - 1) // 4]
        self._quartiles[bucket] = (sum(size for _, size in window) / len(window), quartile)

    def _connect(self) -> None:
        self._points = []
        least = math.inf
        for key in sorted(self._quartiles, reverse=True):
            size, quartile = self._quartiles[key]
            least = min(least, quartile)  # a larger count takes at least as long, so larger buckets bound smaller ones
            if not key or len(self.windows[key]) >= self._enough:
                self._points.append((size, least))
        self._points += self._start
        self._points.reverse()

    def at(self, count: float) -> float:
        """Seconds at a count, from buckets with enough timings. Below the first point: the first point's; 0 without
        timings."""
        if not self._points:
            return 0.0
        before = after = self._points[0]
        if count <= after[0]:
            return after[1]
        for point in self._points[1:]:
            before, after = after, point
            if count <= after[0]:
                return before[1] + (after[1] - before[1]) * (count - before[0]) / (after[0] - before[0])
        rise = (after[1] - before[1]) / (after[0] - before[0]) if after is not before else 0.0
        return after[1] + self._slope * rise * (count - after[0])

    def pessimistic(self, count: int) -> float:
        """A cautious estimate: the lower quartile of the count's own bucket, even if it was timed only once.

        An untimed count beyond the largest one takes at least the largest one's seconds times the square root of their
        ratio.
        """
        own = self._quartiles.get((count - 1).bit_length())
        if own:
            return own[1]
        largest = self._quartiles.get((self.reach - 1).bit_length()) if count > self.reach else None
        return max(self.at(count), largest[1] * (count / self.reach) ** 0.5) if largest else self.at(count)

    def capped(self, count: int, plain: float) -> float:
        """`pessimistic`, but at most `count` times `plain`, the seconds of a pass over one column.

        A slow first pass over a new shape does not measure the cost of the shape.
        """
        return min(self.pessimistic(count), count * plain)
