"""MSD's stages as a schedule: how many of an epoch's samples have pictures (Lin et al. 2025, arXiv 2505.14260)."""

from __future__ import annotations

from dataclasses import dataclass

from mmdec.types import InputError


@dataclass(frozen=True)
class Ramp:
    """The share of samples with pictures in each of `epochs`: none in the first half, then rising, all in the last.

    With the paper's 40 epochs: 0 up to epoch 20, then 2 (epoch - 20) / 40, which is .05 to .95, and 1 in epoch 40.
    """

    epochs: int = 40

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise InputError(f"`epochs` must be at least 1, but is {self.epochs}. The paper has 40.")

    def share(self, epoch: int) -> float:
        """epoch: from 0, as Lightning counts; beyond the last all samples have pictures."""
        number, half = epoch + 1, self.epochs / 2
        if number >= self.epochs:
            return 1.0
        return max(0.0, 2 * (number - half) / self.epochs)
