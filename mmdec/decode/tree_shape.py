"""Trees from independent guesses: for each depth a ranked list of tokens that does not depend on the tokens above.

Which nodes to draft follows from how often the list's first, second, ... token was right at each depth (Medusa, Cai et
al. 2024, section 2.3.3): a node's value is the product of these chances along its path, and a tree of n nodes has the n
most valuable ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from threading import Lock
from typing import final

from mmdec.types import InputError

FADE = 0.995  # per observation, the weight of earlier ones decays by this factor
WEIGHT = 20.0  # the initial chances count as so many observations
KEPT = 32  # observations between two recomputations of the trees

Node = tuple[int, int, int]  # parent, depth from 0, rank
Path = tuple[int, ...]  # ranks along the path from the root to a node


@final
class HeadAccuracy:
    """How often each rank was right at each depth, given that all tokens above were right. Updated while decoding."""

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
        """Restore from what `counts` returned. Raises InputError if there are more hits than trials."""
        if len(hits) != len(trials):
            raise InputError(f"`hits` must have a row for each of {len(trials)} trials, but has {len(hits)}.")
        accuracy = cls([[hit / total for hit in row] for row, total in zip(hits, trials, strict=True)])
        accuracy._hits, accuracy._trials = [list(row) for row in hits], list(trials)
        return accuracy

    @property
    def depth(self) -> int:
        return len(self._hits)

    def counts(self) -> tuple[list[list[float]], list[float]]:
        """Hits of each depth's ranks, and trials of each depth; older observations weigh less."""
        with self._lock:
            return [list(row) for row in self._hits], list(self._trials)

    def chances(self) -> list[list[float]]:
        """Current estimates [depth][rank]: hits divided by trials."""
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
        """The best `nodes` nodes that are at most `depth` deep, as (parent, depth from 0, rank).

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
    """The `nodes` likeliest nodes of a tree, the likeliest first, each as the ranks along its path from the root.

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
