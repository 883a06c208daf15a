"""The state of an EAGLE-like drafter in one `generate` call.

It holds the draft network's key-value cache, the accepted tokens that the network has not processed yet, and how images
were compressed.

A position of the draft network ("column" in the names) reads a token's embedding and the target's hidden state, called
feature, of the token before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn

from mmdec.drafters.networks.cpu_step import CpuStep
from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.drafters.networks.layers import KeyValues, PackedWeights
from mmdec.types import Verdict

SPARE_POSITIONS = 256  # spare token positions of a new cache tensor, so that it must rarely be copied to a larger one


@final
class DraftCache:
    """The key-value cache of a draft network, a small network that proposes tokens.

    In batch row r, the first `lengths[r]` positions hold accepted tokens.

    A draft's positions come after the accepted positions of the longest row, at the same index for all rows. The next
    draft overwrites them. In shapes: B rows, h heads, n new positions, d head size.
    """

    def __init__(self, rows: int, layers: int = 1) -> None:
        self.lengths, self._layers = [0] * rows, layers
        self._keys = self._values = torch.empty(0)  # shape (B, layers * heads, positions, head size)
        self._uneven: Tensor | None = None  # (B, 1, 1, width) additive mask: -inf after a shorter batch row's end

    @property
    def width(self) -> int:
        """The number of accepted positions of the longest batch row."""
        return max(self.lengths)

    @property
    def is_ragged(self) -> bool:
        """Whether the rows have different numbers of accepted positions."""
        return self._uneven is not None

    def write(self, keys: Tensor, values: Tensor, counts: Sequence[int], layer: int) -> KeyValues:
        """Write one layer's keys and values of new positions after each batch row's accepted ones.

        `accept` must follow.

        Args:
            keys: (B, h, n, d).
            values: Values, in the same shape as `keys`.
            counts: [r]: how many of the n positions are written for row r.

        Returns:
            The layer's keys and values (B, h, W, d); W is the length of the longest row, new positions included.
        """
        lengths, width, size = self.lengths, self.width, keys.shape[2]
        self._reserve(keys, width + size)
        own_keys, own_values = self._layer(layer)
        if min(lengths) == width and min(counts) == size:
            own_keys[:, :, width : width + size] = keys
            own_values[:, :, width : width + size] = values
        else:
            for row, (begin, count) in enumerate(zip(lengths, counts, strict=True)):
                own_keys[row, :, begin : begin + count] = keys[row, :, :count]
                own_values[row, :, begin : begin + count] = values[row, :, :count]
        end = max(length + count for length, count in zip(lengths, counts, strict=True))
        return own_keys[:, :, :end], own_values[:, :, :end]

    def accept(self, counts: Sequence[int]) -> None:
        """For each batch row r, keep the first `counts[r]` of the positions that `write` stored last."""
        keys = self._keys
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._uneven = None
        if keys.numel() and min(self.lengths) < self.width:  # a network without layers stores no keys
            bounds = torch.tensor(self.lengths, device=keys.device)[:, None]
            empty = torch.arange(self.width, device=keys.device) >= bounds
            self._uneven = torch.zeros(empty.shape, dtype=keys.dtype, device=keys.device)
            self._uneven = self._uneven.masked_fill(empty, -math.inf)[:, None, None]

    def causal_mask(self, size: int, width: int) -> Tensor:
        """Return the causal additive mask (B, 1, size, width) of `size` positions that `write` has written.

        Each position sees its batch row's positions up to itself.
        """
        device = self._keys.device
        last = torch.tensor(self.lengths, device=device)[:, None] + torch.arange(size, device=device)
        hidden = torch.arange(width, device=device) > last[..., None]
        return self._keys.new_zeros(hidden.shape).masked_fill(hidden, -math.inf)[:, None]

    def draft(self, keys: Tensor, values: Tensor, offset: int, layer: int = 0) -> KeyValues:
        """Write one layer's keys and values (B, h, n, d) of a draft, `offset` positions after the accepted ones.

        Returns:
            The layer's keys and values (B, h, width + offset + n, d).
        """
        begin = self.width + offset
        end = begin + keys.shape[2]
        self._reserve(keys, end)
        own_keys, own_values = self._layer(layer)
        own_keys[:, :, begin:end] = keys
        own_values[:, :, begin:end] = values
        return own_keys[:, :, :end], own_values[:, :, :end]

    def reserve(self, columns: int, like: Tensor | None = None) -> KeyValues:
        """Reserve space for `columns` positions of a draft, whose keys and values the caller writes into the result.

        Args:
            like: (B, h, n, d), gives shape and dtype while the cache is empty.

        Returns:
            Keys and values (B, h, width + columns, d); the last `columns` positions are free.
        """
        self._reserve(self._keys if like is None else like, self.width + columns)
        end = self.width + columns
        return self._keys.narrow(2, 0, end), self._values.narrow(2, 0, end)

    def keep(self, columns: int) -> None:
        """Accept the first `columns` positions of a draft in every batch row: they become a part of the text."""
        assert self._uneven is None
        self.lengths = [length + columns for length in self.lengths]

    def accepted(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the last layer's accepted keys and values (B, h, width, d), and an additive mask (B, 1, 1, width).

        The mask hides the positions after a shorter batch row's end; it is None if all rows are equally long.
        """
        keys, values = self._layer(self._layers - 1)
        return keys[:, :, : self.width], values[:, :, : self.width], self._uneven

    def mask(self, tree: Tensor) -> Tensor:
        """Return a draft's additive mask (B, 1, n, width + T), extended by the accepted positions, which all nodes see.

        Args:
            tree: (B, n, T), the additive mask of n nodes over the draft's T positions.
        """
        rows, size, _ = tree.shape
        if self._uneven is None:
            before = tree.new_zeros(rows, size, self.width)
        else:
            before = self._uneven[:, 0].expand(-1, size, -1)
        return torch.cat([before, tree], -1)[:, None]

    def select(self, live: Tensor) -> None:
        """Keep only the batch rows with the indices `live` (K,) int64, in that order. The others have ended."""
        self.lengths = [self.lengths[row] for row in live.tolist()]
        if self._keys.numel():
            self._keys, self._values = self._keys[live], self._values[live]
        if self._uneven is not None:
            self._uneven = None if min(self.lengths) == self.width else self._uneven[live, ..., : self.width]

    def _layer(self, layer: int) -> KeyValues:
        """Return one layer's keys and values (B, heads, positions, head size), free positions included."""
        if self._layers == 1:
            return self._keys, self._values
        heads = self._keys.shape[1] // self._layers
        return self._keys.narrow(1, layer * heads, heads), self._values.narrow(1, layer * heads, heads)

    def _reserve(self, like: Tensor, columns: int) -> None:
        """Enlarge the cache to at least `columns` positions.

        Args:
            like: (B, h, n, d), gives shape and dtype of a new cache tensor.
        """
        capacity = self._keys.shape[2] if self._keys.dim() == 4 else 0
        if columns <= capacity:
            return
        batch, heads, _, size = like.shape
        heads *= 1 if like is self._keys else self._layers
        # zeros, not `new_empty`: uninitialised memory may hold NaN, which a mask does not hide
        keys, values = (
            like.new_zeros(batch, heads, max(columns + SPARE_POSITIONS, 2 * capacity), size) for _ in range(2)
        )
        if capacity:
            keys[:, :, :capacity], values[:, :, :capacity] = self._keys, self._values
        self._keys, self._values = keys, values


