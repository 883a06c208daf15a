"""Fast paths of EAGLE's and EAGLE-3's networks on a CPU, token by token; see `mmdec.drafters.networks.cpu_step`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor, nn

from mmdec.drafters.networks.cpu_step import LayerStep, SingleTokenStep, Vector, buffer, is_plain_lookup, owner
from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.drafters.networks.layers import DraftLayer, PackedWeights

if TYPE_CHECKING:
    from mmdec.drafters.eagle.eagle import EagleInputNetwork
    from mmdec.drafters.eagle.eagle3 import Eagle3


@final
class EagleStep(SingleTokenStep):
    """Runs a draft network and an LM head on one token of one row at a time.

    Holds weights and buffers.

    Args:
        packed: The network's concatenated weights, from `DraftNetwork.pack_weights`.
        fused: (weight (H, 2 H), bias (H,)) from `EagleInputNetwork.fused_weights`.
    """

    def __init__(
        self,
        network: DraftNetwork,
        packed: PackedWeights,
        fused: tuple[Tensor, Tensor],
        embedding: Tensor,
        output: nn.Linear,
    ) -> None:
        super().__init__(embedding, output)
        self.fused, self.layer, self.joined = fused, LayerStep(network, packed), buffer(2 * network.config.hidden_size)
        norm = network.layer(0).input_layernorm
        self.input_norm = None if norm is None else norm.weight.detach().numpy()

    @classmethod
    def for_network(
        cls,
        network: EagleInputNetwork,
        packed: PackedWeights | None,
        embedding: nn.Module,
        output: nn.Linear,
    ) -> EagleStep | None:
        """Make the fast path for a network.

        Args:
            packed: The network's concatenated weights, or None.
            embedding: The target's embedding (`model.get_input_embeddings()`).
            output: The target's LM head (`model.get_output_embeddings()`).

        Returns:
            None if it would be slower or give other results: for a large network, a GPU, another precision than
            float32, a norm in `fuse`, a subclass that overrides a method of the layer, or an embedding that does more
            than look up rows.
        """
        if packed is None or not is_plain_lookup(embedding, packed.attention, output.weight):
            return None
        overrides = owner(network, "fuse_drafted") is not DraftNetwork or type(network.layer(0)) is not DraftLayer
        if overrides or owner(network, "fuse") is not owner(network, "fused_weights"):
            return None
        fused = network.fused_weights()
        return None if fused is None else cls(network, packed, fused, cast(nn.Embedding, embedding).weight, output)

    def __call__(self, token: int, feature: Vector, position: int, keys: Tensor, values: Tensor) -> Vector:
        (fused_inputs, both), (states, x) = self.joined, self.layer.states
        both[: len(x)] = self.embedding[token]
        both[len(x) :] = feature
        torch.addmv(self.fused[1], self.fused[0], fused_inputs, out=states)
        read = states if self.input_norm is None else self.layer.norm(x, self.input_norm)
        return self.layer(read, position, keys, values)


@final
class Eagle3Step(SingleTokenStep):
    """Runs EAGLE-3's network, if it has one layer, and its LM head on one token of one row at a time.

    Holds weights and buffers.

    Args:
        packed: The network's concatenated weights, from `Eagle3.pack_weights`.
    """

    def __init__(self, network: Eagle3, packed: PackedWeights, embedding: Tensor) -> None:
        super().__init__(embedding, network.lm_head)
        config, own = network.config, cast(Any, network.layers[0])
        self.layer, self.joined = LayerStep(network, packed), buffer(2 * config.hidden_size)
        self.embed_norm, self.feature_norm, self.final_norm = (
            part.weight.detach().numpy() for part in (own.input_layernorm, own.hidden_norm, network.norm)
        )
        self.before_residual, self.norm_output = config.norm_before_residual, config.norm_output
        self.last = buffer(config.hidden_size)
        self.targets = network.draft_vocabulary.all_token_ids().tolist() if config.has_draft_vocabulary else None

    @classmethod
    def for_network(cls, network: Eagle3, packed: PackedWeights | None, embedding: nn.Module) -> Eagle3Step | None:
        """Make the fast path for a network.

        Returns:
            None if it would be slower or give other results: for a large network, a GPU, another precision than
            float32, or options that it does not implement.
        """
        config = network.config
        if config.qk_norm or config.output_bias or config.mask_token is not None:
            return None
        if packed is None or not is_plain_lookup(embedding, packed.attention, network.lm_head.weight):
            return None
        return cls(network, packed, cast(nn.Embedding, embedding).weight)

    def __call__(self, token: int, feature: Vector, position: int, keys: Tensor, values: Tensor) -> Vector:
        (fused_inputs, both), (_, x) = self.joined, self.layer.states
        size = len(x)
        self.layer.norm_into(self.embedding[token], self.embed_norm, both[:size])
        self.layer.norm_into(feature, self.feature_norm, both[size:])
        x[:] = both[size:] if self.before_residual else feature
        hidden = self.layer(fused_inputs, position, keys, values)
        if not self.norm_output:
            return hidden
        self.layer.norm_into(hidden, self.final_norm, self.last[1])
        return self.last[1]

    def logits(self, hidden: Vector) -> Vector:
        """Compute logits (Vd,) over the draft vocabulary from hidden (H,).

        The final norm is applied first, unless it was applied before. The logits are valid until the next call.
        """
        if not self.norm_output:
            self.layer.norm_into(hidden, self.final_norm, self.last[1])
            hidden = self.last[1]
        return super().logits(hidden)

    def token(self, drafted: int) -> int:
        return drafted if self.targets is None else self.targets[drafted]
