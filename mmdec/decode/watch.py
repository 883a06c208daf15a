"""Splits a round's seconds between drafter, target and core. On a GPU each split synchronises with the device."""

from __future__ import annotations

from typing import final

import torch

from mmdec.runtime import Stopwatch


@final
class Watch:
    """The seconds of one round. The caller of `passed` adds the result to one of the three totals."""

    def __init__(self, device: torch.device) -> None:
        self._stopwatch = Stopwatch(device)
        self.start()

    def start(self) -> None:
        """Begin a round."""
        self.target = self.drafter = self.core = 0.0
        self._stopwatch.lap()
        self._processor = self._stopwatch.processor()

    def passed(self) -> float:
        """Seconds since the last call."""
        return self._stopwatch.lap()

    def learned(self) -> tuple[float, float, float]:
        """What a budget records: seconds of the target, seconds of the drafter, and the share of the round in [0, 1] in
        which this thread had a CPU (1 if unknown)."""
        seconds, worked = self.target + self.drafter + self.core, self._stopwatch.processor() - self._processor
        return self.target, self.drafter, min(worked / seconds, 1.0) if seconds > 0 else 1.0
