"""Learning-rate schedules as plain functions of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """The learning rate at a step, as a share of its peak, after a linear warm-up.

    "inverse-sqrt": falls as 1/sqrt(step) (the paper's). "trapezoid": stays, and falls linearly to zero from step
    `decay_from` over `decay_steps`; a run can be prolonged without knowing its end. "cosine": falls to zero over
    `decay_steps` from the end of the warm-up.
    """

    kind: Literal["inverse-sqrt", "trapezoid", "cosine"] = "inverse-sqrt"
    warmup: int = 10_000
    decay_from: int | None = None
    decay_steps: int = 1000

    def __call__(self, step: int) -> float:
        rise = min(1.0, (step + 1) / max(self.warmup, 1))
        if self.kind == "inverse-sqrt":
            return rise * min(1.0, (max(self.warmup, 1) / (step + 1)) ** 0.5)
        if self.kind == "cosine":
            part = min(1.0, max(step - self.warmup, 0) / max(self.decay_steps, 1))
            return rise * 0.5 * (1 + math.cos(math.pi * part))
        if self.decay_from is None or step < self.decay_from:
            return rise
        return rise * max(0.0, 1.0 - (step - self.decay_from) / max(self.decay_steps, 1))

    def ending(self, step: int, end: int) -> Schedule:
        """A trapezoid that gives what this one gives at `step`, and from there falls to zero at step `end`."""
        flat = self.decay_from is None or step <= self.decay_from
        height = 1.0 if flat else max(0.0, 1.0 - (step - (self.decay_from or 0)) / max(self.decay_steps, 1))
        if height == 0.0 or end <= step:
            return self
        steps = round((end - step) / height)  # a longer fall, of which a part has passed
        return replace(self, kind="trapezoid", decay_from=end - steps, decay_steps=steps)
