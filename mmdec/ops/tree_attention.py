"""Attention of a draft's nodes to their row's prefix and to their own ancestors.

q        (B, Hq, N, D)       N nodes, rotated to their positions
k, v     (B, Hkv, S + N, D)  S columns of earlier tokens, then the nodes' own; Hq is a multiple of Hkv

A node sees those of the first S columns that lie between its row's start (after left padding) and end (rows differ in
length), and, of the last N columns, its ancestors and itself. A sliding window hides columns further back: it counts
positions, and a node's position is its row's length plus its depth. Chunks hide all columns before the chunk that the
node's position is in.

A sink is one more score in a query head's softmax; it has no value.

GPUs use `tree_attention_triton.py`, for trees of up to 128 nodes; otherwise torch computes it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mmdec.ops.kernels import runs_on

if TYPE_CHECKING:
    from mmdec.ops.tree_attention_triton import PackedTree

LARGEST = 128  # maximum nodes of a tree for the kernel
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class TreeMask:
    """Which columns the nodes of one pass see; shared by all layers."""

    starts: Tensor  # (B,) int64, each row's first column that is no padding
    ends: Tensor  # (B,) int64, the column after each row's last one
    ancestors: Tensor  # (B, N, N) bool, [b, i, j]: node j is i or an ancestor of i
    additive: Tensor  # (B, 1, N, S + N): all this as a mask: 0 where seen, else the dtype's least number
    window: int | None = None  # positions that a node sees, its own included; None: all
    kernel: bool = True  # whether starts, ends, ancestors and window describe all of `additive`: the kernel reads these
    _packed: dict[int, Tensor] = field(default_factory=lambda: {}, repr=False)  # results of `packed`, by group
    _bits: list[PackedTree] = field(default_factory=lambda: [], repr=False)  # the result of `bits`, once computed

    def packed(self, group: int) -> Tensor:
        """Return `additive` repeated for the `group` query heads of one key head: (B, 1, group * N, S + N)."""
        if group == 1:
            return self.additive
        if group not in self._packed:
            self._packed[group] = self.additive.repeat(1, 1, group, 1)
        return self._packed[group]

    def within(
        self, size: int, *, chunks: bool = False, first: int = 0, counted: tuple[Tensor, Tensor] | None = None
    ) -> TreeMask:
        """Return the same mask for layers that see only a part of the text.

        size: positions that a node sees, its own included; with `chunks`, positions of a chunk, counted from the row's
            start: a node sees its own chunk.
        first: the first column that the layers' keys still hold; the earlier ones are dropped from the mask.
        counted: for rows with padding between their tokens, if the window counts this padding: each column's place (B,
            S), padding included, and the amount of padding (B,) in each row. None: a column's place is its index.
        """
        columns, device = self.additive.shape[3] - self.ancestors.shape[1], self.additive.device
        if counted is None:
            places, padding = torch.arange(columns, device=device)[None], torch.zeros_like(self.ends)
        else:
            places, padding = counted
        own = (self.ends + padding)[:, None] + self.ancestors.sum(2) - 1  # (B, N)
        begins = self.starts[:, None]
        lowest = (begins + (own - begins) // size * size if chunks else own - size + 1)[:, :, None]
        additive = _padded_rows(self.additive[..., first:])
        hidden = torch.cat([places[:, None, first:columns] < lowest, own[:, None] < lowest], 2)
        additive.masked_fill_(hidden[:, None], torch.finfo(additive.dtype).min)
        starts, ends = (self.starts - first).clamp(min=0), self.ends - first
        plain = not chunks and counted is None
        return TreeMask(starts, ends, self.ancestors, additive, size if plain else None, plain)

    def bits(self) -> PackedTree:
        """Return the mask in the kernel's format, computed once."""
        from mmdec.ops.tree_attention_triton import PackedTree

        if not self._bits:
            self._bits.append(PackedTree.of(self.starts, self.ends, self.ancestors))
        return self._bits[0]


