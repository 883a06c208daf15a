"""Trees from independent guesses: at each depth a list of tokens, the best first, whatever stands above it.

Which nodes are worth drafting follows from how often the token at a depth was the list's first, second, ... choice
(Medusa, Cai et al. 2024, section 2.3.3): the value of a node is the product of these chances on its way from the root,
and a tree of n nodes is the n best.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from threading import Lock
from typing import final

from mmdec.types import InputError

FADE = 0.995  # weight of the past when an observation is added
WEIGHT = 20.0  # observations that the given chances count for
KEPT = 32  # observations until the trees are computed anew

Node = tuple[int, int, int]  # parent, depth from 0, rank
Path = tuple[int, ...]  # the ranks from the root down to a node


@final
class HeadAccuracy:
    """How often each rank was right at each depth, given that all above it was right. Learns while decoding."""

    def __init__(self, chances: Sequence[Sequence[float]]) -> None:
        """chances[depth][rank]: those known beforehand; a depth's sum up to at most 1."""
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
        """What `counts` gave. Raises InputError where hits are more than trials."""
        if len(hits) != len(trials):
            raise InputError(f"`hits` must have a row for each of {len(trials)} trials, but has {len(hits)}.")
        accuracy = cls([[hit / total for hit in row] for row, total in zip(hits, trials, strict=True)])
        accuracy._hits, accuracy._trials = [list(row) for row in hits], list(trials)
        return accuracy

    @property
    def depth(self) -> int:
        return len(self._hits)

    def counts(self) -> tuple[list[list[float]], list[float]]:
        """Hits of each depth's ranks, and trials of each depth; older ones weigh less."""
        with self._lock:
            return [list(row) for row in self._hits], list(self._trials)

    def chances(self) -> list[list[float]]:
        """As they are known now: hits over trials."""
        with self._lock:
            return [[hit / total for hit in row] for row, total in zip(self._hits, self._trials, strict=True)]

    def learn(self, depth: int, rank: int | None) -> None:
        """At `depth` (from 0) this rank was right; None: no rank was."""
        with self._lock:
            self._trials[depth] = FADE * self._trials[depth] + 1
            hits = self._hits[depth] = [FADE * hit for hit in self._hits[depth]]
            if rank is not None:
                hits[rank] += 1
            self._learned += 1
            if self._learned % KEPT == 0:
                self._trees = {}

    def tree(self, nodes: int, depth: int) -> list[Node]:
        """The best `nodes` nodes at most `depth` deep; node 0 is the root, the first of the list is node 1. A plan for
        no more nodes than its depth is for a chain. The likeliest path comes first: nothing is moved if it is accepted.
        """
        depth = min(depth, self.depth)
        if nodes <= depth:
            return [(index, index, 0) for index in range(nodes)]
        if depth < 1:
            return []
        trees = self._trees  # `learn` puts another dict in its place
        if (nodes, depth) not in trees:
            trees[nodes, depth] = self._best(nodes, depth)
        return trees[nodes, depth]

    def _best(self, nodes: int, depth: int) -> list[Node]:
        paths = likeliest_paths(self.chances()[:depth], nodes)
        index = {(): 0} | {path: node for node, path in enumerate(sorted(paths), 1)}
        return [(index[path[:-1]], len(path) - 1, path[-1]) for path in index if path]


def likeliest_paths(chances: Sequence[Sequence[float]], nodes: int) -> list[Path]:
    """The `nodes` likeliest nodes of a tree, the likeliest first, each as the ranks on its way from the root.

    chances[depth][rank]: how often this rank is right where all above it are. A node's chance is the product on its
    way; nodes without a chance are left out. A node comes after its parent.
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
