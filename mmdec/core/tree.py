"""Functions for trees of tokens: find depths and ancestors, make drafts from lists, choose the most probable tokens.

In shapes, B is the number of rows, N of nodes, V the size of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, final

import torch
from torch import Tensor

from mmdec.types import Draft

# `top_indices` divides logits into chunks of this many, compares the chunks' maxima, and searches only the best chunks
TOP_K_CHUNK = 64
# for up to this many logits, `torch.topk` over all of them is faster than the search by chunks
MAX_DIRECT_TOP_K = 2**16


def int_list(values: Tensor) -> list[int]:
    """Convert a tensor (B,) of integers to a list. Exists because `Tensor.tolist` has no precise return type."""
    return cast(Any, values).tolist()


def int_rows(values: Tensor) -> list[list[int]]:
    """Convert a tensor (B, N) of integers to B lists."""
    return cast(Any, values).tolist()


def bool_list(values: Tensor) -> list[bool]:
    """Convert a tensor (B,) of truth values to a list."""
    return cast(Any, values).tolist()


def root_only(roots: Tensor) -> Draft:
    """Return the draft of plain decoding: only the roots (B,)."""
    return Draft(roots[:, None], torch.full_like(roots, -1)[:, None], torch.ones_like(roots))


def ancestors(parents: Tensor) -> Tensor:
    """Return (B, N, N) bool: [b, i, j] is True if node j is on the path from the root to node i, i included."""
    size = parents.shape[1]
    eye = torch.eye(size, dtype=torch.bool, device=parents.device)
    # Pointer doubling: after k steps, `reached` holds each node's 2^k nearest ancestors, the node included.
    reached = eye.expand(parents.shape[0], -1, -1).clone()
    jump = torch.where(parents < 0, 0, parents)
    reached = reached | torch.nn.functional.one_hot(jump, size).bool() if size > 1 else reached
    for _ in range(max(size - 1, 1).bit_length()):
        reached = reached | reached.gather(1, jump[..., None].expand(-1, -1, size))
        jump = jump.gather(1, jump)
    return reached


def depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of each node of one batch row, 0 at the root.

    Args:
        parents: Index of each node's parent.
    """
    steps = [0] * len(parents)
    for node in range(1, len(parents)):
        steps[node] = steps[parents[node]] + 1
    return steps


def height(draft: Draft) -> int:
    """Return the depth of the deepest token of all rows, without soft nodes. The root has depth 0."""
    rows = zip(int_rows(draft.parents), int_list(draft.size), draft.soft_nodes, strict=True)
    return max(
        max(depth for depth, is_soft in zip(depths(parents[:size]), soft, strict=False) if not is_soft)
        for parents, size, soft in rows
    )


def chain_drafts(roots: Tensor, tails: Sequence[Sequence[int]]) -> Draft:
    """Make a draft with a chain in each batch row.

    Args:
        roots: (B,), first token of each chain.
        tails: For each row, the other tokens of its chain; may be empty.
    """
    trees = [(list(tail), list(range(len(tail)))) for tail in tails]
    return trees_from_lists(roots, trees)


def trees_from_lists(
    roots: Tensor, trees: Sequence[tuple[Sequence[int], Sequence[int]]], probs: Tensor | None = None
) -> Draft:
    """Make a draft from lists.

    Args:
        roots: (B,).
        trees: For each batch row, the tokens and the parents' indices of nodes 1, 2, ...; the root is node 0.
        probs: (B, N, V), the distributions that the children of each node were sampled from; None: not sampled.
    """
    size, count = 1 + max((len(tokens) for tokens, _ in trees), default=0), len(trees)
    rows: list[list[int]] = []
    links: list[list[int]] = []
    for tokens, parents in trees:
        gap = [0] * (size - 1 - len(tokens))
        rows.append([0, *tokens, *gap])
        links.append([-1, *parents, *gap])
    # tokens and parents are copied to the device in one tensor, because each copy takes time
    table = torch.tensor([*rows, *links], dtype=torch.long, device=roots.device).view(2, count, size)
    table[0, :, 0] = roots
    sizes = torch.tensor([1 + len(tokens) for tokens, _ in trees], dtype=torch.long, device=roots.device)
    return Draft(table[0], table[1], sizes, probs)


