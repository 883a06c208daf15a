"""A tree of drafted tokens that grows node by node, and children that are sampled.

How many children a node gets never depends on the token of the next child; otherwise the output's distribution would
change.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import torch
from torch import Tensor


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


def draw_children(
    trees: list[GrowingTree],
    frontier: list[list[int]],
    probs: Tensor,
    counts: list[int],
    generator: torch.Generator | None,
) -> list[list[int]]:
    """Sample children of the newest level's nodes without replacement, and add them to the trees.

    Children go to the nodes where acceptance is likeliest.

    Sorting p / Exp(1) gives a sequence of draws without replacement. Whether a node gets one more child depends only on
    its earlier children.

    Args:
        frontier: For each batch row, the newest level's nodes.
        probs: (B, L, V), distributions of their children.
        counts: For each row, how many children to add in all.

    Returns:
        For each row, the new nodes.
    """
    most = min(max(counts), probs.shape[-1])
    noise = torch.empty_like(probs).exponential_(generator=generator)
    tokens = (probs / noise).topk(most, dim=-1).indices  # shape (B, L, most)
    chances = probs.gather(-1, tokens).tolist()
    following = []
    for tree, nodes, ids, mass, count in zip(trees, frontier, tokens.tolist(), chances, counts, strict=True):
        added: list[int] = []
        # heap of possible draws: (-chance that the verifier tries it, index of the node, number of the draw at the
        # node, probability mass that earlier draws at the node have left)
        heap = [(-tree.values[node], index, 0, 1.0) for index, node in enumerate(nodes)]
        heapq.heapify(heap)
        while heap and len(added) < count:
            reached, index, number, remaining = heapq.heappop(heap)
            chance = mass[index][number]
            if chance <= 0:
                continue
            share = min(1.0, chance / remaining) if remaining > 0 else 1.0
            added.append(tree.add(nodes[index], ids[index][number], -reached * share))
            if number + 1 < most:
                heapq.heappush(heap, (reached * (1 - share), index, number + 1, remaining - chance))
        following.append(added)
    return following


def child_distributions(
    probs: Tensor, columns: list[dict[int, int]], chosen: list[list[int]], vocab_size: int
) -> Tensor:
    """Return the distributions (B, N, vocab_size) from which the drafted nodes' children were sampled.

    Nodes without children have 0.

    Args:
        probs: (B, M, V), all distributions.
        columns: For each row: node -> its index among the M.
        chosen: For each row, the drafted nodes without the root.
        vocab_size: The target's, at least V; the rest is 0.
    """
    batch, count, size = probs.shape
    padded = torch.nn.functional.pad(probs, (0, max(vocab_size - size, 0), 0, 1))
    width = 1 + max(map(len, chosen))
    index = [
        [indices.get(node, count) for node in (0, *nodes)] + [count] * (width - 1 - len(nodes))
        for indices, nodes in zip(columns, chosen, strict=True)
    ]
    rows = torch.arange(batch, device=probs.device)[:, None]
    return padded[rows, torch.tensor(index, device=probs.device)]
