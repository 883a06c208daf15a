"""Linear layers and attention in bfloat16 and float16 on a CPU, in which no token's result depends on the others.

torch chooses kernels by the number of tokens, and they sum in different orders. In half precision that decides ties, so
a draft's pass could choose another token than plain decoding. Here a token's numbers are summed in the same order,
whatever the other tokens, nodes and batch rows of its pass are:

- A product has at most `MAX_PRODUCT_ROWS` rows, and at least as many as this processor needs (`least_rows`). float16
  products are fbgemm's, because torch's take up to 1.6 times as long for two rows as for one.
- The keys that a node of a draft attends to lie where plain decoding has them: the text, then the node's path. A tree
  with branches is computed chain by chain, with the chain's keys and values copied to these places.
- The number of keys is a multiple of `KEY_MULTIPLE`, and the rest is hidden.
- Each query is computed alone. Only bfloat16 queries of heads that share keys are computed in blocks, because all
  blocks of two queries or more give the same bits. float16 scores are computed in float32, because torch's float16
  kernel divides the keys into blocks by their number.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.weak import WeakTensorKeyDictionary

from mmdec.kernels.float16_linear import HalfWeights, weights_state

HALF_DTYPES = (torch.bfloat16, torch.float16)
MAX_PRODUCT_ROWS = 32  # oneDNN sums products of more rows in another order
TRIED_ROWS = (1, 2, 3, 4, 5, 8, 9, 12, 15, 16, 17, 24, 31)  # numbers of rows that `least_rows` compares
MAX_TRIED_OUTPUTS = 4096
KEY_MULTIPLE = 64  # torch sums the last few scores of other numbers of keys in another order
KEY_BLOCK = 512  # number of keys that torch's attention computes at a time
QUERY_BLOCK = 32  # number of queries that torch's attention computes at a time, for fewer than 192 queries


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, half: HalfWeights | None = None) -> Tensor:
    """Apply a linear layer in half precision.

    Args:
        x: (..., I).
        weight: (O, I).
        bias: (O,).
        half: The copy of a float16 weight for fbgemm, from `half_weights`; None: torch multiplies.

    Returns:
        (..., O), in which a row's bits do not depend on the other rows.
    """
    if half is not None and x.dtype == torch.float16:
        return half(x.float()).to(x.dtype)
    rows, shape = x.shape[:-1].numel(), (min(len(weight), MAX_TRIED_OUTPUTS), x.shape[-1])
    min_rows = least_rows(x.dtype, shape, weight.is_contiguous(), bias is not None, torch.get_num_threads())
    if min_rows <= rows <= MAX_PRODUCT_ROWS:
        return F.linear(x, weight, bias)
    parts = [
        F.linear(F.pad(part, (0, 0, 0, max(min_rows - len(part), 0))), weight, bias)[: len(part)]
        for part in x.reshape(rows, -1).split(MAX_PRODUCT_ROWS)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(*x.shape[:-1], -1)


# weight -> (state of weight and bias when they were copied, copy; None: fbgemm cannot multiply by this weight)
_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_copying = threading.Lock()


def half_weights(weight: Tensor, bias: Tensor | None = None) -> HalfWeights | None:
    """Return the copy of a linear layer's float16 weight for fbgemm, which takes as much memory again.

    It is kept as long as the weight, and made anew if the weight has changed. To find out takes about as long as the
    product of a small layer, so ask once in a call.

    Returns:
        None if the weight is not float16, if its changes would not be noticed, or if this CPU has no such product.
    """
    tensors = [tensor for tensor in (weight, bias) if tensor is not None]
    if weight.dtype != torch.float16 or any(tensor.is_inference() for tensor in tensors):  # which count no changes
        return None
    state = weights_state(tensors)
    with _copying:
        entry = _copies.get(weight)
        if entry is None or entry[0] != state:
            try:
                copy = HalfWeights(weight.float(), None if bias is None else bias.float())
            except RuntimeError:  # this CPU has no such product
                copy = None
            entry = _copies[weight] = state, copy
        return entry[1]


@cache
def least_rows(dtype: torch.dtype, shape: tuple[int, int], contiguous: bool, biased: bool, threads: int) -> int:
    """Return n: products of n to `MAX_PRODUCT_ROWS` rows give a row the same bits on this processor.

    It is found by trying, with sums of rounding errors alone: each row's products cancel.

    Args:
        shape: The weight's shape (O, I).
        contiguous: Whether the weight is contiguous; False: its transpose is.
        biased: Whether there is a bias.
        threads: torch's number of threads.
    """
    (outputs, inputs), draw = shape, torch.Generator().manual_seed(0)
    half = torch.randn(64, inputs // 2, generator=draw).repeat(-(-outputs // 64), 1)[:outputs]
    weight = F.pad(torch.cat([half, -half], 1), (0, inputs % 2)).mul_(64).to(dtype)  # float16 loses smaller sums
    weight = weight if contiguous else weight.t().contiguous().t()
    rows = torch.randn(MAX_PRODUCT_ROWS, inputs // 2, generator=draw).to(dtype)
    rows = F.pad(torch.cat([rows, rows], 1), (0, inputs % 2))
    bias = weight.new_zeros(outputs) if biased else None
    expected, min_rows = F.linear(rows, weight, bias), MAX_PRODUCT_ROWS
    for count in reversed(TRIED_ROWS):
        if not torch.equal(F.linear(rows[:count], weight, bias), expected[:count]):
            break
        min_rows = count
    return min_rows


@dataclass(frozen=True)
class Chain:
    """A path of a draft's tree from the root to a leaf, for each batch row."""

    path: Tensor  # (B, D) int64, the nodes from the root down, -1 beyond the leaf
    nodes: Tensor  # (B, n) int64, the nodes of the path that no earlier chain has; some may be repeated


