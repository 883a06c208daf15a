"""A tree of drafted tokens that grows node by node, and children that are sampled.

How many children a node gets never depends on the token of the next child; otherwise the output's distribution would
change.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmdec.core.tree import trees_from_lists
from mmdec.types import Draft, Plan


@dataclass
class GrowingTree:
    """One row's draft while it grows: token, parent and value of each node.

    Node 0 is the root, and a parent comes before its children.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    # log-probability of the path to the node; in a sampled tree, the estimated chance that this path is accepted
    values: list[float] = field(default_factory=lambda: [0.0])

    def add(self, parent: int, token: int, value: float) -> int:
        self.tokens.append(token)
        self.parents.append(parent)
        self.values.append(value)
        return len(self.tokens) - 1

    def path(self, node: int) -> list[int]:
        """Return the tokens from the root's child down to a node."""
        tokens: list[int] = []
        while node:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def best(self, count: int) -> list[int]:
        """Return the `count` nodes with the highest values, without the root, depth first.

        Of equal values the earlier node is taken.

        Each node's parent is in the result, because a child's value is at most its parent's.
        """
        best = set(sorted(range(1, len(self.tokens)), key=lambda node: -self.values[node])[:count])
        below: list[list[int]] = [[] for _ in self.tokens]
        for node in sorted(best, reverse=True):
            below[self.parents[node]].append(node)
        order, stack = [], below[0]
        while stack:
            node = stack.pop()
            order.append(node)
            stack += below[node]
        return order

    def part(self, nodes: list[int]) -> tuple[list[int], list[int]]:
        """Return the draft that consists of the root and `nodes`: the tokens of `nodes`, and for each node the index of
        its parent in `nodes`, counted from 1; 0 is the root."""
        indices = {0: 0} | {node: index for index, node in enumerate(nodes, 1)}
        return [self.tokens[node] for node in nodes], [indices[self.parents[node]] for node in nodes]


class SampledTrees:
    """The drafts of a batch while their nodes are drawn, level by level, without replacement.

    Children go to the nodes where acceptance is likeliest.

    Args:
        roots: (B,), each row's last token.
        plan: Its `warp` gives the distributions that children are drawn from.
        depth: Maximum number of levels.
        vocab_size: The target's.
    """

    def __init__(self, roots: Tensor, plan: Plan, depth: int, vocab_size: int) -> None:
        assert plan.warp is not None
        self.trees = [GrowingTree([root], values=[1.0]) for root in roots.tolist()]
        self.frontier = [[0] for _ in self.trees]  # for each row, the newest level's nodes
        self._roots, self._nodes, self._levels, self._vocab_size = roots, plan.nodes, depth, vocab_size
        self._warp, self._generator = plan.warp, plan.generator
        self._probs: list[Tensor] = []  # for each level: (B, L, V), the distributions of the children of its L nodes
        # for each row: node -> index of its distribution, those of all levels joined
        self._columns: list[dict[int, int]] = [{} for _ in self.trees]

    def grow(self, logits: Tensor) -> list[list[int]]:
        """Draw children of the newest level's nodes; they are the next `frontier`.

        Sorting p / Exp(1) gives a sequence of draws without replacement. Whether a node gets one more child depends
        only on its earlier children.

        Args:
            logits: (B, L, at most V), the drafter's logits after these nodes.

        Returns:
            For each row, the new nodes.
        """
        logits = torch.nn.functional.pad(logits, (0, self._vocab_size - logits.shape[-1]), value=-math.inf)
        rows = list(zip(self.trees, self.frontier, strict=True))
        probs = self._warp(logits, [[tree.path(node) for node in nodes] for tree, nodes in rows])
        offset = sum(level.shape[1] for level in self._probs)
        self._probs.append(probs)
        for columns, nodes in zip(self._columns, self.frontier, strict=True):
            columns.update((node, offset + index) for index, node in enumerate(nodes))
        counts = [-(-(self._nodes + 1 - len(tree.tokens)) // self._levels) for tree in self.trees]
        self._levels -= 1
        most = min(max(counts), self._vocab_size)
        noise = torch.empty_like(probs).exponential_(generator=self._generator)
        tokens = (probs / noise).topk(most, dim=-1).indices  # shape (B, L, most)
        chances = probs.gather(-1, tokens).tolist()
        self.frontier = []
        for (tree, nodes), ids, mass, count in zip(rows, tokens.tolist(), chances, counts, strict=True):
            added: list[int] = []
            # heap of possible draws: (-chance that the verifier tries it, index of the node, number of the draw at the
            # node, probability mass that earlier draws at the node have left)
            heap = [(-tree.values[node], index, 0, 1.0) for index, node in enumerate(nodes)]
            heapq.heapify(heap)
            while heap and len(added) < count:
                reached, index, number, remaining = heapq.heappop(heap)
                chance = mass[index][number]
                if chance <= 0:  # the distribution has no further tokens
                    continue
                share = min(1.0, chance / remaining) if remaining > 0 else 1.0
                added.append(tree.add(nodes[index], ids[index][number], -reached * share))
                if number + 1 < most:
                    heapq.heappush(heap, (reached * (1 - share), index, number + 1, remaining - chance))
            self.frontier.append(added)
        return self.frontier

    def draft(self) -> Draft:
        """Return the trees, with the distributions that the children of each node were drawn from."""
        best = [tree.best(self._nodes) for tree in self.trees]
        probs = torch.nn.functional.pad(torch.cat(self._probs, 1), (0, 0, 0, 1))  # zeros for nodes without children
        zeros, width = probs.shape[1] - 1, 1 + max(map(len, best))
        index = [
            [columns.get(node, zeros) for node in (0, *nodes)] + [zeros] * (width - 1 - len(nodes))
            for columns, nodes in zip(self._columns, best, strict=True)
        ]
        rows = torch.arange(len(best), device=probs.device)[:, None]
        parts = [tree.part(nodes) for tree, nodes in zip(self.trees, best, strict=True)]
        return trees_from_lists(self._roots, parts, probs[rows, torch.tensor(index, device=probs.device)])
