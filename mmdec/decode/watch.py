"""Splits a round's seconds between drafter, target and core. On a GPU it waits for the device at every split."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass
class Watch:
    """`now` gives what has passed since the last call to one of the three."""

    device: torch.device
    target: float = 0.0
    drafter: float = 0.0
    core: float = 0.0
    last: float = 0.0

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A new round."""
        self.target = self.drafter = self.core = 0.0
        self.last = time.perf_counter()

    def passed(self) -> float:
        """Seconds since the last look."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        return seconds
