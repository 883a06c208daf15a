"""ViSpec: a draft network that reads an image through a few learned queries (Kang et al. 2025, arXiv 2509.15235).

The network computes the same as the published code. Position t reads token t + 1, and counts as visual if token t + 1
is visual. Learned queries cross-attend to the input embeddings of an image. All outputs but the last replace the image,
at its last positions. The last output is a global vector: `img_fc` mixes the vector of the latest image into the
feature of every later text position, also of drafted tokens; before the first image the vector is zero. `img_fc` is
initialised as the identity on the feature.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import ClassVar, Self, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mmdec.drafters.eagle.eagle import EagleInputNetwork
from mmdec.drafters.networks.compressors import Resampler, image_spans, last_positions
from mmdec.drafters.networks.config import DraftConfig
from mmdec.drafters.networks.draft_network import PromptInput
from mmdec.drafters.registry import built_in_network
from mmdec.errors import InputError

MAX_QUERIES = 256


@dataclass(frozen=True)
class ViSpecConfig(DraftConfig):
    """Sizes and options of a ViSpec network.

    `attention_bias` also adds biases to the keys and values of the image queries.
    """

    queries: int = 2  # number of learned queries for an image; the output of the last one is the global vector

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.queries) is not int or not 1 <= self.queries <= MAX_QUERIES:
            raise InputError(f"`queries` must be 1 to {MAX_QUERIES}, but is {self.queries!r:.60}. 2 is the paper's.")
        if self.hidden_size % self.num_attention_heads:
            raise InputError(
                f"`num_attention_heads` must divide {self.hidden_size} channels for the adaptor, but is "
                f"{self.num_attention_heads}. Choose a divisor."
            )
        if len(self.layers) != 1:
            raise InputError(f"`layers` must name one layer, but is {self.layers!r:.60}. (-1,) is the published one.")


@built_in_network(
    "vispec",
    published="mmdec.drafters.eagle.checkpoint",
    note="ViSpec: a few visual tokens stand for the whole picture.",
)
@final
class ViSpec(EagleInputNetwork):
    """ViSpec's network.

    It holds EAGLE's layer, the learned image queries with their cross-attention, and `img_fc` for the global vector of
    the latest image.
    """

    config_class: ClassVar[type[DraftConfig]] = ViSpecConfig
    global_vector: Tensor | None = None  # the latest image's, broadcastable to the features; None without an image

    def __init__(self, config: ViSpecConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.imadpt = Resampler(size, config.queries, config.num_attention_heads, config.attention_bias)
        self.img_fc = nn.Linear(2 * size, size, bias=config.fc_bias)
        with torch.no_grad():
            self.img_fc.weight.copy_(torch.cat([torch.eye(size), torch.zeros(size, size)], 1))
            if self.img_fc.bias is not None:
                self.img_fc.bias.zero_()

    def condition_on(self, vector: Tensor | None) -> Self:
        conditioned = copy(self)
        conditioned.global_vector = vector
        return conditioned

    def fuse(self, embeds: Tensor, features: Tensor) -> Tensor:
        weight, bias, size = self.img_fc.weight, self.img_fc.bias, self.config.hidden_size
        mixed = linear(features, weight[:, :size], bias)
        if self.global_vector is not None:
            mixed = mixed + linear(self.global_vector, weight[:, size:])
        return super().fuse(embeds, mixed)

    def fused_weights(self) -> tuple[Tensor, Tensor] | None:
        weights = super().fused_weights()
        if weights is None:
            return None
        (weight, bias), size = weights, self.config.hidden_size
        columns, mixing = weight[:, size:], self.img_fc.weight.detach()
        added = weight.new_zeros(size) if self.img_fc.bias is None else self.img_fc.bias.detach()
        if self.global_vector is not None:
            added = added + mixing[:, size:] @ self.global_vector.flatten()
        return torch.cat([weight[:, :size], columns @ mixing[:, :size]], 1), bias + columns @ added

    def prompt(self, embeds: Tensor, features: Tensor, visual: Tensor) -> PromptInput:
        """Compute the layer's input for the prompt of one row, without padding; images are compressed.

        Args:
            embeds: (L, H).
            features: (L, H).
            visual: (L,) bool, True at visual tokens.
        """
        following, images = embeds[1:], image_spans(visual[1:])
        text = (~visual[1:]).nonzero()[:, 0]
        if not images:
            return PromptInput(self.fuse(following, features[:-1]), text, self.global_vector)
        queries = cast(ViSpecConfig, self.config).queries
        earlier = self.global_vector
        globals_ = [following.new_zeros(following.shape[1]) if earlier is None else earlier]
        states, columns = [], [text]
        # position t reads token t + 1, so no position reads the first token
        weights = [following.new_zeros(1)] if bool(visual[0]) else []
        for begin, end in images:
            compressed = self.imadpt(following[begin:end])
            count = min(queries - 1, end - begin)  # at most as many as the image has positions
            states.append(compressed.states[queries - 1 - count : queries - 1])
            columns.append(last_positions(end - begin, count, text.device) + begin)
            globals_.append(compressed.states[-1])
            weights.append(compressed.visual_weights)
        ends = torch.tensor([end for _, end in images], device=text.device)
        latest = (text[:, None] >= ends).sum(1)  # for each text position: the number of images before it
        fused = self.condition_on(torch.stack(globals_)[latest]).fuse(following[text], features[:-1][text])
        order = torch.cat(columns).argsort()
        merged = torch.cat([fused, *states])[order]
        return PromptInput(merged, torch.cat(columns)[order], globals_[-1], torch.cat(weights), "queries")
