"""ViSpec (Kang et al. 2025, arXiv 2509.15235): 10 L1 between distributions + 0.1 ListMLE of the ten best tokens.

Its first stage is EAGLE's training on text (EagleModule with `ranks` 0.1); its second shows pictures, on long answers
that the target gave, and reads one step of its own predictions (`unroll` 2 here, `mtp_steps` 1 there).
"""

from __future__ import annotations

from typing import ClassVar, final

from mmdec.training.vlm_drafters.loss import Weights
from mmdec.training.vlm_drafters.module import DraftModule


@final
class ViSpecModule(DraftModule):
    """The second stage, as published with `unroll` 2. Begin from the first stage's network with `start`, or anew."""

    system: ClassVar[str] = "vispec"
    weights: ClassVar[Weights] = Weights(features=0.0, tokens=0.0, distribution=10.0, ranks=0.1)