@dataclass(frozen=True)
class PendingPrompt:
    """The F prompt tokens of each row and the target's features, before the draft network has processed them.

    The draft network has F - 1 positions for them (fewer if images are compressed), because a position reads a feature
    and the token after it. The last feature is read together with the first generated token.
    """

    embeds: Tensor  # (B, F, H), embeddings of the prompt's tokens
    features: Tensor  # (B, F, k * H), hidden states of the k target layers that the network reads
    visual: Tensor  # (B, F) bool, True at placeholders of images, video or sound
    mask: Tensor  # (B, F) bool, False at padding
    positions: Tensor | None = None  # (1 or 3, B, F) the target's position ids, if the network uses them
    next: Tensor | None = None  # (B,) the target's position id of the first token after the prompt

    def select(self, live: Tensor) -> PendingPrompt:
        """Keep only the batch rows with the indices `live` (K,) int64, in that order. The others have ended."""
        return PendingPrompt(
            self.embeds[live],
            self.features[live],
            self.visual[live],
            self.mask[live],
            None if self.positions is None else self.positions[:, live],
            None if self.next is None else self.next[live],
        )


@dataclass(frozen=True)
class PendingTokens:
    """The tokens accepted in one round, before the draft network has processed them."""

    features: Tensor  # (B, A, k * H), hidden states of k target layers at the token before each token
    tokens: Tensor  # (B, A), accepted tokens
    counts: list[int]  # each batch row's number of tokens; the rest is padding on the right

    @classmethod
    def from_verdict(cls, features: Tensor, verdict: Verdict, counts: list[int]) -> PendingTokens:
        """Select the accepted path.

        Args:
            features: (B, N, k * H), target states at a draft's nodes.
            counts: Number of new tokens of each batch row.
        """
        path = verdict.path
        if len(path) == 1 < features.shape[1]:
            features = features.index_select(1, path[0].clamp(min=0))
        elif features.shape[1] > 1:
            features = features.gather(1, path.clamp(min=0)[..., None].expand(-1, -1, features.shape[2]))
        return cls(features, verdict.tokens.clamp(min=0), counts)

    @classmethod
    def concat(cls, parts: Sequence[PendingTokens]) -> PendingTokens:
        """Concatenate the tokens of several rounds."""
        if len(parts) == 1:
            return parts[0]
        counts = [sum(row) for row in zip(*(part.counts for part in parts), strict=True)]
        if all(min(part.counts) == part.features.shape[1] for part in parts):
            features, tokens = torch.cat([part.features for part in parts], 1), torch.cat([p.tokens for p in parts], 1)
            return cls(features, tokens, counts)
        rows = range(len(counts))
        features = [torch.cat([part.features[row, : part.counts[row]] for part in parts]) for row in rows]
        tokens = [torch.cat([part.tokens[row, : part.counts[row]] for part in parts]) for row in rows]
        pad = nn.utils.rnn.pad_sequence
        return cls(pad(features, batch_first=True), pad(tokens, batch_first=True), counts)

    def select(self, live: Tensor) -> PendingTokens:
        """Keep only the batch rows with the indices `live` (K,) int64, in that order. The others have ended."""
        return PendingTokens(self.features[live], self.tokens[live], [self.counts[row] for row in live.tolist()])


