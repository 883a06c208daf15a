"""The base class of draft networks that read several layers of the target: EAGLE-3's, P-EAGLE's and DFlash's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from mmdec.drafters.networks.config import DraftConfig
from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.drafters.networks.layers import DraftLayer, RMSNorm
from mmdec.drafters.networks.vocabulary import DraftVocabulary
from mmdec.drafters.networks.weights import MAX_CONFIG_SIZE, check_size
from mmdec.errors import InputError

MAX_LAYERS = 64


class LayeredConfig(DraftConfig):
    """Base class of the configurations of EAGLE-3 and DFlash. Both are dataclasses, which also have these fields."""

    num_hidden_layers: int
    draft_vocab_size: int  # number of tokens that can be drafted; 0: all tokens of the target
    own_embedding: bool  # whether the network has an embedding of its own; False: it uses the target's
    # transformers' settings, {"rope_type": "linear" | "llama3" | "yarn", "factor": ...}; None: ordinary rotary
    # positions
    rope_scaling: dict[str, Any] | None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("num_hidden_layers", self.num_hidden_layers, MAX_LAYERS, "Use the published value.")
        if self.draft_vocab_size:
            check_size("draft_vocab_size", self.draft_vocab_size, MAX_CONFIG_SIZE, "Use the published value.")
        if self.rope_scaling is not None and not isinstance(self.rope_scaling, dict):
            raise InputError(
                f"`rope_scaling` must be a mapping of settings, but is {self.rope_scaling!r:.60}. Leave it out."
            )

    @property
    def vocabulary(self) -> int:
        """The number of tokens that can be drafted."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def has_draft_vocabulary(self) -> bool:
        """Whether the draft vocabulary is a part of the target's, so that tables convert between the two."""
        return self.vocabulary < self.vocab_size


class LayeredNetwork(DraftNetwork):
    """Base class of EAGLE-3's and DFlash's networks.

    It allows several layers, and an LM head and an embedding of their own.
    """

    config: Any  # a `LayeredConfig`; each subclass declares its own class

    def build_layers(self, layers: Sequence[DraftLayer], output_bias: bool) -> None:
        """Add the decoder layers.

        Args:
            output_bias: Whether attention's output projection has a bias.
        """
        self.layers = nn.ModuleList(layers)
        if output_bias:
            for layer in layers:
                attention = layer.self_attn
                attention.o_proj = nn.Linear(attention.o_proj.in_features, attention.o_proj.out_features)

    def build_ends(self, sizes: LayeredConfig, own_head: bool) -> None:
        """Create the final norm and, as configured, an LM head, an embedding and vocabulary tables.

        The tables are between the draft vocabulary and the target's.
        """
        self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        if own_head:
            self.lm_head = nn.Linear(sizes.hidden_size, sizes.vocabulary, bias=False)
        if sizes.own_embedding:
            self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        if sizes.has_draft_vocabulary:
            self.register_buffer("d2t", torch.zeros(sizes.vocabulary, dtype=torch.long))
            self.register_buffer("t2d", torch.arange(sizes.vocab_size) < sizes.vocabulary)

    @property
    def own_embedding(self) -> nn.Embedding | None:
        return cast(nn.Embedding, self.embed_tokens) if self.config.own_embedding else None

    def share_ends(self, embedding: nn.Module, output: nn.Linear) -> None:
        # in most folders the embedding is a copy of the target's: do not keep it twice
        own_embedding = self.own_embedding
        if (
            own_embedding is not None
            and type(embedding) is nn.Embedding
            and torch.equal(own_embedding.weight, embedding.weight)
        ):
            self.config = replace(self.config, own_embedding=False)
            del self.embed_tokens

    @property
    def draft_vocabulary(self) -> DraftVocabulary:
        offsets = cast(Tensor, self.d2t) if self.config.has_draft_vocabulary else None
        return DraftVocabulary(self.config.vocab_size, offsets)
