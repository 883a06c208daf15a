"""The key-value cache of a draft network's one layer: accepted columns, followed by those of the current draft."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from mmdec.nn.draft_network import Pair

ROOM = 256  # free columns of a new cache


@final
class DraftCache:
    """Keys and values. Row r's accepted columns are the first `lengths[r]`.

    A draft's columns begin behind those of the longest row, at the same index for all rows. A draft is rolled back by
    overwriting it.
    """

    def __init__(self, rows: int) -> None:
        self.lengths = [0] * rows
        self._keys = self._values = torch.empty(0)  # (B, h, C, d)
        self._uneven: Tensor | None = None  # (B, 1, 1, width): minus infinity at columns beyond a shorter row

    @property
    def width(self) -> int:
        """Columns of the longest row."""
        return max(self.lengths)

    @property
    def uneven(self) -> bool:
        """Whether some row is shorter than another."""
        return self._uneven is not None

    def append(self, keys: Tensor, values: Tensor, counts: Sequence[int]) -> None:
        """Accept the first `counts[r]` columns of row r: keys and values (B, h, n, d)."""
        lengths, width, size = self.lengths, self.width, keys.shape[2]
        self._reserve(keys, width + size)
        if min(lengths) == width and min(counts) == size:
            self._keys[:, :, width : width + size] = keys
            self._values[:, :, width : width + size] = values
        else:
            for row, (begin, count) in enumerate(zip(lengths, counts, strict=True)):
                self._keys[row, :, begin : begin + count] = keys[row, :, :count]
                self._values[row, :, begin : begin + count] = values[row, :, :count]
        self.lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        self._uneven = None
        if min(self.lengths) < self.width:
            bounds = torch.tensor(self.lengths, device=keys.device)[:, None]
            empty = torch.arange(self.width, device=keys.device) >= bounds
            self._uneven = torch.zeros(empty.shape, dtype=keys.dtype, device=keys.device)
            self._uneven = self._uneven.masked_fill(empty, -math.inf)[:, None, None]

    def draft(self, keys: Tensor, values: Tensor, offset: int) -> Pair:
        """Write a draft's columns (B, h, n, d), beginning `offset` columns behind the accepted ones.

        Returns: all keys and values up to the new columns.
        """
        begin = self.width + offset
        end = begin + keys.shape[2]
        self._reserve(keys, end)
        self._keys[:, :, begin:end] = keys
        self._values[:, :, begin:end] = values
        return self._keys[:, :, :end], self._values[:, :, :end]

    def room(self, columns: int, like: Tensor | None = None) -> Pair:
        """Make room for a draft: keys and values (B, h, width + columns, d); the caller writes the last `columns`.

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
        """The accepted keys and values (B, h, width, d), and the additive mask (B, 1, 1, width) of shorter rows (None
        if none)."""
        return self._keys[:, :, : self.width], self._values[:, :, : self.width], self._uneven

    def mask(self, tree: Tensor) -> Tensor:
        """Extend a draft's additive mask over the accepted columns: (B, n, T) -> (B, 1, n, width + T)."""
        rows, size, _ = tree.shape
        if self._uneven is None:
            before = tree.new_zeros(rows, size, self.width)
        else:
            before = self._uneven[:, 0].expand(-1, size, -1)
        return torch.cat([before, tree], -1)[:, None]

    def select(self, live: Tensor) -> None:
        """Keep only the rows live (K,) int64, in that order."""
        self.lengths = [self.lengths[row] for row in live.tolist()]
        if self._keys.numel():
            self._keys, self._values = self._keys[live], self._values[live]
        if self._uneven is not None:
            self._uneven = None if min(self.lengths) == self.width else self._uneven[live, ..., : self.width]

    def _reserve(self, like: Tensor, columns: int) -> None:
        capacity = self._keys.shape[2] if self._keys.dim() == 4 else 0
        if columns <= capacity:
            return
        batch, heads, _, size = like.shape
        # zeros: a mask does not hide NaN
        keys, values = (like.new_zeros(batch, heads, max(columns + ROOM, 2 * capacity), size) for _ in range(2))
        if capacity:
            keys[:, :, :capacity], values[:, :, :capacity] = self._keys, self._values
        self._keys, self._values = keys, values
