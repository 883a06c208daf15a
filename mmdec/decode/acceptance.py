"""How often a drafter's nodes are accepted: the chance of each node of a chain, the mean of each tree.

A drafter may end a chain early where it is not sure (`Plan.threshold`). The chances of its nodes are then those of
sure ones; what such a chain gives is counted by itself: how often node i is drafted, and how often accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from mmdec.types import Plan

DEEPEST = 31  # nodes of the longest chain
FADE = 0.95  # weight of the past when a round is added
SLOW = 0.98  # the same for chains that end early: what they follow closely need not be forgotten fast
UNKNOWN = 0.6  # chance of a node of which nothing is known
CHAIN_GAP = 6  # rounds of trees until a chain is tried again, at first
PRIOR_WEIGHT = 2.0  # rounds that a chance known beforehand counts for


@final
class Acceptance:
    """What became of the nodes of one drafter with one target. Recent rounds weigh more."""

    def __init__(self, prior: Sequence[float] = ()) -> None:
        """prior: p_1, p_2, ... as known beforehand, and no node below the last; empty where nothing is known."""
        self.prior = list(prior)[:DEEPEST]
        self.hits = [0.0] * (DEEPEST + 1)  # node i of a chain accepted, per row
        self.trials = [0.0] * (DEEPEST + 1)  # node i - 1 accepted, so that node i could be
        # Of chains that may end early, by node: rounds in which it was within the plan, in which it was accepted (a
        # row's share); rounds of these with a draft, in which it was drafted.
        self.ending = [[0.0] * (DEEPEST + 1) for _ in range(4)]
        self.trees: dict[tuple[int, int], tuple[float, float]] = {}  # nodes, depth -> weight, accepted nodes
        self.of_trees = (0.0, 0.0)  # accepted nodes of all trees, and how many were expected from the chances of chains
        self.offered = 1.0  # share of the rounds asked in which a draft came
        self.chains_only = 0  # tree plans that brought a chain; -1 once a tree was seen
        self.since_chain = 0  # rounds of trees since the last chain
        self.chain_gap = CHAIN_GAP  # such rounds after which a chain is tried again; more each time
        self.gap = 1  # rounds between attempts while drafting does not pay

    def chain(self, deepest: int = DEEPEST) -> list[float]:
        """p_i for i = 1, 2, ... `deepest`; of a depth never reached the prior's, or else that of the depth above."""
        chances: list[float] = []
        before = UNKNOWN
        for i in range(1, deepest + 1):
            if self.prior:
                before = self.prior[i - 1] if i <= len(self.prior) else 0.0
            chance = (self.hits[i] + PRIOR_WEIGHT * before) / (self.trials[i] + PRIOR_WEIGHT)
            chances.append(chance)
            before = chance if i > 1 else max(chance, UNKNOWN)  # node 1 also fails where there is nothing to say
        return chances

    def ending_chains(self, chances: Sequence[float]) -> tuple[list[float], list[float]]:
        """Expected drafted and expected accepted nodes of chains of at most 1, 2, ... nodes that may end early.
        chances: those of `chain`. A depth never reached is drafted as often as the depth above, and accepted by its
        chance."""
        drafted: list[float] = []
        accepted: list[float] = []
        nodes = gain = 0.0
        share = hit = 1.0
        for i, chance in enumerate(chances, 1):
            rounds, hits, drafts, reached = (row[i] for row in self.ending)
            share = (reached + PRIOR_WEIGHT * share) / (drafts + PRIOR_WEIGHT)
            hit = (hits + PRIOR_WEIGHT * hit * chance) / (rounds + PRIOR_WEIGHT)
            nodes, gain = nodes + share, gain + hit
            drafted.append(nodes)
            accepted.append(gain)
        return drafted, accepted

    def tree(self, nodes: int, depth: int, chances: Sequence[float]) -> float:
        """Expected accepted nodes; of a tree not yet tried what the chances predict, corrected by how far such
        predictions held."""
        weight, accepted = self.trees.get((nodes, depth), (0.0, 0.0))
        accepted_in_all, expected_in_all = self.of_trees
        trust = min(1.0, (accepted_in_all + 1) / (expected_in_all + 1))
        guess = expected_in_tree(nodes, depth, chances)
        return (accepted + PRIOR_WEIGHT * trust * guess) / (weight + PRIOR_WEIGHT)

    def learn(self, plan: Plan, sizes: Sequence[int], depth: int, accepted: Sequence[int], ends: bool = False) -> None:
        """Add a round: each row's nodes, root included; the draft's depth; each row's accepted nodes, root excluded.
        ends: whether the drafter ends chains early."""
        rows, longest = len(sizes), max(sizes)
        self.offered = FADE * self.offered + (1 - FADE) * (longest > 1)
        is_chain = depth >= longest - 1
        if plan.nodes > plan.depth:
            if longest > 2 and self.chains_only >= 0:
                self.chains_only = self.chains_only + 1 if is_chain else -1
            weight, total = self.trees.get((plan.nodes, plan.depth), (0.0, 0.0))
            mean = sum(accepted) / rows
            self.trees[plan.nodes, plan.depth] = (FADE * weight + 1, FADE * total + mean)
            accepted_in_all, expected_in_all = self.of_trees
            expected = expected_in_tree(plan.nodes, plan.depth, self.chain(min(plan.depth, DEEPEST)))
            self.of_trees = (FADE * accepted_in_all + mean, FADE * expected_in_all + expected)
        self.since_chain = 0 if is_chain else self.since_chain + 1
        if ends and plan.nodes == plan.depth:
            for i in range(1, min(plan.depth, DEEPEST) + 1):
                values = 1.0, sum(n >= i for n in accepted) / rows, float(longest > 1), float(longest > i)
                for row, value in zip(self.ending, values, strict=True):
                    row[i] = SLOW * row[i] + value
        if is_chain:
            for i in range(1, min(plan.depth, len(self.hits) - 1) + 1):
                # A shorter draft than planned says nothing of what it lacks; no draft at all is a miss.
                able = sum(n >= i - 1 and (size > i or size == i == 1) for n, size in zip(accepted, sizes, strict=True))
                if not able:
                    break
                self.hits[i] = FADE * self.hits[i] + sum(n >= i for n in accepted) / rows
                self.trials[i] = FADE * self.trials[i] + able / rows


def expected_in_tree(nodes: int, depth: int, chances: Sequence[float]) -> float:
    """Accepted nodes of a tree, from a chain's chances: w nodes side by side miss as often as one, over the root of w.

    So it was in a comparison of 1, 2, 4 and 8 likeliest children: misses of 0.43, 0.30, 0.22 and 0.16.
    """
    miss = (depth / nodes) ** 0.5
    expected, alive = 0.0, 1.0
    for chance in chances[:depth]:
        alive *= 1 - (1 - chance) * miss
        expected += alive
    return expected