@dataclass(frozen=True)
class PromptInfo:
    """How the image tokens of one batch row's prompt were compressed before the draft network read them."""

    compressor: str | None = None  # name of the compressor, or None if nothing was compressed
    # weight in [0, 1] of each of the row's visual tokens: 0 is dropped, 1 is used in full
    visual_weights: Tensor | None = None


@dataclass
class DraftState:
    """The drafter's state of one `generate` call. The next turn of a chat may continue it."""

    cache: DraftCache
    # for each batch row, the number of tokens for which the network has a position, those in `queue` included
    columns: list[int]
    positions: list[int]  # position id of each batch row's next token to process
    queue: list[PendingPrompt | PendingTokens] = field(default_factory=list)  # tokens to process, oldest first
    # (B, 1, C), a vector that the network reads at each text token: in ViSpec, a summary of the last image; else None
    condition: Tensor | None = None
    info: list[PromptInfo] = field(default_factory=list)  # one for each batch row; empty until the prompt is processed
    # faster code that runs the network on one token of one batch row; None: not available, or not tried yet
    step: CpuStep | None = None
    step_requested: bool = False  # whether the drafter has tried to make `step` since the prompt
    # weights packed for faster products; None before the first pass, or if too large
    packed: PackedWeights | None = None


@dataclass(frozen=True)
class RootState:
    """The draft network's state at the last token (the root) of each batch row.

    Keys and values of this token are cached. The output of the last layer is not computed yet.
    """

    states: Tensor  # (B, 1, H), input of the draft network's last layer
    queries: Tensor  # (B, heads, 1, head size), queries of the last layer's attention
    features: Tensor  # (B, 1, k * H), hidden states of k target layers at the token before

    def hidden_state(self, network: DraftNetwork, cache: DraftCache, packed: PackedWeights | None = None) -> Tensor:
        """Return the draft network's hidden state (B, 1, H) at this token.

        Args:
            packed: Packed weights for a faster pass.
        """
        last = network.layer(network.depth - 1)
        return network.output_norm(last.attend(self.states, self.queries, *cache.accepted(), packed))
