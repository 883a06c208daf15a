"""Functions for trees of tokens: find depths and ancestors, make drafts from lists, choose the most probable nodes.
In shapes, B is the number of rows, N of nodes, V the size of the vocabulary."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Sequence
from threading import Lock
from typing import Any, cast, final

import torch
from torch import Tensor

from mmdec.errors import InputError
from mmdec.types import Draft

# `top_indices` divides logits into chunks of this many, compares the chunks' maxima, and searches only the best chunks
TOP_K_CHUNK = 64
MAX_DIRECT_TOP_K = (
    2**16
)  # for up to this many logits, `torch.topk` over all of them is faster than the search by chunks
OBSERVATION_DECAY = 0.995  # each observation multiplies the weight of all earlier ones by this factor
INITIAL_WEIGHT = 20.0  # the initial chances have the weight of this many observations
TREE_REUSE_OBSERVATIONS = (
    32  # a computed tree is used again until this many further observations were made; the chances change slowly
)
Node = tuple[int, int, int]  # a node of a tree: index of its parent, depth (0 below the root), rank (k-th best token)
Path = tuple[int, ...]  # ranks along the path from the root to a node


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
    # Pointer doubling: after k steps, `seen` holds each node's 2^k nearest ancestors, the node included.
    seen = eye.expand(parents.shape[0], -1, -1).clone()
    jump = torch.where(parents < 0, 0, parents)
    seen = seen | torch.nn.functional.one_hot(jump, size).bool() if size > 1 else seen
    for _ in range(max(size - 1, 1).bit_length()):
        seen = seen | seen.gather(1, jump[..., None].expand(-1, -1, size))
        jump = jump.gather(1, jump)
    return seen


def depths(parents: Sequence[int]) -> list[int]:
    """Return the depth of each node of one batch row, 0 at the root. parents: index of each node's parent."""
    steps = [0] * len(parents)
    for node in range(1, len(parents)):
        steps[node] = steps[parents[node]] + 1
    return steps


def height(draft: Draft) -> int:
    """Return the depth of the deepest node of all rows; the root has depth 0."""
    rows = zip(int_rows(draft.parents), int_list(draft.size), strict=True)
    return max(max(depths(parents[:size])) for parents, size in rows)


def chain_drafts(roots: Tensor, tails: Sequence[Sequence[int]]) -> Draft:
    """Make a draft with a chain in each batch row.

    roots: (B,), first token of each chain. tails: for each row, the other tokens of its chain; may be empty.
    """
    trees = [(list(tail), list(range(len(tail)))) for tail in tails]
    return trees_from_lists(roots, trees)


