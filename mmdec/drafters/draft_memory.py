"""The state of a tree-growing drafter in one run: columns to process, the network's cache, how images were
compressed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn

from mmdec.nn.draft_network import DraftNetwork, Packed, Pair
from mmdec.nn.draft_step import TokenStep
from mmdec.types import Verdict

ROOM = 256  # columns that a new cache has beyond those needed, so that it seldom grows


@final
class DraftCache:
    """Keys and values of a draft network's layers. Row r's accepted columns are the first `lengths[r]`.

    A draft's columns come after those of the longest row, at the same index for all rows. A draft is rolled back by
    overwriting it.
    """

    def __init__(self, rows: int, layers: int = 1) -> None:
        self.lengths, self._layers = [0] * rows, layers
        self._keys = self._values = torch.empty(0)  # (B, layers * heads, columns, head size)
        self._uneven: Tensor | None = None  # (B, 1, 1, width) additive mask: minus infinity after a shorter row's end

    @property
    def width(self) -> int:
        """Return the number of accepted columns of the longest row."""
        return max(self.lengths)

    @property
    def uneven(self) -> bool:
        """Return whether some row is shorter than another."""
        return self._uneven is not None

    def write(self, keys: Tensor, values: Tensor, counts: Sequence[int], layer: int) -> Pair:
        """Write one layer's new columns after each row's accepted ones; `accept` accepts them later.

        keys, values: (B, h, n, d), of which row r's first `counts[r]` columns are written.
        Returns: the layer's keys and values (B, h, W, d); W is the length of the longest row, new columns included.
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
        """Accept the first `counts[r]` columns of row r that `write` has written."""
        keys = self._keys
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._uneven = None
        if min(self.lengths) < self.width:
            bounds = torch.tensor(self.lengths, device=keys.device)[:, None]
            empty = torch.arange(self.width, device=keys.device) >= bounds
            self._uneven = torch.zeros(empty.shape, dtype=keys.dtype, device=keys.device)
            self._uneven = self._uneven.masked_fill(empty, -math.inf)[:, None, None]

    def written_mask(self, size: int, width: int) -> Tensor:
        """Return the additive mask (B, 1, size, width) of `size` columns that `write` has written: each sees its row's
        columns up to itself."""
        device = self._keys.device
        last = torch.tensor(self.lengths, device=device)[:, None] + torch.arange(size, device=device)
        hidden = torch.arange(width, device=device) > last[..., None]
        return self._keys.new_zeros(hidden.shape).masked_fill(hidden, -math.inf)[:, None]

    def draft(self, keys: Tensor, values: Tensor, offset: int, layer: int = 0) -> Pair:
        """Write one layer's columns (B, h, n, d) of a draft, beginning `offset` columns after the accepted ones.

        Returns: the layer's keys and values up to the new columns.
        """
        begin = self.width + offset
        end = begin + keys.shape[2]
        self._reserve(keys, end)
        own_keys, own_values = self._layer(layer)
        own_keys[:, :, begin:end] = keys
        own_values[:, :, begin:end] = values
        return own_keys[:, :, :end], own_values[:, :, :end]

    def room(self, columns: int, like: Tensor | None = None) -> Pair:
        """Make room for a draft's columns. Returns keys and values (B, h, width + columns, d): the caller writes the
        last `columns`.

        like: (B, h, n, d), gives shape and dtype while the cache is empty.
        """
        self._reserve(self._keys if like is None else like, self.width + columns)
        end = self.width + columns
        return self._keys.narrow(2, 0, end), self._values.narrow(2, 0, end)

    def keep(self, columns: int) -> None:
        """Accept the first `columns` columns of a draft in every row."""
        assert self._uneven is None
        self.lengths = [length + columns for length in self.lengths]

    def accepted(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the last layer's accepted keys and values (B, h, width, d), and an additive mask (B, 1, 1, width) that
        hides the columns after a shorter row's end (None if all rows are equally long)."""
        keys, values = self._layer(self._layers - 1)
        return keys[:, :, : self.width], values[:, :, : self.width], self._uneven

    def mask(self, tree: Tensor) -> Tensor:
        """Extend a draft's additive mask over the accepted columns: (B, n, T) -> (B, 1, n, width + T)."""
        rows, size, _ = tree.shape
        if self._uneven is None:
            before = tree.new_zeros(rows, size, self.width)
        else:
            before = self._uneven[:, 0].expand(-1, size, -1)
        return torch.cat([before, tree], -1)[:, None]

    def select(self, live: Tensor) -> None:
        """Keep only the rows whose indices are in `live` (K,) int64, in that order."""
        self.lengths = [self.lengths[row] for row in live.tolist()]
        if self._keys.numel():
            self._keys, self._values = self._keys[live], self._values[live]
        if self._uneven is not None:
            self._uneven = None if min(self.lengths) == self.width else self._uneven[live, ..., : self.width]

    def _layer(self, layer: int) -> Pair:
        """Return one layer's keys and values (B, heads, columns, head size), free columns included."""
        if self._layers == 1:
            return self._keys, self._values
        heads = self._keys.shape[1] // self._layers
        return self._keys.narrow(1, layer * heads, heads), self._values.narrow(1, layer * heads, heads)

    def _reserve(self, like: Tensor, columns: int) -> None:
        """Make room for `columns` columns in all. like: keys (B, h, n, d) whose shape and dtype a new cache takes."""
        capacity = self._keys.shape[2] if self._keys.dim() == 4 else 0
        if columns <= capacity:
            return
        batch, heads, _, size = like.shape
        heads *= 1 if like is self._keys else self._layers
        # zeros: a mask does not hide NaN
        keys, values = (like.new_zeros(batch, heads, max(columns + ROOM, 2 * capacity), size) for _ in range(2))
        if capacity:
            keys[:, :, :capacity], values[:, :, :capacity] = self._keys, self._values
        self._keys, self._values = keys, values


@dataclass(frozen=True)
class WaitingPrompt:
    """The prompt's F tokens and features, before the draft network has processed them.

    They make F - 1 columns (fewer if images are compressed), because a column reads a feature and the token after it.
    The first verdict adds the next column, which reads the last feature and the first generated token.
    """

    embeds: Tensor  # (B, F, H), embeddings of the prompt's tokens
    features: Tensor  # (B, F, k * H), hidden states of the k target layers that the network reads
    visual: Tensor  # (B, F) bool, True at placeholders of images, video or sound
    mask: Tensor  # (B, F) bool, False at padding
    positions: Tensor | None = None  # (1 or 3, B, F) the target's positions, if the network uses them
    next: Tensor | None = None  # (B,) the target's position of the first token after the prompt

    def select(self, live: Tensor) -> WaitingPrompt:
        """Keep only the rows whose indices are in `live` (K,) int64, in that order."""
        return WaitingPrompt(
            self.embeds[live],
            self.features[live],
            self.visual[live],
            self.mask[live],
            None if self.positions is None else self.positions[:, live],
            None if self.next is None else self.next[live],
        )


@dataclass(frozen=True)
class Waiting:
    """Columns accepted in one round, before the draft network has processed them."""

    features: Tensor  # (B, A, k * H), hidden states of k target layers at each accepted column
    tokens: Tensor  # (B, A), the token after each column
    counts: list[int]  # number of columns of each row; the others are padding on the right

    @classmethod
    def of(cls, features: Tensor, verdict: Verdict, counts: list[int]) -> Waiting:
        """Select the accepted path from features (B, N, k * H) of a draft's nodes. counts: new columns of each row."""
        path = verdict.path
        if len(path) == 1 < features.shape[1]:
            features = features.index_select(1, path[0].clamp(min=0))
        elif features.shape[1] > 1:
            features = features.gather(1, path.clamp(min=0)[..., None].expand(-1, -1, features.shape[2]))
        return cls(features, verdict.tokens.clamp(min=0), counts)

    @classmethod
    def joined(cls, parts: Sequence[Waiting]) -> Waiting:
        """Concatenate the columns of several rounds."""
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

    def select(self, live: Tensor) -> Waiting:
        """Keep only the rows whose indices are in `live` (K,) int64, in that order."""
        return Waiting(self.features[live], self.tokens[live], [self.counts[row] for row in live.tolist()])


@dataclass(frozen=True)
class PromptInfo:
    """How the visual tokens of a row were compressed."""

    compressor: str | None = None  # name of the compressor; None: nothing was compressed
    kept: Tensor | None = None  # in [0, 1], the weight of each of the row's visual tokens


@dataclass
class Memory:
    """The drafter's state of a run; the next turn of a chat may continue it."""

    cache: DraftCache
    columns: list[int]  # number of columns of each row's text, those in `queue` included
    positions: list[int]  # text position of each row's next column to process
    queue: list[WaitingPrompt | Waiting] = field(default_factory=list)  # columns to process, oldest first
    carry: Tensor | None = None  # (B, 1, C), extra input of the network at each text column: ViSpec's global vector
    info: list[PromptInfo] = field(default_factory=list)  # one for each row; empty until the prompt was processed
    step: TokenStep | None = None  # fast path for single tokens of one row; None: not available, or not tried yet
    asked: bool = False  # whether the drafter has already tried to make `step` since the prompt
    packed: Packed | None = None  # packed weights; None before the first pass, and for large networks


@dataclass(frozen=True)
class LastColumn:
    """The newest column of each row (the root's): its keys and values are cached, its output is not computed yet."""

    states: Tensor  # (B, 1, H), input of the draft network's last layer
    queries: Tensor  # (B, heads, 1, head size), queries of its attention
    features: Tensor  # (B, 1, k * H), hidden states of k target layers before this column

    def hidden(self, network: DraftNetwork, cache: DraftCache, packed: Packed | None = None) -> Tensor:
        """Compute the output (B, 1, H) of the column."""
        return network.attend(self.states, self.queries, *cache.accepted(), packed, network.depth - 1)
