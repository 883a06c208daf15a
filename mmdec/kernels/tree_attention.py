"""Attention of the nodes of a draft tree to the text before the tree and to their own ancestors.

    q        (B, Hq, N, D)       queries of N nodes, after rotary positions
    k, v     (B, Hkv, S + N, D)  S entries of earlier tokens, then the N nodes; Hq is a multiple of Hkv

Rows differ in length. A node sees its row's part of the first S entries (after left padding, before the row's end). Of
the last N entries it sees its ancestors and itself. A sliding window hides entries that are too far back. The window
counts positions, not entries; a node's position is its row's length plus its depth. With chunked attention, a node sees
only the chunk that contains its position.

An attention sink is one more score in a query head's softmax, without a value.

On GPUs, trees of up to 128 nodes use `tree_attention_triton.py`; otherwise torch computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mmdec.kernels import tokenwise
from mmdec.kernels.availability import runs_on

if TYPE_CHECKING:
    from mmdec.kernels.tree_attention_triton import PackedTree

MAX_KERNEL_NODES = 128  # maximum nodes of a tree that the Triton kernel supports
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class TreeMask:
    """The attention mask of one pass over a draft tree: S entries of earlier tokens, then N nodes."""

    starts: Tensor  # (B,) int64, index of each row's first entry that is not padding
    ends: Tensor  # (B,) int64, index after each row's last entry before the tree
    ancestors: Tensor  # (B, N, N) bool: [b, i, j] is True if node j is node i or an ancestor of it
    additive: Tensor  # (B, 1, N, S + N), the same as an additive mask: 0 where visible, else the dtype's lowest number
    window: int | None = None  # number of positions that a node sees, its own included; None: no limit
    # whether the fields above define the whole mask; only then can the Triton kernel, which reads them, be used
    kernel: bool = True
    # the chains of the trees, if attention must be computed tokenwise; (): it need not
    chains: tuple[tokenwise.Chain, ...] = ()
    # results of `grouped_mask`: group -> mask
    _grouped_masks: dict[int, Tensor] = field(default_factory=lambda: {}, repr=False)
    # the result of `packed_tree`; empty before the first call
    _packed_tree: list[PackedTree] = field(default_factory=lambda: [], repr=False)
    # the result of `chain_masks`; empty before the first call
    _chain_masks: list[tokenwise.ChainMask] = field(default_factory=lambda: [], repr=False)

    def grouped_mask(self, group: int) -> Tensor:
        """Repeat `additive` along the query axis, once for each of the `group` query heads of a key head.

        Returns:
            (B, 1, group * N, S + N).
        """
        if group == 1:
            return self.additive
        if group not in self._grouped_masks:
            self._grouped_masks[group] = self.additive.repeat(1, 1, group, 1)
        return self._grouped_masks[group]

    def chain_masks(self) -> list[tokenwise.ChainMask]:
        """Return the masks of the trees' chains. They are computed at the first call only."""
        if not self._chain_masks:
            self._chain_masks.extend(tokenwise.chain_masks(self.chains, self.additive, self.ends))
        return self._chain_masks

    def within_window(
        self, size: int, *, chunks: bool = False, first: int = 0, positions: tuple[Tensor, Tensor] | None = None
    ) -> TreeMask:
        """Return the mask for layers with a sliding window or with chunked attention.

        Args:
            size: Number of positions that a node sees, its own included; with `chunks`, the number of positions in a
                chunk. Chunks are counted from the row's start, and a node sees its own chunk only.
            first: Index of the first entry that these layers' caches still hold; earlier entries get no mask columns.
            positions: For rows with padding between their tokens, if the window counts this padding: (positions (B, S)
                of the entries, padding included; amount of padding (B,) in each row). None: an entry's position is its
                index.
        """
        columns, device = self.additive.shape[3] - self.ancestors.shape[1], self.additive.device
        if positions is None:
            places, padding = torch.arange(columns, device=device)[None], torch.zeros_like(self.ends)
        else:
            places, padding = positions
        own_columns = (self.ends + padding)[:, None] + self.ancestors.sum(2) - 1  # shape (B, N)
        begins = self.starts[:, None]
        lowest = (begins + (own_columns - begins) // size * size if chunks else own_columns - size + 1)[:, :, None]
        additive = _padded_rows(self.additive[..., first:])
        hidden = torch.cat([places[:, None, first:columns] < lowest, own_columns[:, None] < lowest], 2)
        additive.masked_fill_(hidden[:, None], torch.finfo(additive.dtype).min)
        starts, ends = (self.starts - first).clamp(min=0), self.ends - first
        plain = not chunks and positions is None
        return TreeMask(starts, ends, self.ancestors, additive, size if plain else None, plain, self.chains)

    def packed_tree(self) -> PackedTree:
        """Return the tree in the Triton kernel's format. It is computed at the first call only."""
        from mmdec.kernels.tree_attention_triton import PackedTree

        if not self._packed_tree:
            self._packed_tree.append(PackedTree.pack(self.starts, self.ends, self.ancestors))
        return self._packed_tree[0]


def tree_mask(
    starts: Tensor,
    ends: Tensor,
    ancestors: Tensor,
    columns: int,
    dtype: torch.dtype,
    *,
    ragged: bool = True,
) -> TreeMask:
    """Make the attention mask of a pass over a draft tree.

    A node sees the earlier tokens of its row, its ancestors and itself. The mask is additive, because implementations
    of attention disagree on the meaning of bool masks.

    Args:
        starts: (B,), index of each row's first entry.
        ends: (B,), index after each row's last entry.
        ancestors: (B, N, N) bool, [b, i, j] is True if node j is node i or an ancestor of it.
        columns: S, number of entries before the nodes.
        dtype: Dtype of the additive mask.
        ragged: False if all S entries belong to every row; this saves half of the work at batch size 1.
    """
    batch, nodes, _ = ancestors.shape
    lowest = torch.finfo(dtype).min
    additive = _padded_rows(torch.zeros(batch, 1, nodes, columns + nodes, dtype=dtype, device=ancestors.device))
    if ragged:
        steps = torch.arange(columns, device=ancestors.device)
        # (B, S), entries that do not hold a token of the row
        foreign = (steps < starts[:, None]) | (steps >= ends[:, None])
        additive[..., :columns].masked_fill_(foreign[:, None, None], lowest)
    additive[..., columns:].masked_fill_(~ancestors[:, None], lowest)
    return TreeMask(starts, ends, ancestors, additive)


def _padded_rows(mask: Tensor) -> Tensor:
    """Copy a mask (..., S + N) so that its rows start in memory at multiples of 8 elements.

    torch's fused attention kernels need this on a GPU.
    """
    width = mask.shape[-1]
    rows = torch.zeros(*mask.shape[:-1], -(-width // 8) * 8, dtype=mask.dtype, device=mask.device)[..., :width]
    return rows.copy_(mask)


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, tree: TreeMask | None, scaling: float, sinks: Tensor | None = None
) -> Tensor:
    """Compute the attention output (B, Hq, N, D).

    The query heads that share a key head are treated as further queries, so that keys and values need not be repeated.

    Args:
        q: (B, Hq, N, D).
        k: (B, Hkv, S + N, D).
        v: (B, Hkv, S + N, D).
        tree: The mask; None: all entries are visible.
        scaling: Factor on scores.
        sinks: (Hq,), one more score in each query head's softmax, without a value; None: no such score.
    """
    batch, heads, nodes, width = q.shape
    fits = tree is not None and tree.kernel and sinks is None and nodes <= MAX_KERNEL_NODES and q.dtype in KERNEL_DTYPES
    if tree is not None and tree.chains:
        if sinks is None:
            columns = tree.additive.shape[3] - nodes
            return tokenwise.tree_attention(q, k, v, tree.chain_masks(), columns, scaling)
        k, v = (states[:, :, : tree.additive.shape[3]] for states in (k, v))
    if tree is not None and fits and runs_on(q.device):
        from mmdec.kernels.tree_attention_triton import tree_attention_triton

        return tree_attention_triton(q, k, v, tree.packed_tree(), scaling, window=tree.window)
    group = heads // k.shape[1]
    packed = q.reshape(batch, k.shape[1], group * nodes, width)
    mask = None if tree is None else tree.grouped_mask(group)
    if sinks is not None:
        sinks_of_queries = sinks.view(1, k.shape[1], group, 1).expand(-1, -1, -1, nodes).flatten(2)[..., None]
        k, v, mask = with_sinks(k, v, mask, sinks_of_queries.expand(batch, -1, -1, -1))
    out = scaled_dot_product_attention(packed, k, v, attn_mask=mask, scale=scaling)
    # the batch size of keys may be larger than that of queries; then `out` has the larger one
    return out.reshape(len(out), heads, nodes, v.shape[-1])


def with_sinks(k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Add attention sinks as one more key and value of zeros, whose mask entry is the sink.

    Args:
        k, v: (B, H, S, D).
        mask: Additive, (B, 1 or Hq, N, S); None: all entries are visible.
        sinks: (B, Hq, N, 1).

    Returns:
        The new k, v and mask.
    """
    sinks = sinks.to(k.dtype)
    visible = sinks.new_zeros(*sinks.shape[:3], k.shape[2]) if mask is None else mask.expand(*sinks.shape[:3], -1)
    keys, values = (torch.cat([states, torch.zeros_like(states[:, :, :1])], 2) for states in (k, v))
    return keys, values, torch.cat([visible, sinks], 3)


def tree_attention_reference(q: Tensor, k: Tensor, v: Tensor, tree: TreeMask, scaling: float) -> Tensor:
    """Compute tree attention slowly, one node at a time, as a reference for tests.

    Args:
        q: (B, Hq, N, D).
        k, v: (B, Hkv, S + N, D).
        tree: The mask.
        scaling: Factor on scores.

    Returns:
        (B, Hq, N, D).
    """
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
            visible = torch.cat([torch.arange(first, max(first, end), device=q.device), columns + above])
            for head in range(q.shape[1]):
                weights = (k[row, head // group, visible] @ q[row, head, node] * scaling).softmax(0)
                out[row, head, node] = weights @ v[row, head // group, visible]
    return out
