"""Functions for trees of tokens: find depths and ancestors, make drafts from lists, choose the most probable nodes.
Shapes are as in `mmdec.types`."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from threading import Lock
from typing import Any, cast, final

import torch
from torch import Tensor

from mmdec.types import Draft, InputError

CHUNK = 64  # values in a chunk that `top_indices` searches whole
FEW = 2**16  # in a tensor of up to so many values, plain `topk` is faster than a search by chunks
FADE = 0.995  # per observation, the weight of earlier ones decays by this factor
WEIGHT = 20.0  # the initial chances count as so many observations
KEPT = 32  # a computed tree is reused for so many observations: chances change slowly
Node = tuple[int, int, int]  # a node of a tree: parent, depth from 0, rank
Path = tuple[int, ...]  # ranks along the path from the root to a node


def int_list(values: Tensor) -> list[int]:
    """Convert a tensor (B,) of integers to a list. (torch does not type `tolist`; these three functions do.)"""
    return cast(Any, values).tolist()


def int_rows(values: Tensor) -> list[list[int]]:
    """Convert a tensor (B, N) of integers to B lists."""
    return cast(Any, values).tolist()


def bool_list(values: Tensor) -> list[bool]:
    """Convert a tensor (B,) of truth values to a list."""
    return cast(Any, values).tolist()


def single(roots: Tensor) -> Draft:
    """Return the draft of plain decoding: only the roots (B,)."""
    return Draft(roots[:, None], torch.full_like(roots, -1)[:, None], torch.ones_like(roots))


def ancestors(parents: Tensor) -> Tensor:
    """Return (B, N, N) bool: [b, i, j] is True if node j is on the path from the root to node i, i included."""
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
    """Return the depth of each node of one row, 0 at the root. parents: each node's parent; the root's is not read."""
    steps = [0] * len(parents)
    for node in range(1, len(parents)):
        steps[node] = steps[parents[node]] + 1
    return steps


def height(draft: Draft) -> int:
    """Return the depth of the deepest node of any row."""
    rows = zip(int_rows(draft.parents), int_list(draft.size), strict=True)
    return max(max(depths(parents[:size])) for parents, size in rows)


def chains(roots: Tensor, tails: Sequence[Sequence[int]]) -> Draft:
    """Make a draft with a chain in each row: the row's root (B,), then the tokens of its tail, which may be empty."""
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
    # one table, because each copy to the device takes time
    table = torch.tensor([*rows, *links], dtype=torch.long, device=roots.device).view(2, count, size)
    table[0, :, 0] = roots
    sizes = torch.tensor([1 + len(tokens) for tokens, _ in trees], dtype=torch.long, device=roots.device)
    return Draft(table[0], table[1], sizes, probs)


def joined(tails: Sequence[Sequence[int]], nodes: int) -> tuple[list[int], list[int]]:
    """Merge chains into one tree. tails: each chain's tokens below the root. If the tree would have more than `nodes`
    nodes below the root, the last chains are cut. Returns: tokens and parents of nodes 1, 2, ..."""
    tokens, parents, known = list[int](), list[int](), dict[tuple[int, int], int]()
    for tail in tails:
        at = 0
        for token in tail:
            if (at, token) not in known:
                if len(tokens) == nodes:
                    break
                tokens.append(token)
                parents.append(at)
                known[at, token] = len(tokens)
            at = known[at, token]
    return tokens, parents


def top_indices(values: Tensor, count: int) -> Tensor:
    """Return the indices (..., count) of the largest values (..., V), the largest first; fewer if V is smaller.

    It searches only the `count` chunks with the largest maxima. For a large vocabulary this is several times faster
    than `topk` over all values.
    """
    size = values.shape[-1]
    chunks = size // CHUNK
    if chunks <= 2 * count or values.numel() <= FEW:
        return values.topk(min(count, size), dim=-1).indices
    body = values[..., : chunks * CHUNK].reshape(*values.shape[:-1], chunks, CHUNK)
    best = body.amax(-1).topk(count, dim=-1).indices  # (..., count), indices of chunks
    index = (best[..., None] * CHUNK + torch.arange(CHUNK, device=values.device)).flatten(-2)
    rest = torch.arange(chunks * CHUNK, size, device=values.device).expand(*index.shape[:-1], -1)
    index = torch.cat([index, rest], -1)
    return index.gather(-1, values.gather(-1, index).topk(count, dim=-1).indices)


