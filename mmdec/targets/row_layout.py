"""Where the rows of a batch lie in a cache to which drafts are appended: per-row offsets, one shared range for the
tree.

A row's own columns are contiguous, from its start (after left padding) to its end. A pass appends the tree's N columns
at the shared end S, that of the longest row. Accepted columns then move to the row's own end, and the others are
dropped. So no holes accumulate, and at batch 1 the likeliest path needs no moves. Columns between a row's end and S are
masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmdec.decode.tree import depths
from mmdec.ops.tree_attention import TreeMask, tree_mask
from mmdec.targets.cache import KVPool


@dataclass
class RowLayout:
    """The layout of a run, in plain integers: the batch is small, and reading them needs no device."""

    starts: list[int]  # a row's first column
    ends: list[int]  # the column after its last
    shifts: list[int]  # position of a token minus its column
    tree: int = 0  # columns of a scored tree that awaits its verdict
    first: int = 0  # column of the tree's root

    @classmethod
    def of_prompt(cls, mask: Tensor, positions: Tensor) -> RowLayout:
        """The layout after a prompt's pass, once holes are closed. mask: (B, C) bool. positions: (B, C)."""
        starts = mask.long().argmax(1).tolist()
        ends = [start + count for start, count in zip(starts, mask.sum(1).tolist(), strict=True)]
        last = positions[:, -1].tolist()
        return cls(starts, ends, [position + 1 - end for position, end in zip(last, ends, strict=True)])

    @property
    def width(self) -> int:
        """S, the number of columns before a tree."""
        return max(self.ends)

    def see(
        self, parents: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype
    ) -> tuple[TreeMask | None, list[list[int]]]:
        """The mask of a draft's nodes (None if they see every column) and their positions."""
        width = self.width
        ragged = min(self.ends) < width or any(self.starts)
        if len(parents[0]) == 1 and not ragged:
            return None, self.positions(parents)
        bounds = torch.tensor([self.starts, self.ends], device=device)
        mask = tree_mask(bounds[0], bounds[1], ancestors_of(parents).to(device), width, dtype, ragged=ragged)
        return mask, self.positions(parents)

    def positions(self, parents: Sequence[Sequence[int]]) -> list[list[int]]:
        """Positions of a draft's nodes."""
        return [
            [end + shift + depth for depth in depths(links)]
            for links, end, shift in zip(parents, self.ends, self.shifts, strict=True)
        ]

    def wait(self, nodes: int, first: int | None = None) -> None:
        """Record that a tree was scored. first: column of its root; None: the first column behind all rows."""
        self.tree, self.first = nodes, self.width if first is None else first

    def commit(self, paths: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
        """Accept paths (B, A), -1 padded. Returns the columns to keep and where they go; the rows now end after
        them."""
        begins = self.ends
        columns = [[self.first + node for node in path if node >= 0] for path in paths]
        self.ends = [end + len(kept) for end, kept in zip(begins, columns, strict=True)]
        self.tree = 0
        return columns, begins

    def select(self, live: Sequence[int]) -> None:
        """Keep only the rows `live`, in that order."""
        self.starts = [self.starts[row] for row in live]
        self.ends = [self.ends[row] for row in live]
        self.shifts = [self.shifts[row] for row in live]


def keep_path(rows: RowLayout, store: KVPool, path: Tensor) -> None:
    """Keep the columns of an accepted path (B, A) in the cache. After the prompt's pass nothing changes."""
    if rows.tree:
        columns, begins = rows.commit(path.tolist())
        store.commit(columns, begins, rows.width)


def ancestors_of(parents: Sequence[Sequence[int]]) -> Tensor:
    """(B, N, N) bool on the CPU: whether node j is node i or an ancestor of i."""
    size, seen = len(parents[0]), []
    for links in parents:
        above = [bytearray(size)]
        above[0][0] = 1
        for node in range(1, size):
            mine = bytearray(above[links[node]])
            mine[node] = 1
            above.append(mine)
        seen += above
    return torch.frombuffer(bytearray().join(seen), dtype=torch.bool).view(len(parents), size, size)
