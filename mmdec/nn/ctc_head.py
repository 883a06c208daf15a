"""A CTC head: from the states of a frozen encoder to pieces of text, frame by frame (Graves et al. 2006).

Convolutions alone, for the states have looked at the whole sound already. The translator's reader and Whisper's drafter
use the same network, each with pieces of its own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.nn.conformer import lengths_to_mask
from mmdec.nn.dropout import PooledDropout

BLANK = 0


@dataclass(frozen=True)
class CtcHeadConfig:
    """Sizes. stride: encoder states in a frame, 1, 2 or 4. pieces: blank included."""

    d_states: int = 512
    pieces: int = 1001
    stride: int = 2
    d_model: int = 320
    layers: int = 5
    kernel: int = 11
    dropout: float = 0.1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class CtcHead(nn.Module):
    """forward: states (B, S, D), lengths (B,) -> logits (B, ceil(S / stride), V), lengths (B,)."""

    def __init__(self, config: CtcHeadConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = nn.LayerNorm(config.d_states)
        self.entry = nn.Conv1d(config.d_states, config.d_model, 2 * config.stride + 1, config.stride, config.stride)
        self.blocks = nn.ModuleList([ConvolutionBlock(config) for _ in range(config.layers)])
        self.final_norm = nn.LayerNorm(config.d_model)
        self.output = nn.Linear(config.d_model, config.pieces)

    def forward(self, states: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        hidden, lengths = self.hidden(states, lengths)
        return self.output(hidden), lengths

    def hidden(self, states: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """What the output layer reads: (B, N, d), lengths (B,)."""
        x = self.norm(states) * lengths_to_mask(lengths, states.shape[1])[..., None]
        x = self.entry(x.transpose(1, 2)).transpose(1, 2)
        lengths = torch.div(lengths - 1, self.config.stride, rounding_mode="floor") + 1
        real = lengths_to_mask(lengths, x.shape[1])[..., None]
        for block in self.blocks:
            x = block(x, real)
        return self.final_norm(x), lengths


class ConvolutionBlock(nn.Module):
    """A convolution of each channel over time, then a gated product over channels, added to what came in."""

    def __init__(self, config: CtcHeadConfig) -> None:
        super().__init__()
        d = config.d_model
        self.depthwise = nn.Conv1d(d, d, config.kernel, padding=config.kernel // 2, groups=d)
        self.norm = nn.LayerNorm(d)
        self.rise = nn.Linear(d, 4 * d)
        self.fall = nn.Linear(2 * d, d)
        self.dropout = PooledDropout(config.dropout)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        y = self.depthwise((x * real).transpose(1, 2)).transpose(1, 2)
        value, gate = self.rise(self.norm(y)).chunk(2, -1)
        return x + self.dropout(self.fall(self.dropout(value * F.silu(gate))))


def collapse(best: Tensor, lengths: Tensor) -> list[list[int]]:
    """The best piece of each frame (B, N) -> each row's pieces: equal neighbours are one, blanks go."""
    rows = []
    for row, count in zip(best.tolist(), lengths.tolist(), strict=True):
        kept = [piece for at, piece in enumerate(row[:count]) if at == 0 or piece != row[at - 1]]
        rows.append([piece for piece in kept if piece != BLANK])
    return rows