@final
class HeadAccuracy:
    """Counts how often the drafter's k-th best token (rank k) was right at each depth, given that all tokens above it
    were right.

    It shapes trees of drafters that guess each depth independently of the tokens above (Medusa, Cai et al. 2024,
    section 2.3.3): a node's value is the product of these chances along its path, and a tree of n nodes has the n most
    valuable ones.
    """

    def __init__(self, chances: Sequence[Sequence[float]]) -> None:
        """chances: [depth][rank], the initial values; each depth sums to at most 1."""
        for depth, row in enumerate(chances):
            if not row or min(row) < 0 or sum(row) > 1 + 1e-6 or len(row) != len(chances[0]):
                raise InputError(
                    f"`ranks` must hold chances that sum up to at most 1 in each row, but row {depth} is {list(row)}. "
                    "Give one row for each head, with one chance for each rank."
                )
        self.width = len(chances[0])
        self._hits = [[chance * WEIGHT for chance in row] for row in chances]
        self._trials = [WEIGHT] * len(chances)
        self._trees: dict[tuple[int, int], list[Node]] = {}
        self._learned = 0
        self._lock = Lock()

    @classmethod
    def of_counts(cls, hits: Sequence[Sequence[float]], trials: Sequence[float]) -> HeadAccuracy:
        """Make the object from what `counts` returned. Raises InputError if there are more hits than trials."""
        if len(hits) != len(trials):
            raise InputError(f"`hits` must have a row for each of {len(trials)} trials, but has {len(hits)}.")
        accuracy = cls([[hit / total for hit in row] for row, total in zip(hits, trials, strict=True)])
        accuracy._hits, accuracy._trials = [list(row) for row in hits], list(trials)
        return accuracy

    @property
    def depth(self) -> int:
        return len(self._hits)

    def counts(self) -> tuple[list[list[float]], list[float]]:
        """Return hits [depth][rank] (how often a rank was right) and trials [depth]; older observations weigh less."""
        with self._lock:
            return [list(row) for row in self._hits], list(self._trials)

    def chances(self) -> list[list[float]]:
        """Return the current estimates [depth][rank]: hits divided by trials."""
        with self._lock:
            return [[hit / total for hit in row] for row, total in zip(self._hits, self._trials, strict=True)]

    def learn(self, depth: int, rank: int | None) -> None:
        """Record that this rank was right at `depth` (from 0); None: no rank was right."""
        with self._lock:
            self._trials[depth] = FADE * self._trials[depth] + 1
            hits = self._hits[depth] = [FADE * hit for hit in self._hits[depth]]
            if rank is not None:
                hits[rank] += 1
            self._learned += 1
            if self._learned % KEPT == 0:
                self._trees = {}

    def tree(self, nodes: int, depth: int) -> list[Node]:
        """Return the best `nodes` nodes that are at most `depth` deep, as (parent, depth from 0, rank).

        Node 0 is the root; the list begins with node 1. If `nodes` is at most `depth` the result is a chain. The
        likeliest path comes first, so that the cache needs no moves if it is accepted.
        """
        depth = min(depth, self.depth)
        if nodes <= depth:
            return [(index, index, 0) for index in range(nodes)]
        if depth < 1:
            return []
        trees = self._trees  # a local reference: another thread's `learn` may replace the dict
        if (nodes, depth) not in trees:
            trees[nodes, depth] = self._best(nodes, depth)
        return trees[nodes, depth]

    def _best(self, nodes: int, depth: int) -> list[Node]:
        paths = likeliest_paths(self.chances()[:depth], nodes)
        index = {(): 0} | {path: node for node, path in enumerate(sorted(paths), 1)}
        return [(index[path[:-1]], len(path) - 1, path[-1]) for path in index if path]


def likeliest_paths(chances: Sequence[Sequence[float]], nodes: int) -> list[Path]:
    """Return the `nodes` likeliest nodes of a tree, the likeliest first, each as the ranks along its path from the
    root.

    chances: [depth][rank], given that all tokens above are right. A node's chance is the product along its path; nodes
        with chance 0 are left out. A node comes after its parent.
    """
    if not chances or nodes <= 0:
        return []
    heap: list[tuple[float, Path]] = [(-chances[0][0], (0,))]
    kept: list[Path] = []
    while heap and len(kept) < nodes:
        value, path = heapq.heappop(heap)
        if not value:
            break
        kept.append(path)
        *above, rank = path
        level = len(above)
        row = chances[level]
        if level + 1 < len(chances):
            heapq.heappush(heap, (value * chances[level + 1][0], (*path, 0)))
        if rank + 1 < len(row) and row[rank] > 0:
            heapq.heappush(heap, (value / row[rank] * row[rank + 1], (*above, rank + 1)))
    return kept


def in_order(numbers: Sequence[int], tokens: Sequence[int], parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Reorder a row's nodes depth first, the likeliest child first, so that the target's cache needs the fewest moves.

    numbers: the nodes' numbers, from 0. tokens: their tokens. parents: their parents' numbers from 1; 0 is the root.
    Returns: tokens and parents in the new order.
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
    """Return the parents' numbers (from 1; 0 is the root) of the nodes whose numbers (from 0) are in `chosen`.

    width: the first level has `width` nodes, each later one width * width. expanded: for each level, which of its nodes
        have children.
    """
    numbers = [list(range(1, width + 1))]
    numbers += [[1 + width + level * width * width + node for node in nodes] for level, nodes in enumerate(expanded)]
    parents: list[int] = []
    for node in chosen:
        level, index = divmod(node - width, width * width)
        parents.append(0 if node < width else numbers[level][index // width])
    return parents
