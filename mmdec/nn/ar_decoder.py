"""Autoregressive decoder over units: the baseline of the parallel decoder, and the verifier of its drafts.

A plain post-norm Transformer decoder on the same encoder states (the "AR S2T" of DASpeech's table 5), with a
preallocated key-value cache and a loop that synchronises with the device only once in 16 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.nn.conformer import lengths_to_mask
from mmdec.nn.dag_decoder import BOS, EOS, PAD, additive
from mmdec.nn.transformer import DecoderLayer, PooledDropout, sinusoids

LOOK_EVERY = {"cpu": 1}  # steps between two checks whether all rows have ended; on a CPU a check is free
LOOK_RARELY = 16  # steps between two such checks on other devices, where each check waits for the device


@dataclass(frozen=True)
class ArConfig:
    """Sizes of the autoregressive decoder; the defaults are a 6-layer S2T decoder."""

    d_model: int = 256  # channels
    ffn: int = 2048  # inner channels of the feed-forward network
    heads: int = 4
    layers: int = 6
    dropout: float = 0.1


@dataclass
class ArCache:
    """The state of one decoding run; the decoder itself holds weights only."""

    own: list[tuple[Tensor, Tensor]]  # each layer's keys and values of the units so far: (B, heads, columns, d / heads)
    memories: list[tuple[Tensor, Tensor]]  # each layer's keys and values of S encoder states: (B, heads, S, d / heads)
    mask: Tensor | None  # (B, 1, 1, S) additive mask of the encoder's states; None: none of them is padding
    positions: Tensor  # (columns, d) sinusoidal position embeddings
    table: Tensor  # (V, d) embeddings of the units, multiplied by sqrt(d)
    length: int = 0  # columns of `own` that hold units

    def reserve(self, size: int) -> None:
        """Make room for keys, values and positions of at least `size` units."""
        have = self.positions.shape[0]
        if size <= have:
            return
        more = max(size, 2 * have) - have
        self.own = [(F.pad(keys, (0, 0, 0, more)), F.pad(values, (0, 0, 0, more))) for keys, values in self.own]
        width = self.positions.shape[1]
        self.positions = sinusoids(have + more, width, self.positions.device).to(self.positions.dtype)

    def reorder(self, rows: Tensor) -> None:
        """Let row i continue from the state of row rows[i] (beam search)."""
        for keys, values in self.own:
            keys[:, :, : self.length] = keys[rows, :, : self.length]
            values[:, :, : self.length] = values[rows, :, : self.length]


class ArDecoder(nn.Module):
    """Predicts each next unit from the units so far and the encoder's states.

    forward: tokens (B, M), states (B, S, d_memory), state_lengths (B,). Returns: logits (B, M, V) of the next tokens.
    """

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
        size, d = tokens.shape[1], self.config.d_model
        x = self.dropout(math.sqrt(d) * self.embed_tokens(tokens) + sinusoids(size, d, tokens.device))
        causal = torch.full((size, size), -1e9, device=tokens.device).triu(1)
        memory_mask = additive(lengths_to_mask(state_lengths, states.shape[1]))
        for layer in self.layers:
            x = layer(x, causal, states, memory_mask)
        return F.linear(x, self.embed_tokens.weight)

    @property
    def stack(self) -> list[DecoderLayer]:
        """Return the layers, typed for type checkers."""
        return cast(list[DecoderLayer], list(self.layers))

    def start(self, states: Tensor, state_lengths: Tensor, size: int) -> ArCache:
        """Make an empty cache for at most `size` units. states: the encoder's, (B, S, d_memory)."""
        b, d = states.shape[0], self.config.d_model
        mask = additive(lengths_to_mask(state_lengths, states.shape[1]))
        if b == 1:  # one row has no padding to hide
            states, mask = states[:, : int(state_lengths[0])], None
        memories = []
        for layer in self.stack:
            keys, values = layer.encoder_attn.keys_values(states)
            memories.append((keys.contiguous(), values.contiguous()))
        shape = (b, self.config.heads, size, d // self.config.heads)
        own = [(states.new_empty(shape), states.new_empty(shape)) for _ in self.layers]
        table = math.sqrt(d) * self.embed_tokens.weight
        return ArCache(own, memories, mask, sinusoids(size, d, states.device).to(states.dtype), table)

    def step(self, tokens: Tensor, cache: ArCache) -> Tensor:
        """Process one more token (B,) of each row. Returns: logits (B, V) of the token after it."""
        index = cache.length
        x = (cache.table[tokens] + cache.positions[index])[:, None]  # (B, 1, d)
        for layer, (keys, values), memory in zip(self.stack, cache.own, cache.memories, strict=True):
            key, value = layer.self_attn.keys_values(x)
            keys[:, :, index] = key[:, :, 0]
            values[:, :, index] = value[:, :, 0]
            x = layer.rest(x, keys[:, :, : index + 1], values[:, :, : index + 1], None, *memory, cache.mask)
        cache.length += 1
        return F.linear(x[:, 0], self.embed_tokens.weight)

    def extend(self, tokens: Tensor, indices: Tensor, cache: ArCache, mask: Tensor | None) -> Tensor:
        """Process tokens (B, N) at positions `indices` (B, N). Returns: logits (B, N, V).

        Keys and values are written after the cache's columns.
        mask: additive (B, 1, N, length + N): which columns of cache and tokens each token sees; None: all.
        The cache's `length` does not change: the caller decides which columns to keep. The cache grows if it is too
        small.
        """
        start, count = cache.length, tokens.shape[1]
        cache.reserve(start + count)
        x = cache.table[tokens] + cache.positions[indices]
        for layer, (keys, values), memory in zip(self.stack, cache.own, cache.memories, strict=True):
            key, value = layer.self_attn.keys_values(x)
            keys[:, :, start : start + count] = key
            values[:, :, start : start + count] = value
            seen = slice(0, start + count)
            x = layer.rest(x, keys[:, :, seen], values[:, :, seen], mask, *memory, cache.mask)
        return F.linear(x, self.embed_tokens.weight)

    @torch.inference_mode()
    def generate(
        self,
        states: Tensor,
        state_lengths: Tensor,
        max_length: int,
        min_length: int = 0,
        on_step: Callable[[Tensor], None] | None = None,
    ) -> list[list[int]]:
        """Decode states (B, S, d_memory) greedily. Returns: for each row the units, without <s> and </s>.

        max_length: maximum units of a row. min_length: </s> is not chosen before this number of units (for timing at a
            known length).
        on_step: called with each step's units (B,); <pad> for a row that has ended. On a GPU, a few more steps of <pad>
            may follow after all rows have ended.
        """
        cache = self.start(states, state_lengths, max_length + 1)
        tokens = torch.full((states.shape[0], max_length + 2), PAD, device=states.device)
        tokens[:, 0] = BOS
        done = torch.zeros(states.shape[0], dtype=torch.bool, device=states.device)
        every = LOOK_EVERY.get(states.device.type, LOOK_RARELY)
        for index in range(max_length + 1):
            logits = self.step(tokens[:, index], cache)
            if index < min_length:
                logits[:, EOS] = -torch.inf
            best = logits.argmax(-1)
            tokens[:, index + 1] = torch.where(done, PAD, best)
            if on_step is not None:
                on_step(tokens[:, index + 1])
            done |= best == EOS
            if index % every == every - 1 and bool(done.all()):
                break
        rows = tokens[:, 1 : max_length + 1].tolist()
        return [row[: next((i for i, unit in enumerate(row) if unit in (EOS, PAD)), len(row))] for row in rows]

    @torch.inference_mode()
    def beam_search(
        self, states: Tensor, state_lengths: Tensor, beams: int, max_length: int, min_length: int = 0
    ) -> list[int]:
        """Find by beam search the units of highest mean log-probability for one row of states (1, S, d_memory).

        beams: number of hypotheses in a step. max_length, min_length: as for `generate`. The mean includes </s>.
        Returns: the units, without <s> and </s>.
        """
        size = state_lengths.new_full((beams,), int(state_lengths[0]))
        cache = self.start(states.expand(beams, -1, -1), size, max_length + 1)
        tokens = torch.full((beams, max_length + 2), PAD, device=states.device)
        tokens[:, 0] = BOS
        scores = torch.full((beams, 1), -torch.inf, device=states.device)
        scores[0] = 0.0  # all beams are equal at first, so only one may be extended
        best_score, best = -math.inf, []
        for position in range(max_length + 1):
            steps = self.step(tokens[:, position], cache).float().log_softmax(-1)
            if position < min_length:
                steps[:, EOS] = -torch.inf
            ended = (scores[:, 0] + steps[:, EOS]) / (position + 1)
            top, row = ended.max(0)
            if float(top) > best_score:
                best_score, best = float(top), tokens[row, 1 : position + 1].tolist()
            if position == max_length:
                break
            steps[:, EOS] = -torch.inf
            kept, index = (scores + steps).flatten().topk(beams)
            if float(kept[0]) / (max_length + 1) < best_score:
                break  # even if every further step had probability 1, no hypothesis could reach the best mean
            origin = torch.div(index, steps.shape[1], rounding_mode="floor")
            cache.reorder(origin)
            tokens = tokens[origin]
            tokens[:, position + 1] = index % steps.shape[1]
            scores = kept[:, None]
        return best if best_score > -math.inf else tokens[0, 1 : max_length + 1].tolist()
