"""What each tree-growing drafter's training adds to `DraftModule`: the loss it was published with."""

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
class EagleModule(DraftModule):
    """EAGLE (Li et al. 2024, arXiv 2401.15077; EAGLE-2's tree needs no other training): SmoothL1 + 0.1 cross-entropy.

    As published with `unroll` 1 and `noise` 0.1.
    """

    system: ClassVar[str] = "eagle"
    weights: ClassVar[Weights] = Weights(features=1.0, tokens=0.1)


@final
class MsdModule(DraftModule):
    """MSD (Lin et al. 2025, arXiv 2505.14260): EAGLE's loss; visual positions enter as they are; two stages.

    The stages are the data's `ramp`: text alone in the first half of the epochs, then ever more pictures. The paper's
    text is ShareGPT's; where a corpus has no conversations without pictures, the target's answers are read once more
    without theirs. As published with `unroll` 1, `noise` 0.1 and a `ramp` of as many epochs as the run has.
    """

    system: ClassVar[str] = "msd"
    weights: ClassVar[Weights] = Weights(features=1.0, tokens=0.1)


@final
class SpecVlmModule(DraftModule):
    """SpecVLM (arXiv 2509.11815): 1.0 SmoothL1 + 0.1 cross-entropy, online, through the compressor that the gate draws.

    The paper gives the gate no loss and no budget: it learns from the drafts alone. cost: ours, the weight of the share
    of visual tokens that the gate would keep on average; 0 is the paper's.
    """

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


@final
class ViSpecModule(DraftModule):
    """ViSpec (Kang et al. 2025, arXiv 2509.15235): 10 L1 between distributions + 0.1 ListMLE of the ten best tokens.

    Its first stage is EAGLE's training on text (EagleModule with `ranks` 0.1). Its second, this one, shows pictures, on
    long answers that the target gave, and reads one step of its own predictions (`unroll` 2 here, `mtp_steps` 1 there).
    Begin from the first stage's network with `start`, or anew.
    """

    system: ClassVar[str] = "vispec"
    weights: ClassVar[Weights] = Weights(features=0.0, tokens=0.0, distribution=10.0, ranks=0.1)