def trees_from_lists(
    roots: Tensor, trees: Sequence[tuple[Sequence[int], Sequence[int]]], probs: Tensor | None = None
) -> Draft:
    """Make a draft from lists.

    roots: (B,). trees: for each batch row, the tokens and the parents' indices of nodes 1, 2, ...; the root is node 0.
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


def merge_chains(tails: Sequence[Sequence[int]], nodes: int) -> tuple[list[int], list[int]]:
    """Merge chains into one tree, in which chains with equal first tokens share nodes.

    tails: each chain's tokens below the root. nodes: maximum number of nodes below the root; later chains are cut.
    Returns: tokens and parents' indices of nodes 1, 2, ...; the root is node 0.
    """
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


@final
class HeadAccuracy:
    """Counts how often the drafter's k-th best token (rank k) was right at each depth, if the tokens above were right.

    From these counts it builds trees for drafters that guess each depth independently of the tokens above (Medusa,
    Cai et al. 2024, section 2.3.3). A node's chance is the product of the chances along its path. A tree of n nodes
    consists of the n likeliest nodes.
    """

    def __init__(self, chances: Sequence[Sequence[float]]) -> None:
        """chances: [depth][rank], initial chance that this rank is right; sums to at most 1 over the ranks."""
        for depth, row in enumerate(chances):
            if not row or min(row) < 0 or sum(row) > 1 + 1e-6 or len(row) != len(chances[0]):
                raise InputError(
                    f"`ranks` must hold chances that sum up to at most 1 in each row, but row {depth} is {list(row)}. "
                    "Give one row for each head, with one chance for each rank."
                )
        self.width = len(chances[0])
        self._hits = [[chance * INITIAL_WEIGHT for chance in row] for row in chances]
        self._trials = [INITIAL_WEIGHT] * len(chances)
        self._trees: dict[tuple[int, int], list[Node]] = {}
        self._learned = 0
        self._lock = Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Return a snapshot of the counts for a copy, without the lock, which cannot be copied."""
        with self._lock:
            return copy.deepcopy({name: value for name, value in vars(self).items() if name != "_lock"})

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = Lock()

    @property
    def depth(self) -> int:
        return len(self._hits)

    def chances(self) -> list[list[float]]:
        """Return the estimated chance [depth][rank] that the drafter's token of this rank is right: hits divided by
        trials."""
        with self._lock:
            return [[hit / total for hit in row] for row, total in zip(self._hits, self._trials, strict=True)]

    def learn(self, depth: int, rank: int | None) -> None:
        """Record which of the drafter's ranked tokens was right. depth: its depth in the tree, from 0. rank: its index,
        0 is the best one; None: none was right."""
        with self._lock:
            self._trials[depth] = OBSERVATION_DECAY * self._trials[depth] + 1
            hits = self._hits[depth] = [OBSERVATION_DECAY * hit for hit in self._hits[depth]]
            if rank is not None:
                hits[rank] += 1
            self._learned += 1
            if self._learned % TREE_REUSE_OBSERVATIONS == 0:
                self._trees = {}

    def tree(self, nodes: int, depth: int) -> list[Node]:
        """Return the `nodes` likeliest nodes that are at most `depth` levels below the root; a chain if nodes <= depth.

        Returns: for nodes 1, 2, ... the parent's index (0: the root), the depth (0 below the root) and the rank. The
            likeliest path comes first: if it is accepted, no cache entry must be moved.
        """
        depth = min(depth, self.depth)
        if nodes <= depth:
            return [(index, index, 0) for index in range(nodes)]
        if depth < 1:
            return []
        trees = self._trees  # a local variable, because another thread's `learn` may replace the dict meanwhile
        if (nodes, depth) not in trees:
            trees[nodes, depth] = self._best(nodes, depth)
        return trees[nodes, depth]

    def _best(self, nodes: int, depth: int) -> list[Node]:
        paths = likeliest_paths(self.chances()[:depth], nodes)
        index = {(): 0} | {path: node for node, path in enumerate(sorted(paths), 1)}
        return [(index[path[:-1]], len(path) - 1, path[-1]) for path in index if path]


def likeliest_paths(chances: Sequence[Sequence[float]], nodes: int) -> list[Path]:
    """Return the `nodes` likeliest nodes of a tree, the likeliest first; parents come before their children.

    A node's chance is the product of the chances along its path. Nodes with chance 0 are left out.

    chances: [depth][rank], chance that the k-th best token (rank k) is right if all tokens above it are right.
    Returns: for each node, the ranks along its path from the root.
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


def sort_depth_first(
    numbers: Sequence[int], tokens: Sequence[int], parents: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Sort one batch row's nodes depth first. Then an accepted path has few gaps, and few cache entries must be moved.

    numbers: numbers that name the nodes, from 0 on, in any order; the root has none. tokens: the token of each node.
    parents: for each node, the number of its parent plus 1; 0 means the root. Siblings keep their order.
    Returns: tokens and parents' indices of nodes 1, 2, ... in the new order.
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

    chosen: numbers of the chosen nodes. expanded: for each level from the second on, the indices within the level of
        the expanded nodes. On the first level all nodes are expanded.
    """
    numbers = [list(range(1, width + 1))]
    numbers += [[1 + width + level * width * width + node for node in nodes] for level, nodes in enumerate(expanded)]
    parents: list[int] = []
    for node in chosen:
        level, index = divmod(node - width, width * width)
        parents.append(0 if node < width else numbers[level][index // width])
    return parents