@final
class PrefixTree:
    """One row's draft while it grows: texts with equal first tokens share nodes. Node 0 is the root.

    Args:
        nodes: Maximum number of nodes below the root.
        depth: Maximum depth; None: any.
    """

    def __init__(self, nodes: int, depth: int | None = None) -> None:
        self.tokens: list[int] = []  # of nodes 1, 2, ...
        self.parents: list[int] = []  # their parents' indices
        self._nodes, self._depth = nodes, nodes if depth is None else depth
        self._depths = [0]
        self._children: dict[tuple[int, int], int] = {}  # (node, token) -> child

    @property
    def is_full(self) -> bool:
        """Whether no node can be added."""
        return len(self.tokens) == self._nodes

    def child(self, node: int, token: int) -> int:
        """Return the child of `node` that holds `token`, or 0 if there is none."""
        return self._children.get((node, token), 0)

    def add(self, node: int, token: int) -> int:
        """Return the child of `node` that holds `token`, added if there is none, or 0 if there is no room."""
        child = self.child(node, token)
        if child or self.is_full or self._depths[node] == self._depth:
            return child
        self.tokens.append(token)
        self.parents.append(node)
        self._depths.append(self._depths[node] + 1)
        child = self._children[node, token] = len(self.tokens)
        return child


def merge_chains(tails: Sequence[Sequence[int]], nodes: int) -> tuple[list[int], list[int]]:
    """Merge chains into one tree, in which chains with equal first tokens share nodes.

    Args:
        tails: Each chain's tokens below the root.
        nodes: Maximum number of nodes below the root; later chains are cut.

    Returns:
        Tokens and parents' indices of nodes 1, 2, ...; the root is node 0.
    """
    tree = PrefixTree(nodes)
    for tail in tails:
        node = 0
        for token in tail:
            node = tree.add(node, token)
            if not node:
                break
    return tree.tokens, tree.parents


def top_indices(values: Tensor, count: int) -> Tensor:
    """Return the indices (..., count) of the largest of the values (..., V), the largest first; fewer if V is smaller.

    It searches only the `count` chunks of 64 values that have the largest maxima. For a large vocabulary this is
    several times faster than `topk` over all values.
    """
    size = values.shape[-1]
    chunks = size // TOP_K_CHUNK
    if chunks <= 2 * count or values.numel() <= MAX_DIRECT_TOP_K:
        return values.topk(min(count, size), dim=-1).indices
    body = values[..., : chunks * TOP_K_CHUNK].reshape(*values.shape[:-1], chunks, TOP_K_CHUNK)
    best = body.amax(-1).topk(count, dim=-1).indices  # (..., count): the chunks with the largest maxima
    index = (best[..., None] * TOP_K_CHUNK + torch.arange(TOP_K_CHUNK, device=values.device)).flatten(-2)
    rest = torch.arange(chunks * TOP_K_CHUNK, size, device=values.device).expand(*index.shape[:-1], -1)
    index = torch.cat([index, rest], -1)
    return index.gather(-1, values.gather(-1, index).topk(count, dim=-1).indices)


def sort_depth_first(
    numbers: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Sort one batch row's nodes depth first.

    Then an accepted path has few gaps, and few cache entries must be moved.

    Args:
        numbers: Numbers that name the nodes, from 0 on, in any order; the root has none.
        tokens: The token of each node.
        parents: For each node, the number of its parent plus 1; 0 means the root. Siblings keep their order.

    Returns:
        Tokens and parents' indices of nodes 1, 2, ... in the new order.
    """
    below: dict[int, list[int]] = {}
    for index, parent in enumerate(parents):
        below.setdefault(parent, []).append(index)
    new_index, new_tokens, new_parents = {0: 0}, list[int](), list[int]()
    stack = below.get(0, [])[::-1]
    while stack:
        index = stack.pop()
        number = numbers[index] + 1
        new_tokens.append(tokens[index])
        new_parents.append(new_index[parents[index]])
        new_index[number] = len(new_tokens)
        stack += below.get(number, [])[::-1]
    return new_tokens, new_parents


def level_parents(chosen: Sequence[int], expanded: Sequence[Sequence[int]], width: int) -> list[int]:
    """Return for each chosen node of a tree grown level by level the number of its parent plus 1; 0 means the root.

    The first level has `width` nodes. On each level `width` nodes are expanded, with `width` children each. Nodes are
    numbered from 0, level by level.

    Args:
        chosen: Numbers of the chosen nodes.
        expanded: For each level from the second on, the indices within the level of the expanded nodes. On the first
            level all nodes are expanded.
    """
    numbers = [list(range(1, width + 1))]
    numbers += [[1 + width + level * width * width + node for node in nodes] for level, nodes in enumerate(expanded)]
    parents: list[int] = []
    for node in chosen:
        level, index = divmod(node - width, width * width)
        parents.append(0 if node < width else numbers[level][index // width])
    return parents
