"""MSD: a draft network that treats visual and text tokens separately (Lin et al. 2025, arXiv 2505.14260).

At a text position t, the layer's input is EAGLE's: fc([embedding of token t + 1; feature of token t]). At a visual
position it is the projected embedding of a visual token, without fc. The paper does not say whether this is token t or
token t + 1. In the published code, in training and decoding, it is token t + 1, because all embeddings are shifted by
one: position t is visual if token t + 1 is. So the position of an image's last token is a text position, whose input is
the first token after the image, and no position reads the sequence's first token. The option `visual_token` says
with which of the two a network was trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, cast, final, get_args

import torch
from torch import Tensor

from mmdec.drafters.eagle.eagle import EagleInputNetwork
from mmdec.drafters.networks.config import DraftConfig
from mmdec.drafters.networks.conventions import Conventions, PictureChoice
from mmdec.drafters.registry import built_in_network
from mmdec.errors import InputError

VisualToken = Literal["next", "own"]


@dataclass(frozen=True)
class MsdConfig(DraftConfig):
    """Sizes and options of an MSD network.

    The published network for Qwen2-VL has `input_norm` and `attention_bias`, the published network for LLaVA has
    neither.

    Args:
        visual_token: "next": position t is visual if token t + 1 is visual, and holds the embedding of token t + 1, as
            in the published code. "own": position t is visual if token t is visual, and holds the embedding of token t
            (not in the paper); the position before an image reads the first text token after the image, which no other
            position would read.
    """

    visual_token: VisualToken = "next"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.visual_token not in ("next", "own"):
            raise InputError(
                f"`visual_token` must be next or own, but is {self.visual_token!r:.60}. Published networks have next."
            )


@built_in_network("msd", published="mmdec.drafters.eagle.checkpoint", note="MSD: drafts text and picture apart.")
@final
class MsdNetwork(EagleInputNetwork):
    """EAGLE's draft network with another input: the visual embedding at visual positions, fc's output at text
    positions."""

    config_class: ClassVar[type[DraftConfig]] = MsdConfig

    def conventions(self) -> Conventions:
        return replace(
            super().conventions(), pictures=[PictureChoice("visual_token", "visual columns", get_args(VisualToken))]
        )

    @property
    def card_note(self) -> str:
        if self.config.vocab_size != 32000:
            return ""
        return (
            "It was trained for liuhaotian/llava-v1.5. llava-hf's has the same 32000 tokens and 64 more: convert with "
            "`--vocab-size 32064` to draft for that one; the network holds no row of the vocabulary."
        )

    def inputs(self, embeds: Tensor, features: Tensor, visual: Tensor | None = None) -> Tensor:
        """Compute the layer's input (B, L - 1, H) for whole rows.

        Args:
            embeds: (B, L, H).
            features: (B, L, k * H).
            visual: (B, L) bool, True at visual tokens.
        """
        if visual is None or not bool(visual.any()):
            return super().inputs(embeds, features)
        following = embeds[:, 1:]
        if cast(MsdConfig, self.config).visual_token == "next":
            return torch.where(visual[:, 1:, None], following, self.fuse(following, features[:, :-1]))
        index = next_text(visual)[:, 1:, None].expand_as(following)  # shape (B, L - 1, H)
        fused = self.fuse(embeds.gather(1, index), features[:, :-1])
        return torch.where(visual[:, :-1, None], embeds[:, :-1], fused)


def next_text(visual: Tensor) -> Tensor:
    """Find for each token the index of the first text token at or after this token, (B, L) int64.

    A visual token without a later text token gets its own index.

    Args:
        visual: (B, L) bool, True at visual tokens.
    """
    length = visual.shape[1]
    columns = torch.arange(length, device=visual.device).expand_as(visual)
    ahead = torch.where(visual, length, columns).flip(1).cummin(1).values.flip(1)
    return torch.where(ahead == length, columns, ahead)
