"""Where the rows of a batch lie in a cache that drafts come to and leave: per-row offsets, one shared tree.

A row's own columns are contiguous, from its start (left padding before it) to its end. A pass appends the tree's N
columns at the shared end S, the longest row's. The accepted ones then move to the row's own end, the rest is dropped:
no holes pile up, and in a batch of one the likeliest path lies in place. What is left between a row's end and S is
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
    """Of a run: plain integers, for the batch is small and a device need not be asked."""

    starts: list[int]  # a row's first column
    ends: list[int]  # the column after its last
    shifts: list[int]  # position of a token minus its column
    tree: int = 0  # columns of a tree that was scored and waits for its verdict
    first: int = 0  # the column of its root

    @classmethod
    def of_prompt(cls, mask: Tensor, positions: Tensor) -> RowLayout:
        """The layout after a prompt's pass, once holes are closed: mask (B, C) bool and positions (B, C)."""
        starts = mask.long().argmax(1).tolist()
        ends = [start + count for start, count in zip(starts, mask.sum(1).tolist(), strict=True)]
        last = positions[:, -1].tolist()
        return cls(starts, ends, [position + 1 - end for position, end in zip(last, ends, strict=True)])

    @property
    def width(self) -> int:
        """S, the columns before a tree."""
        return max(self.ends)

    def see(
        self, parents: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype
    ) -> tuple[TreeMask | None, list[list[int]]]:
        """What the nodes of a draft see, None where that is everything; their positions."""
        width = self.width
        ragged = min(self.ends) < width or any(self.starts)
        if len(parents[0]) == 1 and not ragged:
            return None, self.positions(parents)
        bounds = torch.tensor([self.starts, self.ends], device=device)
        mask = tree_mask(bounds[0], bounds[1], ancestors_of(parents).to(device), width, dtype, ragged=ragged)
        return mask, self.positions(parents)

    def positions(self, parents: Sequence[Sequence[int]]) -> list[list[int]]:
        """Of a draft's nodes."""
        return [
            [end + shift + depth for depth in depths(links)]
            for links, end, shift in zip(parents, self.ends, self.shifts, strict=True)
        ]

    def wait(self, nodes: int, first: int | None = None) -> None:
        """A tree was scored. first: the column of its root, where it is not the first one behind all rows."""
        self.tree, self.first = nodes, self.width if first is None else first

    def commit(self, paths: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[int]]:
        """Accepted nodes of each row, -1 padded: the columns to keep, and where they go. Rows then end after them."""
        begins = self.ends
        columns = [[self.first + node for node in path if node >= 0] for path in paths]
        self.ends = [end + len(kept) for end, kept in zip(begins, columns, strict=True)]
        self.tree = 0
        return columns, begins

    def select(self, live: Sequence[int]) -> None:
        """Rows `live` go on, in that order."""
        self.starts = [self.starts[row] for row in live]
        self.ends = [self.ends[row] for row in live]
        self.shifts = [self.shifts[row] for row in live]


def keep_path(rows: RowLayout, store: KVPool, path: Tensor) -> None:
    """Keep the columns of an accepted path (B, A); after the prompt's pass there is nothing to keep or drop."""
    if rows.tree:
        columns, begins = rows.commit(path.tolist())
        store.commit(columns, begins, rows.width)


def ancestors_of(parents: Sequence[Sequence[int]]) -> Tensor:
    """(B, N, N) bool on the CPU: whether node j is node i or lies above it."""
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
