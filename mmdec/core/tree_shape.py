"""Chooses the shapes of draft trees from how often the drafter's k-th best token was right at each depth."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Sequence
from threading import Lock
from typing import Any, final

from mmdec.errors import InputError
from mmdec.types import TreeShape, Verdict

OBSERVATION_DECAY = 0.995  # each observation multiplies the weight of all earlier ones by this factor
INITIAL_WEIGHT = 20.0  # the initial probabilities have the weight of this many observations
# a computed tree is used again until this many further observations were made; the probabilities change slowly
TREE_REUSE_OBSERVATIONS = 32
MAX_RANKS = 8  # number of best tokens (ranks) at each depth that a tree may use
# assumed probability that the best token at the first depth is right, and the factor on it for each further depth
FIRST_PROBABILITY, PROBABILITY_DECAY = 0.75, 0.85
RANK_DECAY = 2.0  # the assumed probability that the k-th best token at a depth is right falls as 1 / k^2
Node = tuple[int, int, int]  # a node of a tree: index of its parent, depth (0 below the root), rank (k-th best token)
Path = tuple[int, ...]  # ranks along the path from the root to a node


@final
class HeadAccuracy:
    """Counts how often the drafter's k-th best token (rank k) was right at each depth, if the tokens above were right.

    From these counts it builds trees for drafters that guess each depth independently of the tokens above (Medusa, Cai
    et al. 2024, section 2.3.3). A node's probability is the product of the probabilities along its path. A tree of n
    nodes consists of the n likeliest nodes.

    Args:
        probabilities: [depth][rank], initial probability that this rank is right; sums to at most 1 over the ranks.
    """

    def __init__(self, probabilities: Sequence[Sequence[float]]) -> None:
        for depth, row in enumerate(probabilities):
            if not row or min(row) < 0 or sum(row) > 1 + 1e-6 or len(row) != len(probabilities[0]):
                raise InputError(
                    f"`ranks` must hold probabilities that sum to at most 1 in a row, but row {depth} is {list(row)}. "
                    "Give one row for each head, with one probability for each rank."
                )
        self.width = len(probabilities[0])
        self._hits = [[probability * INITIAL_WEIGHT for probability in row] for row in probabilities]
        self._trials = [INITIAL_WEIGHT] * len(probabilities)
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

    def probabilities(self) -> list[list[float]]:
        """Return the share of hits [depth][rank]: the probability that the drafter's token of this rank is right."""
        with self._lock:
            return [[count / total for count in row] for row, total in zip(self._hits, self._trials, strict=True)]

    def learn(self, depth: int, rank: int | None) -> None:
        """Record which of the drafter's ranked tokens was right.

        Args:
            depth: Depth of the tokens in the tree, from 0.
            rank: Index of the right token, 0 for the best one, or None if none was right.
        """
        with self._lock:
            self._trials[depth] = OBSERVATION_DECAY * self._trials[depth] + 1
            hits = self._hits[depth] = [OBSERVATION_DECAY * count for count in self._hits[depth]]
            if rank is not None:
                hits[rank] += 1
            self._learned += 1
            if self._learned % TREE_REUSE_OBSERVATIONS == 0:
                self._trees = {}

    def tree(self, nodes: int, depth: int) -> list[Node]:
        """Return the `nodes` likeliest nodes that are at most `depth` levels below the root; a chain if nodes <= depth.

        Returns:
            For nodes 1, 2, ... the parent's index (0: the root), the depth (0 below the root) and the rank. The
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
        paths = likeliest_paths(self.probabilities()[:depth], nodes)
        index = {(): 0} | {path: node for node, path in enumerate(sorted(paths), 1)}
        return [(index[path[:-1]], len(path) - 1, path[-1]) for path in index if path]


def default_probabilities(depths: int) -> list[list[float]]:
    """Return the assumed probabilities [depth][rank] that the k-th best token is right, before any is measured."""
    rows: list[list[float]] = []
    for depth in range(depths):
        first = FIRST_PROBABILITY * PROBABILITY_DECAY**depth
        rows.append([first, *(first * (1 - first) * k**-RANK_DECAY for k in range(2, MAX_RANKS + 1))])
    return rows


def count_ranks(shape: TreeShape, ranked: Sequence[Sequence[Sequence[int]]], verdict: Verdict) -> None:
    """Compare a drafter's proposals with the new tokens, and count in `shape` which rank was right at each depth.

    Args:
        ranked: [row][depth][rank], the proposed tokens.
        verdict: The new tokens.
    """
    for levels, tokens in zip(ranked, verdict.new_tokens, strict=True):
        for depth, (tokens_ranked, token) in enumerate(zip(levels, tokens, strict=False)):
            shape.learn(depth, tokens_ranked.index(token) if token in tokens_ranked else None)


def likeliest_paths(probabilities: Sequence[Sequence[float]], nodes: int) -> list[Path]:
    """Return the `nodes` likeliest nodes of a tree, the likeliest first; parents come before their children.

    A node's probability is the product of the probabilities along its path. Nodes with probability 0 are left out.

    Args:
        probabilities: [depth][rank], probability that the k-th best token (rank k) is right if all tokens above it are
            right.

    Returns:
        For each node, the ranks along its path from the root.
    """
    if not probabilities or nodes <= 0:
        return []
    heap: list[tuple[float, Path]] = [(-probabilities[0][0], (0,))]
    paths: list[Path] = []
    while heap and len(paths) < nodes:
        value, path = heapq.heappop(heap)
        if not value:
            break
        paths.append(path)
        *above, rank = path
        level = len(above)
        row = probabilities[level]
        if level + 1 < len(probabilities):
            heapq.heappush(heap, (value * probabilities[level + 1][0], (*path, 0)))
        if rank + 1 < len(row) and row[rank] > 0:
            heapq.heappush(heap, (value / row[rank] * row[rank + 1], (*above, rank + 1)))
    return paths
