"""SpecVLM (arXiv 2509.11815): 1.0 SmoothL1 + 0.1 cross-entropy, online, through the compressor that the gate draws.

The paper gives the gate no loss and no budget: it learns from the drafts alone. `cost` is ours: it adds the share of
visual tokens that the gate would keep on average.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor

from mmdec.nn.specvlm import SpecVLM, expected_kept
from mmdec.training.vlm_drafters.loss import Weights
from mmdec.training.vlm_drafters.module import DraftModule
from mmdec.training.vlm_drafters.teacher import Reading
from mmdec.training.vlm_drafters.unroll import Columns


@final
class SpecVlmModule(DraftModule):
    """cost: weight of the visual tokens that the gate keeps; 0 is the paper's."""

    system: ClassVar[str] = "specvlm"
    weights: ClassVar[Weights] = Weights(features=1.0, tokens=0.1)

    def __init__(self, units: list[str] | None = None, cost: float = 0.0, **options: Any) -> None:
        super().__init__(units, **options)
        self.cost = cost
        self.hparams.update(cost=cost)

    def compare(self, columns: Columns, texts: list[Reading]) -> Mapping[str, Tensor]:
        """With the gate's cost, where there is one."""
        parts = dict(super().compare(columns, texts))
        network = cast(SpecVLM, self.network)
        if not self.cost or network.gate is None:
            return parts
        costs = []
        for text in texts:
            visual = text.visual[: text.prompt]
            if bool(visual.any()):
                question = ~visual & (visual.cumsum(0) > 0)
                logits = network.gate_logits(text.embeds[: text.prompt], text.features[: text.prompt], question)
                costs.append(expected_kept(logits, cast(Any, network.config), int(visual.sum())))
        if costs:
            parts["kept"] = torch.stack(costs).mean()
            parts["loss"] = parts["loss"] + self.cost * parts["kept"]
        return parts
