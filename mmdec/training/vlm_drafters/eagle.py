"""EAGLE (Li et al. 2024, arXiv 2401.15077; EAGLE-2's tree needs no other training): SmoothL1 + 0.1 cross-entropy."""

from __future__ import annotations

from typing import ClassVar, final

from mmdec.training.vlm_drafters.loss import Weights
from mmdec.training.vlm_drafters.module import DraftModule


@final
class EagleModule(DraftModule):
    """As published with `unroll` 1 and `noise` 0.1."""

    system: ClassVar[str] = "eagle"
    weights: ClassVar[Weights] = Weights(features=1.0, tokens=0.1)
