"""Encodes the transcript of a CTC head, several word pieces with probabilities at each position, for translation.

The input at a position is the expected embedding of its pieces. So the encoder can be trained first only on text (one
piece with probability 1), and then on speech. The speech encoder's states can be added, for information that the
pieces lack.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.daspeech.ar_decoder import ArConfig, ArDecoder
from mmdec.daspeech.dag_decoder import DagConfig, DagDecoder, padding_mask
from mmdec.nn.conformer import lengths_to_mask
from mmdec.nn.transformer import Attention, PooledDropout, RowsLinear, sinusoids


@dataclass(frozen=True)
class ReaderConfig:
    """Sizes of the piece reader and of its two decoders.

    Args:
        ar: The autoregressive decoder.
        dag: The graph decoder; None: no graph decoder.
    """

    pieces: int = 1001  # vocabulary size of the transcript, in pieces
    units: int = 2000  # vocabulary size of the translation, in units
    d_model: int = 256
    ffn: int = 1024  # inner channels of the feed-forward networks
    heads: int = 4
    layers: int = 6
    dropout: float = 0.1
    d_states: int = 0  # channels of the speech encoder's states that are added to the pieces; 0: none are added
    ar: ArConfig = field(default_factory=lambda: ArConfig(ffn=1024, layers=4))
    dag: DagConfig | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ReaderConfig:
        dag = values.get("dag")
        return cls(**{**values, "ar": ArConfig(**values["ar"]), "dag": DagConfig(**dag) if dag else None})


class PieceReader(nn.Module):
    """Encodes a transcript of N positions with K weighted pieces each."""

    def __init__(self, config: ReaderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_pieces = nn.Embedding(config.pieces, config.d_model)
        nn.init.normal_(self.embed_pieces.weight, std=config.d_model**-0.5)
        self.project = nn.Linear(config.d_states, config.d_model, bias=False) if config.d_states else None
        self.layers = nn.ModuleList([ReaderLayer(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.d_model)
        self.dropout = PooledDropout(config.dropout)

    def forward(self, pieces: Tensor, weights: Tensor, lengths: Tensor, states: Tensor | None = None) -> Tensor:
        """Encode B transcripts.

        Args:
            pieces: (B, N, K), ids.
            weights: (B, N, K), which sum to 1 over K.
            lengths: (B,), numbers of positions.
            states: (B, N, D), the speech encoder's state at each position (zeros where there is none), or None.

        Returns:
            (B, N, d).
        """
        d = self.config.d_model
        x = (self.embed_pieces(pieces) * weights[..., None]).sum(2) * math.sqrt(d)
        if self.project is not None and states is not None:
            x = x + self.project(states)
        x = self.dropout(x + sinusoids(x.shape[1], d, x.device))
        mask = padding_mask(lengths_to_mask(lengths, x.shape[1]))
        for layer in self.layers:
            x = layer(x, mask)
        return self.norm(x)


class ReaderLayer(nn.Module):
    """A pre-norm Transformer encoder layer: self-attention, then a feed-forward network."""

    def __init__(self, config: ReaderConfig) -> None:
        super().__init__()
        self.attention = Attention(config.d_model, config.heads, config.dropout)
        self.attention_norm = nn.LayerNorm(config.d_model)
        self.fc1 = RowsLinear(config.d_model, config.ffn)
        self.fc2 = RowsLinear(config.ffn, config.d_model)
        self.norm = nn.LayerNorm(config.d_model)
        self.dropout = PooledDropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.attention_norm(x)
        x = x + self.dropout(self.attention.attend(y, *self.attention.keys_values(y), mask))
        return x + self.dropout(self.fc2(self.dropout(F.gelu(self.fc1(self.norm(x))))))


class PiecesToUnits(nn.Module):
    """A translator of text pieces.

    Holds the piece reader, the autoregressive decoder, and the graph decoder (`decoder`) or None.
    """

    def __init__(self, config: ReaderConfig) -> None:
        super().__init__()
        self.config = config
        self.reader = PieceReader(config)
        self.ar = ArDecoder(config.ar, config.units, config.d_model)
        self.decoder = None if config.dag is None else DagDecoder(config.dag, config.units, config.d_model)

    @property
    def autoregressive(self) -> ArDecoder:
        """The autoregressive decoder."""
        return self.ar

    def encode(self, pieces: Tensor, lengths: Tensor) -> Tensor:
        """Encode text.

        Args:
            pieces: (B, N), ids, each with probability 1.
            lengths: (B,), numbers of pieces.

        Returns:
            States (B, N, d).
        """
        return self.reader(pieces[..., None], torch.ones_like(pieces[..., None], dtype=torch.float32), lengths)


def unit_limits(pieces: Tensor) -> list[int]:
    """Compute the maximum number of units of each row's translation, the same for speech, for text and in training.

    Args:
        pieces: (B,), numbers of pieces of the transcripts.
    """
    return (2 * pieces + 10).tolist()
