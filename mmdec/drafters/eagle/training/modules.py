"""The training modules of EAGLE, MSD, SpecVLM and ViSpec.

Each adds the loss and drafting steps of its paper to `DraftModule`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor

from mmdec.drafters.eagle.specvlm import SpecVLM, expected_token_share
from mmdec.drafters.networks.training.module import DraftModule, LossWeights
from mmdec.drafters.networks.training.teacher import TargetFeatures
from mmdec.drafters.networks.training.unroll import UnrollInputs
from mmdec.training.optim import token_weight


@final
class EagleModule(DraftModule):
    """Trains EAGLE (Li et al. 2024, arXiv 2401.15077): SmoothL1 + 0.1 cross-entropy. EAGLE-2 is trained the same way.

    The paper's settings are `unroll` 1 and `noise` 0.1.
    """

    system: ClassVar[str] = "eagle"


@final
class MsdModule(DraftModule):
    """Trains MSD (Lin et al. 2025, arXiv 2505.14260): EAGLE's loss, in two stages.

    At visual tokens the network reads only embeddings, no features.

    The stages are given by the data module's `ramp`: only text in the first half of the epochs, then more and more
    pictures. The paper takes its text samples from ShareGPT. If a corpus has only questions with pictures, these are
    also used without their pictures. The paper's settings are `unroll` 1, `noise` 0.1 and a `ramp` over all epochs.
    """

    system: ClassVar[str] = "msd"


@final
class SpecVlmModule(DraftModule):
    """Trains SpecVLM (arXiv 2509.11815): SmoothL1 + 0.1 cross-entropy. A gate chooses how each image is compressed.

    In the paper only the drafting loss trains the gate.

    Args:
        cost: Weight of an additional loss, the expected share of visual tokens after compression; 0: as in the paper.
    """

    system: ClassVar[str] = "specvlm"

    def __init__(self, units: list[str] | None = None, cost: float = 0.0, **options: Any) -> None:
        super().__init__(units, **options)
        self.cost = cost
        self.hparams.update(cost=cost)

    def compare(self, columns: UnrollInputs, texts: list[TargetFeatures]) -> Mapping[str, Tensor]:
        """Return name -> value: the batch's "loss", and values for the log.

        The loss includes the gate's loss if `cost` is not 0.
        """
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
                costs.append(expected_token_share(logits, cast(Any, network.config), int(visual.sum())))
        weight = token_weight(torch.tensor(len(costs), device=columns.states.device))
        if costs:
            parts["cost"] = torch.stack(costs).mean()
            parts["loss"] = parts["loss"] + self.cost * weight * parts["cost"]
        return parts


@final
class ViSpecModule(DraftModule):
    """Trains ViSpec (Kang et al. 2025, arXiv 2509.15235).

    The loss is 10 L1 between distributions + 0.1 ListMLE of the ten best tokens.

    Its first stage is EAGLE's training on text (`EagleModule` with `ranks` 0.1). This class is its second stage:
    samples with pictures and long answers by the target, and a second drafting step, which reads the network's own
    predictions (`unroll` 2 here, `mtp_steps` 1 in the paper's code). With `start` it begins from the network of the
    first stage.
    """

    system: ClassVar[str] = "vispec"
    weights: ClassVar[LossWeights] = LossWeights(features=0.0, tokens=0.0, distribution=10.0, ranks=0.1)
