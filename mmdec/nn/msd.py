"""MSD: a draft network that decouples vision from text (Lin et al. 2025, arXiv 2505.14260).

A text column takes what EAGLE's takes, fc([embedding of token t + 1; feature of token t]). A visual column takes the
target's projected visual embedding of token t itself, past fc. So no column would read the first token after an image:
as published, the column before the image takes it as its next token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from mmdec.nn.draft_config import DraftConfig
from mmdec.nn.draft_network import DraftNetwork
from mmdec.types import InputError


@dataclass(frozen=True)
class MsdConfig(DraftConfig):
    """Shape of the network. For Qwen2-VL the published one has `input_norm` and `attention_bias`, for LLaVA neither."""

    text_after_image: bool = True  # the column before an image reads the first token after it; False: the image's first

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.text_after_image) is not bool:
            raise InputError(
                f"`text_after_image` must be true or false, but is {self.text_after_image!r:.60}. Choose one."
            )


@final
class MsdNetwork(DraftNetwork):
    """EAGLE's layer over visual embeddings as they are and fused text."""

    system: ClassVar[str] = "msd"
    config_class: ClassVar[type[DraftConfig]] = MsdConfig

    def inputs(self, embeds: Tensor, features: Tensor, visual: Tensor | None = None) -> Tensor:
        """What enters the layer for whole rows; see `DraftNetwork.inputs`."""
        if visual is None or not bool(visual.any()):
            return super().inputs(embeds, features)
        following = embeds[:, 1:]
        assert isinstance(self.config, MsdConfig)
        if self.config.text_after_image:
            index = next_text(visual)[:, 1:, None].expand_as(following)  # (B, L - 1, H)
            following = embeds.gather(1, index)
        fused = self.fuse(following, features[:, :-1])
        return torch.where(visual[:, :-1, None], embeds[:, :-1], fused)


def next_text(visual: Tensor) -> Tensor:
    """visual (B, L) bool -> (B, L) int64: each column's own index, or at a visual one that of the first text column
    after it. Where none follows, its own."""
    length = visual.shape[1]
    columns = torch.arange(length, device=visual.device).expand_as(visual)
    ahead = torch.where(visual, length, columns).flip(1).cummin(1).values.flip(1)
    return torch.where(ahead == length, columns, ahead)
