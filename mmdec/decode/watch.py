"""Splits a round's seconds between drafter, target and core. On a GPU each split synchronises with the device."""

from __future__ import annotations

from typing import Literal, final

import torch

from mmdec.runtime import Stopwatch

STARVED = 0.7  # of the target's seconds: a thread that had a processor for less of them waited for one


@final
class Watch:
    """One round's seconds, by the wall clock and of the processor."""

    def __init__(self, device: torch.device) -> None:
        self._stopwatch = Stopwatch(device)
        self.start()

    def start(self) -> None:
        """Begin a round."""
        self.seconds = {"target": 0.0, "drafter": 0.0, "core": 0.0}
        self._worked = dict(self.seconds)  # of the processor
        self._stopwatch.lap()
        self._processor = self._stopwatch.processor()

    def lap(self, stage: Literal["target", "drafter", "core"]) -> None:
        """The seconds since the last reading were this stage's."""
        processor = self._stopwatch.processor()
        self.seconds[stage] += self._stopwatch.lap()
        self._worked[stage] += processor - self._processor
        self._processor = processor

    def learned(self) -> tuple[float, float, bool]:
        """What a budget asks of the round so far: the target's seconds, the drafter's, and whether the thread waited
        for a processor. Then the seconds are the processor's. The target's pass tells it: a drafter may wait on purpose
        for another process or the network, and its wait is what it costs."""
        starved = self._worked["target"] < STARVED * self.seconds["target"]
        told = self._worked if starved else self.seconds
        return told["target"], told["drafter"], starved
