"""Trees of tokens: depth, ancestors, drafts put together from lists, the best tokens. Shapes as in `mmdec.types`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from mmdec.types import Draft

CHUNK = 64  # columns whose maximum is compared first
FEW = 2**16  # up to so many values in all, plain `topk` is faster


def int_list(values: Tensor) -> list[int]:
    """A tensor (B,) of integers as a list. (torch does not type `tolist`; these three functions do.)"""
    return cast(Any, values).tolist()


def int_rows(values: Tensor) -> list[list[int]]:
    """A tensor (B, N) of integers as lists."""
    return cast(Any, values).tolist()


def bool_list(values: Tensor) -> list[bool]:
    """A tensor (B,) of truth values as a list."""
    return cast(Any, values).tolist()


def single(roots: Tensor) -> Draft:
    """The draft of plain decoding: only the roots (B,)."""
    return Draft(roots[:, None], torch.full_like(roots, -1)[:, None], torch.ones_like(roots))


def ancestors(parents: Tensor) -> Tensor:
    """(B, N, N) bool: whether node j is on the path from the root to node i, i included."""
    size = parents.shape[1]
    eye = torch.eye(size, dtype=torch.bool, device=parents.device)
    # Pointer doubling: after k rounds a node knows its 2^k nearest ancestors.
    seen = eye.expand(parents.shape[0], -1, -1).clone()
    jump = torch.where(parents < 0, 0, parents)
    seen = seen | torch.nn.functional.one_hot(jump, size).bool() if size > 1 else seen
    for _ in range(max(size - 1, 1).bit_length()):
        seen = seen | seen.gather(1, jump[..., None].expand(-1, -1, size))
        jump = jump.gather(1, jump)
    return seen


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node of one row, given the root's. parents: one row's; parents[0] is not read."""
    steps = [0] * len(parents)
    for node in range(1, len(parents)):
        steps[node] = steps[parents[node]] + 1
    return steps


def height(draft: Draft) -> int:
    """Depth of the deepest node of any row."""
    rows = zip(int_rows(draft.parents), int_list(draft.size), strict=True)
    return max(max(depths(parents[:size])) for parents, size in rows)


def chains(roots: Tensor, tails: Sequence[Sequence[int]]) -> Draft:
    """Make a chain for each row: the root, then the row's tail, which may be empty."""
    trees = [(list(tail), list(range(len(tail)))) for tail in tails]
    return trees_from_lists(roots, trees)


def trees_from_lists(
    roots: Tensor, trees: Sequence[tuple[Sequence[int], Sequence[int]]], probs: Tensor | None = None
) -> Draft:
    """Make drafts from lists: for each row the tokens and the parents of nodes 1, 2, ... (parent 0 is the root)."""
    size, count = 1 + max((len(tokens) for tokens, _ in trees), default=0), len(trees)
    rows: list[list[int]] = []
    links: list[list[int]] = []
    for tokens, parents in trees:
        gap = [0] * (size - 1 - len(tokens))
        rows.append([0, *tokens, *gap])
        links.append([-1, *parents, *gap])
    # one table, so that there is one copy to the device
    table = torch.tensor([*rows, *links], dtype=torch.long, device=roots.device).view(2, count, size)
    table[0, :, 0] = roots
    sizes = torch.tensor([1 + len(tokens) for tokens, _ in trees], dtype=torch.long, device=roots.device)
    return Draft(table[0], table[1], sizes, probs)


def top_indices(values: Tensor, count: int) -> Tensor:
    """Indices of the largest values, largest first: (..., V) -> (..., count); fewer if V is smaller.

    The best values lie in the chunks with the best maxima, which is several times faster than `topk` over a large
    vocabulary.
    """
    size = values.shape[-1]
    chunks = size // CHUNK
    if chunks <= 2 * count or values.numel() <= FEW:
        return values.topk(min(count, size), dim=-1).indices
    body = values[..., : chunks * CHUNK].unflatten(-1, (chunks, CHUNK))
    best = body.amax(-1).topk(count, dim=-1).indices  # (..., count) chunks
    index = (best[..., None] * CHUNK + torch.arange(CHUNK, device=values.device)).flatten(-2)
    rest = torch.arange(chunks * CHUNK, size, device=values.device).expand(*index.shape[:-1], -1)
    index = torch.cat([index, rest], -1)
    return index.gather(-1, values.gather(-1, index).topk(count, dim=-1).indices)