def tree_mask(
    starts: Tensor,
    ends: Tensor,
    ancestors: Tensor,
    columns: int,
    dtype: torch.dtype,
    *,
    ragged: bool = True,
) -> TreeMask:
    """Make the mask of a pass: a node sees its row's columns before the tree, its ancestors, and itself.

    starts, ends: (B,) each row's first column and the column after its last. ancestors: (B, N, N) bool.
    columns: S, the shared columns before the nodes. dtype: the additive mask's dtype.
    ragged: False if all S columns belong to every row, which saves half of the work at batch 1.
    The mask is additive because all attention implementations agree on its meaning; for bool masks they do not.
    """
    batch, nodes, _ = ancestors.shape
    lowest = torch.finfo(dtype).min
    additive = _padded_rows(torch.zeros(batch, 1, nodes, columns + nodes, dtype=dtype, device=ancestors.device))
    if ragged:
        steps = torch.arange(columns, device=ancestors.device)
        foreign = (steps < starts[:, None]) | (steps >= ends[:, None])  # (B, S)
        additive[..., :columns].masked_fill_(foreign[:, None, None], lowest)
    additive[..., columns:].masked_fill_(~ancestors[:, None], lowest)
    return TreeMask(starts, ends, ancestors, additive)


def _padded_rows(mask: Tensor) -> Tensor:
    """Return a copy of a mask (..., S + N) whose rows begin at multiples of 8 numbers, as fused GPU kernels need."""
    width = mask.shape[-1]
    rows = torch.zeros(*mask.shape[:-1], -(-width // 8) * 8, dtype=mask.dtype, device=mask.device)[..., :width]
    return rows.copy_(mask)


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, tree: TreeMask | None, scaling: float, sinks: Tensor | None = None
) -> Tensor:
    """Compute the attention output (B, Hq, N, D). Without a tree every query sees every column.

    sinks: (Hq,), one more score in each query head's softmax, without a value; None: there are none.
    The query heads of a key head are concatenated as further queries, so that keys and values are not repeated.
    """
    batch, heads, nodes, width = q.shape
    fits = tree is not None and tree.kernel and sinks is None and nodes <= LARGEST and q.dtype in FLOATS
    if tree is not None and fits and runs_on(q.device):
        from mmdec.ops.tree_attention_triton import tree_attention_triton

        return tree_attention_triton(q, k, v, tree.bits(), scaling, window=tree.window)
    group = heads // k.shape[1]
    packed = q.reshape(batch, k.shape[1], group * nodes, width)
    mask = None if tree is None else tree.packed(group)
    if sinks is not None:
        each = sinks.view(1, k.shape[1], group, 1).expand(-1, -1, -1, nodes).reshape(1, k.shape[1], group * nodes, 1)
        k, v, mask = with_sinks(k, v, mask, each.expand(batch, -1, -1, -1))
    out = scaled_dot_product_attention(packed, k, v, attn_mask=mask, scale=scaling)
    return out.reshape(len(out), heads, nodes, v.shape[-1])  # a row of queries may attend to each of several rows


def with_sinks(k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Append one column to keys, values and mask: a key and a value of zeros, whose score is the sink alone.

    k, v: (B, H, S, D). mask: additive, (B, 1 or Hq, N, S); None: all is seen. sinks: (B, Hq, N, 1).
    """
    sinks = sinks.to(k.dtype)
    seen = sinks.new_zeros(*sinks.shape[:3], k.shape[2]) if mask is None else mask.expand(*sinks.shape[:3], -1)
    keys, values = (torch.cat([states, torch.zeros_like(states[:, :, :1])], 2) for states in (k, v))
    return keys, values, torch.cat([seen, sinks], 3)


def tree_attention_reference(q: Tensor, k: Tensor, v: Tensor, tree: TreeMask, scaling: float) -> Tensor:
    """Compute the same slowly, as a reference for tests: one node at a time, from starts, ends and ancestors."""
    out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
    columns, group = k.shape[2] - q.shape[2], q.shape[1] // k.shape[1]
    for row, (start, end) in enumerate(zip(tree.starts.tolist(), tree.ends.tolist(), strict=True)):
        for node in range(q.shape[2]):
            above = tree.ancestors[row, node].nonzero()[:, 0]
            depth = tree.ancestors[row].sum(1) - 1
            first = start
            if tree.window is not None:
                first = max(start, end + int(depth[node]) - tree.window + 1)
                above = above[depth[node] - depth[above] < tree.window]
            seen = torch.cat([torch.arange(first, max(first, end), device=q.device), columns + above])
            for head in range(q.shape[1]):
                weights = (k[row, head // group, seen] @ q[row, head, node] * scaling).softmax(0)
                out[row, head, node] = weights @ v[row, head // group, seen]
    return out
