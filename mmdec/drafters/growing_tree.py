"""A tree of drafted tokens that grows node by node, and trees whose nodes are sampled.

How many children a node of a sampled tree gets must not depend on the next child: the output's distribution would
change. Here the whole shape is chosen before any token is drawn. Shapes that followed the drafter's probabilities
were accepted less often.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from mmdec.core.tree import trees_from_lists
from mmdec.core.tree_shape import Path, likeliest_paths
from mmdec.types import Draft, Plan

ASSUMED_ACCEPTANCE = 0.6  # probability that a drawn token is accepted, for the shape of sampled trees


@dataclass
class GrowingTree:
    """One row's draft while it grows: token, parent and value of each node.

    Node 0 is the root, and a parent comes before its children.
    """

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    # log-probability of the path to each node; 0 in sampled trees
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
        """Return the draft that consists of the root and `nodes`.

        It has the tokens of `nodes`, and for each node the index of its parent in `nodes`, counted from 1; 0 is the
        root.
        """
        indices = {0: 0} | {node: index for index, node in enumerate(nodes, 1)}
        return [self.tokens[node] for node in nodes], [indices[self.parents[node]] for node in nodes]


@cache
def sampled_shape(nodes: int, depth: int) -> Counter[Path]:
    """Return the shape of sampled trees: for each node, named by the ranks along its path, its number of children.

    Args:
        nodes: Maximum number of nodes below the root.
        depth: Maximum depth. If `nodes` is at most `depth`, the shape is a chain.
    """
    siblings = 1 if nodes <= depth else nodes
    probabilities = [ASSUMED_ACCEPTANCE * (1 - ASSUMED_ACCEPTANCE) ** rank for rank in range(siblings)]
    return Counter(path[:-1] for path in likeliest_paths([probabilities] * depth, nodes))


class SampledTrees:
    """The drafts of a batch while their nodes are drawn, level by level, without replacement.

    Their shape is chosen before any token is drawn. A node gets fewer children if its distribution has fewer tokens.

    Args:
        roots: (B,), each row's last token.
        plan: The plan, whose `warp` gives the distributions that children are drawn from.
        depth: Maximum depth.
        vocab_size: The target's vocabulary size.
    """

    def __init__(self, roots: Tensor, plan: Plan, depth: int, vocab_size: int) -> None:
        assert plan.warp is not None
        self.trees = [GrowingTree([root]) for root in roots.tolist()]
        # for each row, the newest level's nodes that get children, and the ranks along the path to each
        self.frontier = [[0] for _ in self.trees]
        self._ranks: list[list[Path]] = [[()] for _ in self.trees]
        self._shape = sampled_shape(plan.nodes, depth)
        self._roots, self._vocab_size, self._warp, self._generator = roots, vocab_size, plan.warp, plan.generator
        self._probs: list[Tensor] = []  # for each level: (B, L, V), the distributions of the children of its L nodes
        # for each row: node -> index of its distribution, those of all levels joined
        self._columns: list[dict[int, int]] = [{} for _ in self.trees]

    def grow(self, logits: Tensor) -> list[list[int]]:
        """Draw children of the frontier's nodes, and move on to the next frontier.

        Sorting p / Exp(1) gives a sequence of draws without replacement.

        Args:
            logits: (B, L, at most V), the drafter's logits after the frontier's nodes.

        Returns:
            The next frontier.
        """
        logits = torch.nn.functional.pad(logits, (0, self._vocab_size - logits.shape[-1]), value=-math.inf)
        rows = list(zip(self.trees, self.frontier, self._ranks, strict=True))
        probs = self._warp(logits, [[tree.path(node) for node in nodes] for tree, nodes, _ in rows])
        offset = sum(level.shape[1] for level in self._probs)
        self._probs.append(probs)
        noise = torch.empty_like(probs).exponential_(generator=self._generator)
        max_children = min(max(self._shape[path] for _, _, paths in rows for path in paths), self._vocab_size)
        tokens = (probs / noise).topk(max_children, dim=-1).indices  # shape (B, L, max_children)
        probabilities, ids = probs.gather(-1, tokens).tolist(), tokens.tolist()
        for row, (tree, nodes, paths) in enumerate(rows):
            self.frontier[row], self._ranks[row] = [], []
            for index, (node, path) in enumerate(zip(nodes, paths, strict=True)):
                self._columns[row][node] = offset + index
                for rank in range(min(self._shape[path], max_children)):
                    if probabilities[row][index][rank] <= 0:  # the distribution has no further tokens
                        break
                    child = tree.add(node, ids[row][index][rank], 0.0)
                    if (*path, rank) in self._shape:
                        self.frontier[row].append(child)
                        self._ranks[row].append((*path, rank))
        return self.frontier

    def draft(self) -> Draft:
        """Return the trees, with the distributions that the children of each node were drawn from."""
        nodes = [tree.best(len(tree.tokens)) for tree in self.trees]
        probs = torch.nn.functional.pad(torch.cat(self._probs, 1), (0, 0, 0, 1))  # zeros for nodes without children
        zeros, width = probs.shape[1] - 1, 1 + max(map(len, nodes))
        index = [
            [columns.get(node, zeros) for node in (0, *row)] + [zeros] * (width - 1 - len(row))
            for columns, row in zip(self._columns, nodes, strict=True)
        ]
        rows = torch.arange(len(nodes), device=probs.device)[:, None]
        parts = [tree.part(row) for tree, row in zip(self.trees, nodes, strict=True)]
        return trees_from_lists(self._roots, parts, probs[rows, torch.tensor(index, device=probs.device)])
