"""MSD (Lin et al. 2025, arXiv 2505.14260): EAGLE's loss; visual positions enter as they are; two stages.

The stages are the data's `ramp`: text alone in the first half of the epochs, then ever more pictures. The paper's text
is ShareGPT's; where a corpus has no conversations without pictures, the target's answers are read once more without
theirs.
"""

from __future__ import annotations

from typing import ClassVar, final

from mmdec.training.vlm_drafters.loss import Weights
from mmdec.training.vlm_drafters.module import DraftModule


@final
class MsdModule(DraftModule):
    """As published with `unroll` 1, `noise` 0.1 and a `ramp` of as many epochs as the run has."""

    system: ClassVar[str] = "msd"
    weights: ClassVar[Weights] = Weights(features=1.0, tokens=0.1)
