"""Tree attention on a GPU in two kernel launches.

The first launch processes the tree, and the text before it in several splits; the second launch merges the results of
all splits.

The query heads that share a key head are packed as further queries, so that each key is read once for all of them. A
program processes a block of packed queries and one split of its row's text before the tree. This split needs no mask
except the row's bounds and the sliding window. One more split is the tree itself, masked by bits: each node's
ancestors, 32 to a word. The results are merged by their log-sum-exp, as in flash decoding. Lengths, ancestors and
positions are read from GPU memory. So they may change without recompiling, even in a captured CUDA graph; only a new
padded size recompiles.

    queries  packed query r = g * N + n: node n in query head h * G + g, which shares key head h
    words    (B, N, W) int32, bit j % 32 of word j // 32: node j is n or an ancestor of n
    depths   (B, N) int32, depth of each node: a window counts positions, not cache entries
"""

# A kernel is Triton's language in Python's syntax; which of it type checkers follow changes with Triton's release.
# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmdec.kernels.availability import is_interpreted, launch

MAX_KERNEL_NODES = 128  # maximum nodes of a tree for this kernel; larger trees use torch
BLOCK_N = 64  # number of keys that one program reads at a time
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class PackedTree:
    """A tree in the kernel's format: each node's ancestors are bits of 32-bit words."""

    starts: Tensor  # (B,) int32, index of each row's first entry that is not padding
    ends: Tensor  # (B,) int32, index after each row's last entry before the tree
    words: Tensor  # (B, N, W) int32: bit j % 32 of word j // 32 is set if the node sees node j
    depths: Tensor  # (B, N) int32, number of each node's ancestors

    @classmethod
    def pack(cls, starts: Tensor, ends: Tensor, ancestors: Tensor) -> PackedTree:
        """Pack starts, ends (B,) and ancestors (B, N, N) bool."""
        batch, nodes, _ = ancestors.shape
        words = -(-nodes // 32)
        bits = torch.nn.functional.pad(ancestors, (0, words * 32 - nodes)).view(batch, nodes, words, 32)
        weights = torch.ones(32, dtype=torch.int64, device=ancestors.device) << torch.arange(
            32, device=ancestors.device
        )
        # 32 bits in one number; the highest bit becomes the sign of an int32
        packed = (bits.to(torch.int64) * weights).sum(-1)
        packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
        depths = ancestors.sum(-1, dtype=torch.int32) - 1
        # copied if needed, because the kernel does not accept strided views
        starts, ends = (bound.to(torch.int32).contiguous() for bound in (starts, ends))
        return cls(starts, ends, packed.contiguous(), depths.contiguous())


@triton.jit
def _online(scores, values, top, total, acc, UPCAST: tl.constexpr, PRECISION: tl.constexpr):
    """Update a running softmax in base 2 by scores (R, C) and values (C, D).

    Args:
        top: (R,), maximum so far.
        total: (R,), sum of weights.
        acc: (R, D), sum of weighted values.

    Returns:
        The new (top, total, acc).
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(top - shift)
    total = total * fade + tl.sum(weights, 1)
    if UPCAST:
        added = tl.dot(weights, values.to(tl.float32), input_precision=PRECISION)
    else:
        added = tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
    return new_top, total, acc * fade[:, None] + added


@triton.jit(do_not_specialize=["columns", "nodes", "splits", "window"])
def _attend(
    q, k, v, starts, ends, words, depths, out, lse,
    scale, columns, nodes, splits, window,
    q_b, q_h, q_n, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_d,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr,
    WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the attention of a block of packed queries over one split.

    The split with the number `splits` is the tree.
    """
    block, split = tl.program_id(0), tl.program_id(1)
    row, head = tl.program_id(2) // HEADS, tl.program_id(2) % HEADS
    packed = GROUP * nodes

    query = block * BLOCK_R + tl.arange(0, BLOCK_R)
    real = query < packed
    node = tl.where(real, query % nodes, 0)
    member = tl.where(real, query // nodes, 0)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_V)
    base = q + row.to(tl.int64) * q_b + (head * GROUP + member[:, None]).to(tl.int64) * q_h
    queries = tl.load(base + node[:, None] * q_n + d[None] * q_d, mask=real[:, None] & (d < WIDTH)[None], other=0.0)
    if UPCAST:
        queries = queries.to(tl.float32)

    k += row.to(tl.int64) * k_b + head.to(tl.int64) * k_h
    v += row.to(tl.int64) * v_b + head.to(tl.int64) * v_h
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    depth = tl.load(depths + row * nodes + node)

    if split < splits:
        first = tl.load(starts + row)
        end = tl.load(ends + row)
        if WINDOWED:  # the root sees `window` positions, its own included; no other node sees further back
            first = tl.maximum(first, end - window + 1)
        share = tl.cdiv(tl.cdiv(tl.maximum(end - first, 0), splits), BLOCK_N) * BLOCK_N
        begin = first + split * share
        stop = tl.minimum(begin + share, end)
        for at_column in range(begin, stop, BLOCK_N):
            column = at_column + tl.arange(0, BLOCK_N)
            inside = column < stop
            offset = column.to(tl.int64)
            keys = tl.load(
                k + offset[None] * k_s + d[:, None] * k_d, mask=inside[None] & (d < WIDTH)[:, None], other=0.0
            )
            if UPCAST:
                keys = keys.to(tl.float32)
            scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
            visible = real[:, None] & inside[None]
            if WINDOWED:
                visible &= (end + depth)[:, None] - column[None] < window
            scores = tl.where(visible, scores, float("-inf"))
            values = tl.load(
                v + offset[:, None] * v_s + e[None] * v_d, mask=inside[:, None] & (e < V_WIDTH)[None], other=0.0
            )
            top, total, acc = _online(scores, values, top, total, acc, UPCAST, PRECISION)
    else:
        bit = tl.arange(0, 32)
        for word in range(WORDS):
            other = word * 32 + bit
            inside = other < nodes
            offset = (columns + other).to(tl.int64)
            keys = tl.load(
                k + offset[None] * k_s + d[:, None] * k_d, mask=inside[None] & (d < WIDTH)[:, None], other=0.0
            )
            if UPCAST:
                keys = keys.to(tl.float32)
            scores = tl.dot(queries, keys, input_precision=PRECISION) * scale
            ancestors = tl.load(words + (row * nodes + node) * WORDS + word)
            visible = real[:, None] & inside[None] & (((ancestors[:, None] >> bit[None]) & 1) == 1)
            if WINDOWED:
                other_depth = tl.load(depths + row * nodes + other, mask=inside, other=0)
                visible &= depth[:, None] - other_depth[None] < window
            scores = tl.where(visible, scores, float("-inf"))
            values = tl.load(
                v + offset[:, None] * v_s + e[None] * v_d, mask=inside[:, None] & (e < V_WIDTH)[None], other=0.0
            )
            top, total, acc = _online(scores, values, top, total, acc, UPCAST, PRECISION)

    # for each split, head and query: the weighted mean of values, and the log-sum-exp of the scores in base 2
    cell = (split.to(tl.int64) * tl.num_programs(2) + tl.program_id(2)) * packed + query
    # avoid a division by 0: none of the entries of a split may be visible to the node
    divisor = tl.where(total == 0.0, 1.0, total)
    tl.store(out + cell[:, None] * V_WIDTH + e[None], acc / divisor[:, None], mask=real[:, None] & (e < V_WIDTH)[None])
    tl.store(lse + cell, tl.where(total == 0.0, float("-inf"), top + tl.log2(divisor)), mask=real)


@triton.jit(do_not_specialize=["nodes", "splits"])
def _merge(
    partial, lse, out, nodes, splits, o_b, o_h, o_n,
    HEADS: tl.constexpr, GROUP: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Merge the splits: average their outputs, weighted by 2 to the power of their log-sum-exp in base 2.

    In the tree's split a node always sees at least itself.
    """
    block, pair = tl.program_id(0), tl.program_id(1)
    packed = GROUP * nodes
    query = block * BLOCK_R + tl.arange(0, BLOCK_R)
    real = query < packed
    e = tl.arange(0, BLOCK_V)
    mask = real[:, None] & (e < V_WIDTH)[None]
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for split in range(splits + 1):
        cell = (split * tl.num_programs(1) + pair).to(tl.int64) * packed + query
        score = tl.load(lse + cell, mask=real, other=float("-inf"))
        mean = tl.load(partial + cell[:, None] * V_WIDTH + e[None], mask=mask, other=0.0)
        new_top = tl.maximum(top, score)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight, fade = tl.exp2(score - shift), tl.exp2(top - shift)
        total = total * fade + weight
        acc = acc * fade[:, None] + mean * weight[:, None]
        top = new_top
    row, head = pair // HEADS, pair % HEADS
    base = row.to(tl.int64) * o_b + (head * GROUP + query // nodes).to(tl.int64) * o_h + (query % nodes) * o_n
    merged = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + base[:, None] + e[None], merged.to(out.dtype.element_ty), mask=mask)


def tree_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tree: PackedTree,
    scaling: float,
    *,
    window: int | None = None,
    splits: int | None = None,
) -> Tensor:
    """Compute the attention output (B, Hq, N, E) on a GPU.

    Args:
        q: (B, Hq, N, D).
        k: (B, Hkv, S + N, D).
        v: (B, Hkv, S + N, E). All may have any strides.
        tree: The mask; it has at most `MAX_KERNEL_NODES` nodes.
        scaling: Factor on scores.
        window: Number of positions that a node sees, its own included; None: no limit.
        splits: Number of splits of the text before the tree; None: enough to use the whole GPU.
    """
    batch, heads, nodes, width = q.shape
    key_heads, columns, v_width = k.shape[1], k.shape[2] - nodes, v.shape[3]
    group = heads // key_heads
    packed = group * nodes
    block = max(16, min(128 if q.element_size() < 4 else 64, 1 << (packed - 1).bit_length()))
    blocks = -(-packed // block)
    if splits is None:
        splits = _splits(batch * key_heads * blocks, columns, q.device)
    partial = torch.empty(splits + 1, batch * key_heads, packed, v_width, dtype=torch.float32, device=q.device)
    lse = torch.empty(partial.shape[:3], dtype=torch.float32, device=q.device)
    out = torch.empty(batch, heads, nodes, v_width, dtype=q.dtype, device=q.device)
    launch(_attend, (blocks, splits + 1, batch * key_heads))(
        q, k, v, tree.starts, tree.ends, tree.words, tree.depths, partial, lse,
        scaling * LOG2_E, columns, nodes, splits, window or 0,
        *q.stride(), *k.stride(), *v.stride(),
        HEADS=key_heads, GROUP=group, WORDS=tree.words.shape[2],
        WIDTH=width, V_WIDTH=v_width,
        BLOCK_D=max(16, triton.next_power_of_2(width)), BLOCK_V=max(16, triton.next_power_of_2(v_width)),
        BLOCK_R=block, BLOCK_N=BLOCK_N if width <= 128 else 32,
        WINDOWED=window is not None, UPCAST=is_interpreted(),
        PRECISION="tf32x3" if q.dtype == torch.float32 else "tf32",  # three tf32 products: float32 to 1e-6
        num_warps=8 if block >= 64 else 4, num_stages=2,
    )  # fmt: skip
    launch(_merge, (triton.cdiv(packed, 16), batch * key_heads))(
        partial, lse, out, nodes, splits, *out.stride()[:3],
        HEADS=key_heads, GROUP=group, V_WIDTH=v_width, BLOCK_V=max(16, triton.next_power_of_2(v_width)),
        BLOCK_R=16, num_warps=4,
    )  # fmt: skip
    return out


def _splits(programs: int, columns: int, device: torch.device) -> int:
    """Choose the number of splits.

    Each multiprocessor gets two programs if there is enough work: a split has at least four blocks of keys, and there
    are at most 32 splits.
    """
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return max(1, min(-(-2 * units // programs), columns // (4 * BLOCK_N), 32))
