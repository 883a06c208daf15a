"""An autoregressive decoder of units (phones or word pieces): it ranks and verifies the graph decoder's texts.

It is a plain post-norm Transformer decoder, which attends to the same encoder states as the parallel decoder (the "AR
S2T" of DASpeech's table 5). It has a preallocated key-value cache, and on a GPU its loop synchronises with the device
only once in 16 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.daspeech.dag_decoder import padding_mask
from mmdec.daspeech.units import BOS, EOS, PAD
from mmdec.nn.conformer import lengths_to_mask
from mmdec.nn.transformer import DecoderLayer, PooledDropout, sinusoids

# device type -> steps after which the loop checks whether all batch rows have ended; on a CPU the check takes no time
END_CHECK_STEPS = {"cpu": 1}
DEFAULT_END_CHECK_STEPS = 16  # number of these steps on other devices, where each check must wait for the device


@dataclass(frozen=True)
class ArConfig:
    """Sizes of the autoregressive decoder; the defaults are those of a 6-layer speech-to-text decoder."""

    d_model: int = 256  # channels of the hidden states
    ffn: int = 2048  # inner channels of the feed-forward network
    heads: int = 4
    layers: int = 6
    dropout: float = 0.1


@dataclass
class ArCache:
    """The state of one `generate` call: key-value cache, masks and tables. The decoder itself holds weights only."""

    # self-attention: each layer's (keys, values), each (B, heads, size, d / heads)
    self_pairs: list[tuple[Tensor, Tensor]]
    # cross-attention to S encoder states: each layer's (keys, values), each (B, heads, S, d / heads)
    cross_pairs: list[tuple[Tensor, Tensor]]
    mask: Tensor | None  # (B, 1, 1, S), additive mask of the encoder states; None: none of them is padding
    positions: Tensor  # (size, d), sinusoidal position embeddings
    table: Tensor  # (V, d) embeddings of the units, multiplied by sqrt(d)
    length: int = 0  # number of units in the cache; `self_pairs` has room for `size`

    def reserve(self, size: int) -> None:
        """Enlarge the cache, if needed, to at least `size` units."""
        have = self.positions.shape[0]
        if size <= have:
            return
        more = max(size, 2 * have) - have
        self.self_pairs = [
            (F.pad(keys, (0, 0, 0, more)), F.pad(values, (0, 0, 0, more))) for keys, values in self.self_pairs
        ]
        width = self.positions.shape[1]
        self.positions = sinusoids(have + more, width, self.positions.device).to(self.positions.dtype)


class ArDecoder(nn.Module):
    """Predicts each unit from the units before it and the encoder's states."""

    def __init__(self, config: ArConfig, num_units: int, d_memory: int) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(num_units, config.d_model)
        nn.init.normal_(self.embed_tokens.weight, std=config.d_model**-0.5)
        self.layers = nn.ModuleList(
            [
                DecoderLayer(config.d_model, config.ffn, config.heads, config.dropout, d_memory)
                for _ in range(config.layers)
            ]
        )
        self.dropout = PooledDropout(config.dropout)

    def forward(self, tokens: Tensor, states: Tensor, state_lengths: Tensor) -> Tensor:
        """Score all units of a text in one pass.

        Args:
            tokens: (B, M), unit ids, which begin with <s>.
            states: (B, S, d_memory) of the encoder.
            state_lengths: (B,), numbers of states.

        Returns:
            Logits (B, M, V) of the next units.
        """
        size, d = tokens.shape[1], self.config.d_model
        x = self.dropout(math.sqrt(d) * self.embed_tokens(tokens) + sinusoids(size, d, tokens.device))
        causal = torch.full((size, size), -1e9, device=tokens.device).triu(1)
        memory_mask = padding_mask(lengths_to_mask(state_lengths, states.shape[1]))
        for layer in self.layers:
            x = layer(x, causal, states, memory_mask)
        return F.linear(x, self.embed_tokens.weight)

    @property
    def stack(self) -> list[DecoderLayer]:
        """The decoder layers, typed for type checkers."""
        return cast(list[DecoderLayer], list(self.layers))

    def start(self, states: Tensor, state_lengths: Tensor, size: int) -> ArCache:
        """Make an empty cache for at most `size` units.

        Args:
            states: (B, S, d_memory) of the encoder.
            state_lengths: (B,), numbers of states.
            size: Maximum number of units.
        """
        b, d = states.shape[0], self.config.d_model
        mask = padding_mask(lengths_to_mask(state_lengths, states.shape[1]))
        if b == 1:  # a batch of one row has no padding, so it needs no mask
            states, mask = states[:, : int(state_lengths[0])], None
        cross_pairs = []
        for layer in self.stack:
            keys, values = layer.encoder_attn.keys_values(states)
            cross_pairs.append((keys.contiguous(), values.contiguous()))
        shape = (b, self.config.heads, size, d // self.config.heads)
        self_pairs = [(states.new_empty(shape), states.new_empty(shape)) for _ in self.layers]
        table = math.sqrt(d) * self.embed_tokens.weight
        return ArCache(self_pairs, cross_pairs, mask, sinusoids(size, d, states.device).to(states.dtype), table)

    def step(self, tokens: Tensor, cache: ArCache) -> Tensor:
        """Process the next token (B,) of each row.

        Returns:
            Logits (B, V) of the token after it.
        """
        index = cache.length
        x = (cache.table[tokens] + cache.positions[index])[:, None]  # shape (B, 1, d)
        for layer, (keys, values), memory in zip(self.stack, cache.self_pairs, cache.cross_pairs, strict=True):
            key, value = layer.self_attn.keys_values(x)
            keys[:, :, index] = key[:, :, 0]
            values[:, :, index] = value[:, :, 0]
            x = layer.rest(x, keys[:, :, : index + 1], values[:, :, : index + 1], None, *memory, cache.mask)
        cache.length += 1
        return F.linear(x[:, 0], self.embed_tokens.weight)

    def extend(self, tokens: Tensor, indices: Tensor, cache: ArCache, mask: Tensor | None) -> Tensor:
        """Process several tokens (B, N) of each row in one pass, such as a draft tree.

        Keys and values of the tokens are written after those in the cache, which is enlarged if needed. `cache.length`
        does not change: the caller decides which of the tokens stay in the cache.

        Args:
            tokens: Unit ids.
            indices: (B, N), position of each token.
            cache: The keys and values so far.
            mask: Additive (B, 1, N, length + N), which cached and new tokens each token attends to; None: all.

        Returns:
            Logits (B, N, V).
        """
        start, count = cache.length, tokens.shape[1]
        cache.reserve(start + count)
        x = cache.table[tokens] + cache.positions[indices]
        for layer, (keys, values), memory in zip(self.stack, cache.self_pairs, cache.cross_pairs, strict=True):
            key, value = layer.self_attn.keys_values(x)
            keys[:, :, start : start + count] = key
            values[:, :, start : start + count] = value
            filled = slice(0, start + count)
            x = layer.rest(x, keys[:, :, filled], values[:, :, filled], mask, *memory, cache.mask)
        return F.linear(x, self.embed_tokens.weight)

    @torch.inference_mode()
    def greedy_steps(
        self, states: Tensor, state_lengths: Tensor, max_length: int, min_length: int = 0
    ) -> Iterator[Tensor]:
        """Decode greedily, step by step.

        Args:
            states: (B, S, d_memory) of the encoder.
            state_lengths: (B,), numbers of states.
            max_length: Maximum number of units of a row.
            min_length: </s> is not chosen before this number of units (to measure the time for a fixed length).

        Yields:
            The units (B,) of each step; <pad> for a row that has ended. On a GPU a few more steps may follow after all
            rows have ended.
        """
        cache = self.start(states, state_lengths, max_length + 1)
        tokens = torch.full((states.shape[0],), BOS, device=states.device)
        done = torch.zeros(states.shape[0], dtype=torch.bool, device=states.device)
        every = END_CHECK_STEPS.get(states.device.type, DEFAULT_END_CHECK_STEPS)
        for index in range(max_length + 1):
            logits = self.step(tokens, cache)
            if index < min_length:
                logits[:, EOS] = -torch.inf
            best = logits.argmax(-1)
            tokens = torch.where(done, PAD, best)
            yield tokens
            done |= best == EOS
            if index % every == every - 1 and bool(done.all()):
                return

    def generate(self, states: Tensor, state_lengths: Tensor, max_length: int, min_length: int = 0) -> list[list[int]]:
        """Decode greedily, see `greedy_steps`.

        Returns:
            For each row the unit ids, without <s> and </s>.
        """
        return rows_of_steps(list(self.greedy_steps(states, state_lengths, max_length, min_length)), max_length)


def rows_of_steps(steps: Sequence[Tensor], max_length: int) -> list[list[int]]:
    """Return the unit ids of each row, without </s>.

    Args:
        steps: (B,) units of each step, from `ArDecoder.greedy_steps`.
        max_length: Maximum number of units of a row.
    """
    rows = torch.stack([*steps], 1)[:, :max_length].tolist()
    return [row[: next((i for i, unit in enumerate(row) if unit in (EOS, PAD)), len(row))] for row in rows]