def draft_chains(parents: Sequence[Sequence[int]], sizes: Sequence[int]) -> tuple[Chain, ...]:
    """Divide the trees of a draft into chains.

    Args:
        parents: [b][i]: index of the parent of node i, -1 at the root.
        sizes: Each row's number of nodes without padding.

    Returns:
        As many chains as the row with the most leaves has. Rows with fewer leaves repeat their first chain.
    """
    rows = [_paths(links[:size]) for links, size in zip(parents, sizes, strict=True)]
    chains = list[Chain]()
    for index in range(max(map(len, rows))):
        paths, nodes = zip(*(row[index] if index < len(row) else row[0] for row in rows), strict=True)
        depth, width = max(map(len, paths)), max(map(len, nodes))
        chains.append(
            Chain(
                torch.tensor([[*path, *[-1] * (depth - len(path))] for path in paths]),
                torch.tensor([[*row, *row[:1] * (width - len(row))] for row in nodes]),
            )
        )
    return tuple(chains)


def _paths(links: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return for each leaf of a tree the path to it, and the nodes of the path that no earlier path has."""
    inner, seen, paths = set(links), set[int](), list[tuple[list[int], list[int]]]()
    for leaf in range(len(links)):
        if leaf not in inner:
            path = [leaf]
            while links[path[-1]] >= 0:
                path.append(links[path[-1]])
            path.reverse()
            paths.append((path, [node for node in path if node not in seen]))
            seen.update(path)
    return paths


@final
@dataclass(frozen=True)
class ChainMask:
    """What the nodes of a chain attend to, once the chain's keys lie after its row's text."""

    nodes: Tensor  # (B, n) int64, the nodes
    path: Tensor  # (B, D) int64, the nodes whose keys and values are copied
    key_positions: Tensor | None  # (B, D) int64, index of the key to which each goes; None: all are there
    additive: Tensor  # (B, 1, n, L)
    _grouped: dict[tuple[int, bool], Tensor] = field(default_factory=lambda: {}, repr=False)

    def grouped(self, heads: int, alone: bool) -> Tensor:
        """Repeat the mask for `heads` query heads.

        Returns:
            (B, 1, heads * n, L); or, for queries that are computed alone, (B, heads * n, 1, L).
        """
        if (heads, alone) not in self._grouped:
            repeated = self.additive.repeat(1, 1, heads, 1)
            self._grouped[heads, alone] = repeated.transpose(1, 2) if alone else repeated
        return self._grouped[heads, alone]


def chain_masks(chains: Sequence[Chain], additive: Tensor, ends: Tensor) -> list[ChainMask]:
    """Make the masks of a draft's chains.

    Args:
        chains: From `draft_chains`.
        additive: (B, 1, N, S + N), the mask of the draft's pass.
        ends: (B,), index after each row's last key before the tree.
    """
    additive = additive.float() if additive.dtype == torch.float16 else additive  # as the scores in `tree_attention`
    batch, _, count, width = additive.shape
    columns, length = width - count, -(-width // KEY_MULTIPLE) * KEY_MULTIPLE
    hidden = torch.finfo(additive.dtype).min
    if len(chains) == 1 and bool((ends == columns).all()) and chains[0].path.shape[1] == count:
        nodes = torch.arange(count).expand(batch, -1)
        if torch.equal(chains[0].path, nodes):
            return [ChainMask(nodes, nodes, None, F.pad(additive, (0, length - width), value=hidden))]
    rows = torch.arange(batch)[:, None]
    padded, text = F.pad(additive[:, 0], (0, 1), value=hidden), torch.arange(length).expand(batch, -1)
    masks = list[ChainMask]()
    for chain in chains:
        key_positions = ends[:, None] + torch.arange(chain.path.shape[1])
        sources = text.masked_fill(text >= ends[:, None], width)
        sources = sources.scatter(1, key_positions, torch.where(chain.path < 0, width, columns + chain.path))
        mask = padded[rows, chain.nodes].gather(2, sources[:, None].expand(-1, chain.nodes.shape[1], -1))
        masks.append(ChainMask(chain.nodes, chain.path.clamp(min=0), key_positions, mask[:, None]))
    return masks


def tree_attention(q: Tensor, k: Tensor, v: Tensor, masks: Sequence[ChainMask], columns: int, scaling: float) -> Tensor:
    """Compute the attention of a draft's nodes.

    Args:
        q: (B, Hq, N, D).
        k, v: (B, Hkv, S + N, D), or with more keys, up to the masks' length. While this function runs, the keys and
            values of chains are copied into them.
        masks: From `chain_masks`.
        columns: S, the number of keys before the nodes.
        scaling: Factor on scores.

    Returns:
        (B, Hq, N, D); 0 for padding nodes.
    """
    dtype, count, length = q.dtype, q.shape[2], masks[0].additive.shape[3]
    if k.shape[2] != length:
        k, v = (F.pad(states, (0, 0, 0, length - states.shape[2])) for states in (k, v))
    if dtype == torch.float16:
        q, k, v = q.float(), k.float(), v.float()
    if masks[0].key_positions is None:
        return _attend(q, k, v, masks[0], scaling).to(dtype)
    rows, drafted = (
        torch.arange(len(q))[:, None],
        [states[:, :, columns : columns + count].clone() for states in (k, v)],
    )
    out = q.new_zeros(*q.shape[:3], v.shape[3])
    for mask in masks:
        for states, drafted_states in zip((k, v), drafted, strict=True):
            states[rows, :, mask.key_positions] = drafted_states[rows, :, mask.path]
        part = _attend(q[rows, :, mask.nodes].transpose(1, 2), k, v, mask, scaling)
        out[rows, :, mask.nodes] = part.transpose(1, 2)
    for states, drafted_states in zip((k, v), drafted, strict=True):
        states[:, :, columns : columns + count] = drafted_states
    return out.to(dtype)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: ChainMask, scaling: float) -> Tensor:
    batch, heads, count, size = q.shape
    group = heads // k.shape[1]
    if group == 1 or q.dtype == torch.float32:
        return attention(q, k, v, scaling, mask.grouped(heads, True))
    queries, additive = q.reshape(batch, k.shape[1], group * count, size), mask.grouped(group, False)
    if group * count % QUERY_BLOCK != 1:
        out = scaled_dot_product_attention(queries, k, v, attn_mask=additive, scale=scaling)
    else:  # otherwise the last query would be computed alone
        queries, additive = F.pad(queries, (0, 0, 0, 1)), F.pad(additive, (0, 0, 0, 1))
        out = scaled_dot_product_attention(queries, k, v, attn_mask=additive, scale=scaling)[:, :, :-1]
    return out.reshape(batch, heads, count, -1)


def attention(q: Tensor, k: Tensor, v: Tensor, scaling: float, mask: Tensor | None = None) -> Tensor:
    """Compute attention, each query alone.

    Args:
        q: (B, Hq, N, D).
        k, v: (B, Hkv, S, D); Hq is a multiple of Hkv.
        scaling: Factor on scores.
        mask: Additive, (B, Hq * N, 1, S); None: all keys are visible.

    Returns:
        (B, Hq, N, D).
    """
    batch, heads, count, size = q.shape
    queries = q.reshape(batch, heads * count, 1, size)
    shared = heads * count != k.shape[1]
    out = scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=scaling, enable_gqa=shared)
    return out.view(batch, heads, count, -1)
