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
from mmdec.drafters.networks.draft_network import PromptInput
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
    """EAGLE's draft network with another input.

    It reads the visual embedding at visual positions, and fc's output at text positions.
    """

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

    def prompt(self, embeds: Tensor, features: Tensor, visual: Tensor) -> PromptInput:
        """Compute the layer's input for the prompt of one row, without padding.

        Args:
            embeds: (L, H).
            features: (L, k * H).
            visual: (L,) bool, True at visual tokens.
        """
        prompted = super().prompt(embeds, features, visual)
        if not bool(visual.any()):
            return prompted
        if cast(MsdConfig, self.config).visual_token == "next":
            states = torch.where(visual[1:, None], embeds[1:], prompted.states)
        else:
            fused = self.fuse(embeds[next_text(visual)[1:]], features[:-1])
            states = torch.where(visual[:-1, None], embeds[:-1], fused)
        return replace(prompted, states=states)


def next_text(visual: Tensor) -> Tensor:
    """Find for each token the index of the first text token at or after this token, (L,) int64.

    A visual token without a later text token gets its own index.

    Args:
        visual: (L,) bool, True at visual tokens.
    """
    columns = torch.arange(len(visual), device=visual.device)
    ahead = torch.where(visual, len(visual), columns).flip(0).cummin(0).values.flip(0)
    return torch.where(ahead == len(visual), columns, ahead)
