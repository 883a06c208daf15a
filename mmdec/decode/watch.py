"""Splits a round's seconds between drafter, target and core. On a GPU it waits for the device at every split."""

from __future__ import annotations

from typing import final

import torch

from mmdec.runtime import Stopwatch


@final
class Watch:
    """One round's seconds. Whoever reads `passed` adds it to one of the three."""

    def __init__(self, device: torch.device) -> None:
        self._stopwatch = Stopwatch(device)
        self.start()

    def start(self) -> None:
        """Begin a round."""
        self.target = self.drafter = self.core = 0.0
        self._stopwatch.lap()
        self._processor = self._stopwatch.processor()

    def passed(self) -> float:
        """Seconds since the last reading."""
        return self._stopwatch.lap()

    def learned(self) -> tuple[float, float, float]:
        """What a budget asks: the target's seconds, the drafter's, and the share of the round so far in which this
        thread had a processor; 1 where that cannot be told."""
        seconds, worked = self.target + self.drafter + self.core, self._stopwatch.processor() - self._processor
        return self.target, self.drafter, min(worked / seconds, 1.0) if seconds > 0 else 1.0
