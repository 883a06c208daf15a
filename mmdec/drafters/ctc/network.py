"""A CTC head predicts pieces of text, frame by frame, from the states of a frozen encoder (Graves et al. 2006).

It has convolutions only, no attention: the encoder's states already depend on the whole recording. A translator and a
drafter use this network, each with its own vocabulary of pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.nn.conformer import lengths_to_mask
from mmdec.nn.transformer import PooledDropout, RowsLinear

BLANK = 0


@dataclass(frozen=True)
class CtcHeadConfig:
    """Sizes of the CTC head."""

    d_states: int = 512  # channels of the encoder's states
    pieces: int = 1001  # vocabulary size, the CTC blank included
    stride: int = 2  # number of encoder states that become one frame of the head: 1, 2 or 4
    d_model: int = 320  # channels of the head's hidden states
    layers: int = 5
    kernel: int = 11  # number of frames that a depthwise convolution spans
    dropout: float = 0.1

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class CtcHead(nn.Module):
    """Computes logits of V pieces at each frame, from the states of an encoder.

    The forward pass takes states (B, S, D) and lengths (B,), numbers of states. It returns logits
    (B, ceil(S / stride), V) and lengths (B,), numbers of frames.
    """

    def __init__(self, config: CtcHeadConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = nn.LayerNorm(config.d_states)
        self.entry = nn.Conv1d(config.d_states, config.d_model, 2 * config.stride + 1, config.stride, config.stride)
        self.blocks = nn.ModuleList([ConvolutionBlock(config) for _ in range(config.layers)])
        self.final_norm = nn.LayerNorm(config.d_model)
        self.output = nn.Linear(config.d_model, config.pieces)

    def forward(self, states: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        hidden, lengths = self.hidden_states(states, lengths)
        return self.output(hidden), lengths

    def hidden_states(self, states: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Apply all layers except the output layer.

        Args:
            states: (B, S, D) of the encoder.
            lengths: (B,), numbers of states.

        Returns:
            The hidden states of the frames (B, ceil(S / stride), d); lengths (B,), numbers of frames.
        """
        x = self.norm(states) * lengths_to_mask(lengths, states.shape[1])[..., None]
        x = self.entry(x.transpose(1, 2)).transpose(1, 2)
        lengths = torch.div(lengths - 1, self.config.stride, rounding_mode="floor") + 1
        real = lengths_to_mask(lengths, x.shape[1])[..., None]
        for block in self.blocks:
            x = block(x, real)
        return self.final_norm(x), lengths


class ConvolutionBlock(nn.Module):
    """A residual block: a depthwise convolution over time, then a gated linear layer over channels."""

    def __init__(self, config: CtcHeadConfig) -> None:
        super().__init__()
        d = config.d_model
        self.depthwise = nn.Conv1d(d, d, config.kernel, padding=config.kernel // 2, groups=d)
        self.norm = nn.LayerNorm(d)
        self.rise = RowsLinear(d, 4 * d)
        self.fall = RowsLinear(2 * d, d)
        self.dropout = PooledDropout(config.dropout)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        y = self.depthwise((x * real).transpose(1, 2)).transpose(1, 2)
        value, gate = self.rise(self.norm(y)).chunk(2, -1)
        return x + self.dropout(self.fall(self.dropout(value * F.silu(gate))))


def collapse(best: Tensor, lengths: Tensor) -> list[list[int]]:
    """Convert CTC frames to text: merge equal neighbours, then drop blanks.

    Args:
        best: (B, N), the best piece id of each frame.
        lengths: (B,), numbers of frames.

    Returns:
        The piece ids of each row.
    """
    rows = []
    for row, count in zip(best.tolist(), lengths.tolist(), strict=True):
        collapsed = [piece for at, piece in enumerate(row[:count]) if at == 0 or piece != row[at - 1]]
        rows.append([piece for piece in collapsed if piece != BLANK])
    return rows


@dataclass(frozen=True)
class CtcTranscripts:
    """Transcripts of B recordings by a CTC head.

    Each of the N positions has K pieces: the piece in the transcript, and its K - 1 most probable alternatives.
    """

    # (B, N, K) piece ids: at each position the transcript's piece, then its alternatives; 0 beyond a row's end
    pieces: Tensor
    weights: Tensor  # (B, N, K): probabilities of these pieces, which sum to 1 at each position; 0 beyond a row's end
    lengths: Tensor  # (B,): number of positions of each transcript
    frames: Tensor  # (B, N): index of the frame at which the transcript's piece is most probable
    logprobs: Tensor  # (B, F): ln P of the most probable piece or blank at each frame; 0 beyond a row's end
    counts: Tensor  # (B,): number of frames of each recording

    def select(self, rows: list[int]) -> CtcTranscripts:
        """Return only the transcripts of the rows with these indices, in that order."""
        return CtcTranscripts(*(getattr(self, part.name)[rows] for part in fields(self)))


def best_pieces(logits: Tensor, lengths: Tensor, best: int = 8) -> CtcTranscripts:
    """Transcribe logits (B, F, V) of F frames greedily.

    Take the best piece of each frame, merge equal neighbours, drop blanks.

    Args:
        lengths: (B,), numbers of frames.
        best: K, number of pieces at each position of the transcript: the chosen piece and its most probable
            alternatives. Their weights are mean probabilities over the frames that were merged (without the blank),
            scaled to sum to 1 at each position.
    """
    likely, paths = logits.float().log_softmax(-1).max(-1)
    real = lengths_to_mask(lengths.to(logits.device), logits.shape[1])
    rows: list[tuple[Tensor, Tensor, Tensor]] = []
    for row, count in enumerate(lengths.tolist()):
        path = paths[row, :count]
        is_piece = path != BLANK
        first = is_piece & torch.cat([is_piece.new_ones(1), path[1:] != path[:-1]])[:count]
        # for each frame that is not blank: index of its piece in the transcript
        place = (first.cumsum(0) - 1)[is_piece]
        total = int(first.sum())
        probabilities = logits[row, :count][is_piece].float().softmax(-1)
        probabilities[:, BLANK] = 0
        mean = probabilities.new_zeros(total, logits.shape[-1]).index_add_(0, place, probabilities)
        mean = mean / mean.new_zeros(total).index_add_(0, place, mean.new_ones(len(place))).clamp(min=1)[:, None]
        weights, pieces = mean.topk(best, -1)
        # Sort the frames by their piece, and frames of the same piece by probability, the highest first. Subtracting 2
        # for each piece keeps the pieces apart, because probabilities differ by at most 1.
        ranks = probabilities.amax(-1) - place * 2.0
        order = ranks.argsort(descending=True, stable=True)
        starts = torch.searchsorted(place[order], torch.arange(total, device=logits.device))
        rows.append((pieces, weights / weights.sum(-1, keepdim=True), is_piece.nonzero()[:, 0][order[starts]]))
    pieces, weights, frames = pad_places(rows)
    counts = torch.tensor([len(row) for _, _, row in rows], device=logits.device)
    return CtcTranscripts(pieces, weights, counts, frames, likely.masked_fill(~real, 0.0), lengths.to(logits.device))


def pad_places(rows: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Stack the rows' pieces (N, K), weights (N, K) and frames (N,), padded with 0 to the longest row.

    The result has at least 1 position.

    Returns:
        (B, N, K), (B, N, K), (B, N).
    """
    size = max(1, *(len(frames) for _, _, frames in rows))
    pieces, weights, frames = (
        torch.stack([F.pad(part, (0, 0) * (part.dim() - 1) + (0, size - len(part))) for part in parts])
        for parts in zip(*rows, strict=True)
    )
    return pieces, weights, frames
