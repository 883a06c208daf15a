"""EAGLE's network: fc and one decoder layer that continue the target's hidden states.

Li et al. 2024 (EAGLE, arXiv 2401.15077; EAGLE-2, arXiv 2406.16858). Position t of the layer reads fc([embedding of
token t + 1; feature of token t]) and predicts the feature of token t + 1, from which the target's LM head predicts
token t + 2. The layer is Llama's without the input norm; there is no final norm. Embedding and LM head are the target's
and not stored. The parameters have the published names.

MSD, SpecVLM and ViSpec read text in the same way, and images in other ways.
"""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mmdec.drafters.eagle.cpu_step import EagleStep
from mmdec.drafters.networks.config import DraftConfig
from mmdec.drafters.networks.conventions import Conventions, OptionalNorm
from mmdec.drafters.networks.cpu_step import SingleTokenStep
from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.drafters.networks.layers import DraftLayer, KeyValues, PackedWeights, RMSNorm
from mmdec.drafters.registry import built_in_network


class EagleInputNetwork(DraftNetwork):
    """The abstract base of networks whose input at text positions is EAGLE's.

    It holds fc, its norm if there is one, and the decoder layer.
    """

    def build(self, config: DraftConfig) -> None:
        """Create the weights: fc with its norm, and the layers."""
        width = (1 + len(config.layers)) * config.hidden_size
        self.fc = nn.Linear(width, config.hidden_size, bias=config.fc_bias)
        if config.fc_norm:
            self.fc_norm = RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList([DraftLayer(config)])

    def fuse(self, embeds: Tensor, features: Tensor) -> Tensor:
        """Compute the layer's input at position t.

        Args:
            embeds: (..., H), embedding of token t + 1.
            features: (..., k * H), of token t.
        """
        inputs = torch.cat([embeds, features], -1)
        if self.config.fc_norm:
            inputs = self.fc_norm(inputs)
        return linear(inputs, self.fc.weight, self.fc.bias)

    def fused_weights(self) -> KeyValues | None:
        """Write `fuse_drafted` as one linear map of [embedding; the network's last output].

        Returns:
            Weight (H, 2 H) and bias (H,); None if `fuse` is not linear.
        """
        if self.config.fc_norm:
            return None
        size = self.config.hidden_size
        weight, bias = self.fc.weight.detach(), self.fc.bias
        # instead of features `fuse_drafted` uses k copies of the output, so the weights of the copies are summed
        repeated = weight[:, size:].unflatten(1, (-1, size)).sum(1)
        return torch.cat([weight[:, :size], repeated], 1), weight.new_zeros(size) if bias is None else bias.detach()

    def conventions(self) -> Conventions:
        norm = OptionalNorm(
            "input_norm", "the layer's input", {"layers.0.input_layernorm.weight": self.config.hidden_size}, False
        )
        return Conventions(norms=[norm], embedding_columns="fc.weight")

    def cpu_step(self, packed: PackedWeights | None, embedding: nn.Module, output: nn.Linear) -> SingleTokenStep | None:
        return EagleStep.for_network(self, packed, embedding, output)


@built_in_network(
    "eagle",
    published="mmdec.drafters.eagle.checkpoint",
    note="EAGLE-2: one layer that continues the model's own states.",
)
@final
class Eagle(EagleInputNetwork):
    """EAGLE's published network."""

    config_class: ClassVar[type[DraftConfig]] = DraftConfig
