"""MSD: a draft network that decouples vision from text (Lin et al. 2025, arXiv 2505.14260).

A text column t is the same as in EAGLE, fc([embedding of token t + 1; feature of token t]). A visual column is a
token's projected visual embedding, without fc. The paper does not say which token's. In the published code (decoding
and training) the embeddings are first shifted by one, like EAGLE's tokens: column t is visual if token t + 1 is, and
holds that token's embedding. So the column of an image's last token is a text column that reads the first token after
the image, and no column reads the first token of a text. `visual_token` says which layout a network was trained with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, cast, final

import torch
from torch import Tensor

from mmdec.nn.draft_network import DraftConfig, DraftNetwork
from mmdec.types import InputError

VisualToken = Literal["next", "own"]


@dataclass(frozen=True)
class MsdConfig(DraftConfig):
    """Sizes of the network. The published one has `input_norm` and `attention_bias` for Qwen2-VL, neither for LLaVA.

    visual_token: "next", as published, see above. "own" (not in the paper): column t is visual if token t is, and holds
        that token's embedding; the column before an image reads the first text token after it, which no other column
        would.
    """

    visual_token: VisualToken = "next"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.visual_token not in ("next", "own"):
            raise InputError(
                f"`visual_token` must be next or own, but is {self.visual_token!r:.60}. Published networks have next."
            )


@final
class MsdNetwork(DraftNetwork):
    """EAGLE's layer. Its input at a visual column is the visual embedding; at a text column it is fc's output."""

    system: ClassVar[str] = "msd"
    config_class: ClassVar[type[DraftConfig]] = MsdConfig

    def inputs(self, embeds: Tensor, features: Tensor, visual: Tensor | None = None) -> Tensor:
        """Compute the layer's input (B, L - 1, H) for whole rows. embeds: (B, L, H). features: (B, L, k * H). visual:
        (B, L) bool, True at visual tokens."""
        if visual is None or not bool(visual.any()):
            return super().inputs(embeds, features)
        following = embeds[:, 1:]
        if cast(MsdConfig, self.config).visual_token == "next":
            return torch.where(visual[:, 1:, None], following, self.fuse(following, features[:, :-1]))
        index = next_text(visual)[:, 1:, None].expand_as(following)  # (B, L - 1, H)
        fused = self.fuse(embeds.gather(1, index), features[:, :-1])
        return torch.where(visual[:, :-1, None], embeds[:, :-1], fused)


def next_text(visual: Tensor) -> Tensor:
    """For each column find the first text column from it on: (B, L) int64. visual: (B, L) bool, True at visual columns.

    A visual column without a later text column gets its own index.
    """
    length = visual.shape[1]
    columns = torch.arange(length, device=visual.device).expand_as(visual)
    ahead = torch.where(visual, length, columns).flip(1).cummin(1).values.flip(1)
    return torch.where(ahead == length, columns, ahead)
