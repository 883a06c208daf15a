"""Simulates decoding with heads on texts with known ranks: tokens per round, and the accuracy of each rank.

A text of n tokens, EOS included, is a matrix (n - 1, K). Row i stands for token i as the root. Its column k is head k's
rank of token i + k; `width` or more means that this token is not among the head's candidates. Rounds, trees and counts
are those of `drafters/medusa.py`: a depth counts as a trial only if all nodes above it were right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmdec.decode.tree import HeadAccuracy, Node
from mmdec.drafters.medusa import WIDTH, expected

ITERATIONS = 3  # a tree's shape depends on the accuracies, and these on the nodes that the tree reaches


@dataclass(frozen=True)
class Simulation:
    """Numbers of rounds and accepted tokens over all texts, without the prompts' passes, and hits of each rank."""

    tokens: int
    rounds: int
    hits: list[list[int]]  # (K, WIDTH)
    trials: list[int]  # (K,)

    @property
    def tokens_per_round(self) -> float:
        """New tokens in each target pass, the target's own token included."""
        return self.tokens / self.rounds if self.rounds else 1.0


def simulate(texts: Sequence[Tensor], tree: Sequence[Node], heads: int) -> Simulation:
    """Simulate decoding of texts, each (n - 1, K) ranks, with the same tree in all rounds."""
    children = {(parent, rank): node for node, (parent, _, rank) in enumerate(tree, 1)}
    hits, trials = [[0] * WIDTH for _ in range(heads)], [0] * heads
    tokens = rounds = 0
    for text in texts:
        rows: list[list[int]] = text.tolist()
        at = 0
        while at < len(rows):
            node, accepted, left = 0, 0, len(rows) - at
            while (child := children.get((node, rows[at][accepted]) if accepted < heads else (-1, 0))) is not None:
                node, accepted = child, accepted + 1
                if accepted == left:
                    break
            gained = min(accepted + 1, left)
            for depth in range(min(gained, heads, 1 + max((level for _, level, _ in tree), default=-1))):
                trials[depth] += 1
                if rows[at][depth] < WIDTH:
                    hits[depth][rows[at][depth]] += 1
            tokens, rounds, at = tokens + gained, rounds + 1, at + gained
    return Simulation(tokens, rounds, hits, trials)


def measure(texts: Sequence[Tensor], heads: int, nodes: int) -> tuple[float, float, list[list[float]]]:
    """Tokens per round of a chain of all heads and a tree of `nodes` nodes; the ranks' accuracies (K, WIDTH)."""
    chain = simulate(texts, HeadAccuracy(expected(heads)).tree(heads, heads), heads)
    chances, tree = estimate(chain), chain
    for _ in range(ITERATIONS if nodes > 0 else 0):
        tree = simulate(texts, HeadAccuracy(chances).tree(nodes, min(heads, max(nodes - 1, 1))), heads)
        chances = estimate(tree)
    return chain.tokens_per_round, tree.tokens_per_round, chances


def estimate(seen: Simulation) -> list[list[float]]:
    """Accuracies from counts. Each depth starts from the accuracies of the depth above, as if observed once."""
    guess = expected(1)[0]
    chances = []
    for hits, trials in zip(seen.hits, seen.trials, strict=True):
        guess = [(hit + before) / (trials + 1) for hit, before in zip(hits, guess, strict=True)]
        chances.append(guess)
    return chances


def spread(texts: Sequence[Tensor], head: int, ranks: Sequence[int]) -> list[float]:
    """How often a head's target is among its first r tokens, r in `ranks`, whatever earlier heads drafted."""
    seen = [rank for text in texts for rank in text[: len(text) - head, head].tolist()]
    return [sum(rank < limit for rank in seen) / max(len(seen), 1) for limit in ranks]


def gather_ranks(part: tuple[list[Tensor], dict[str, float]]) -> tuple[list[Tensor], dict[str, float]]:
    """Collect texts and sum counts over all processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return part
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, part)
    sums: dict[str, float] = {}
    for _, ranks in parts:
        for name, value in ranks.items():
            sums[name] = sums.get(name, 0.0) + value
    return [text for texts, _ in parts for text in texts], sums
