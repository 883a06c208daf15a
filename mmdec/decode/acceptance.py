"""How often a drafter's nodes are accepted: a chance for each node of a chain, a mean for each tree size.

A drafter may end a chain early where it is unsure (`Plan.threshold`). The chances then hold only for nodes that were
drafted; how often such chains reach node i, and how often it is accepted, is counted separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from mmdec.types import Plan

DEEPEST = 31  # maximum nodes of a chain
FADE = 0.95  # per round, the weight of earlier rounds decays by this factor
SLOW = 0.98  # the same for chains that end early: their statistics change little, so old rounds stay useful
UNKNOWN = 0.6  # assumed chance of a node without any observation
CHAIN_GAP = 6  # first interval, in rounds of trees, between two trial chains
PRIOR_WEIGHT = 2.0  # the prior counts as so many rounds


@final
class Acceptance:
    """Acceptance statistics of one drafter with one target. Recent rounds weigh more."""

    def __init__(self, prior: Sequence[float] = ()) -> None:
        """prior: acceptance chances p_1, p_2, ... in [0, 1], and 0 beyond the last; empty if unknown."""
        self.prior = list(prior)[:DEEPEST]
        self.hits = [0.0] * (DEEPEST + 1)  # [i]: how often node i of a chain was accepted, per row
        self.trials = [0.0] * (DEEPEST + 1)  # [i]: how often node i - 1 was accepted, so that node i was tried
        # Four counts for chains that may end early, by node i: rounds whose plan included node i; those in which it was
        # accepted (share of the rows); such rounds with a draft; those in which node i was drafted.
        self.ending = [[0.0] * (DEEPEST + 1) for _ in range(4)]
        # (nodes, depth) -> (weight, weighted accepted nodes)
        self.trees: dict[tuple[int, int], tuple[float, float]] = {}
        self.of_trees = (0.0, 0.0)  # (accepted nodes of all trees, the number predicted from chances of chains)
        self.offered = 1.0  # share of rounds in which the drafter returned a draft when asked
        self.chains_only = 0  # how many tree plans were answered by a chain; -1 after the first real tree
        self.since_chain = 0  # rounds of trees since the last chain
        self.chain_gap = CHAIN_GAP  # rounds of trees until the next trial chain; grows each time
        self.gap = 1  # rounds between attempts to draft while drafting does not pay

    def chain(self, deepest: int = DEEPEST) -> list[float]:
        """Acceptance chances p_i of nodes i = 1 .. `deepest`. An unobserved depth has the prior's, else that of depth i
        - 1."""
        chances: list[float] = []
        before = UNKNOWN
        for i in range(1, deepest + 1):
            if self.prior:
                before = self.prior[i - 1] if i <= len(self.prior) else 0.0
            chance = (self.hits[i] + PRIOR_WEIGHT * before) / (self.trials[i] + PRIOR_WEIGHT)
            chances.append(chance)
            # node 1 is also rejected if the drafter proposes nothing, so its chance does not predict later nodes
            before = chance if i > 1 else max(chance, UNKNOWN)
        return chances

    def ending_chains(self, chances: Sequence[float]) -> tuple[list[float], list[float]]:
        """Expected drafted and accepted nodes of chains that may end early, for maximum lengths 1, 2, ...

        chances: from `chain`. An unobserved depth is assumed to be drafted as often as the depth above, and accepted by
            its chance.
        Returns: two lists, each with one number per maximum length.
        """
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
        """Expected accepted nodes of a tree.

        For an untried tree size: the prediction from `chances`, scaled by the ratio of accepted to predicted nodes so
        far.
        """
        weight, accepted = self.trees.get((nodes, depth), (0.0, 0.0))
        accepted_in_all, expected_in_all = self.of_trees
        trust = min(1.0, (accepted_in_all + 1) / (expected_in_all + 1))
        guess = expected_in_tree(nodes, depth, chances)
        return (accepted + PRIOR_WEIGHT * trust * guess) / (weight + PRIOR_WEIGHT)

    def learn(self, plan: Plan, sizes: Sequence[int], depth: int, accepted: Sequence[int], ends: bool = False) -> None:
        """Add one round.

        plan: what was asked for. sizes: nodes of each row's draft, root included. depth: of the deepest node.
        accepted: accepted nodes of each row, root excluded. ends: whether the drafter may end chains early.
        """
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
                # A node that was planned but not drafted counts neither way. A round without any draft counts as a
                # miss.
                able = sum(n >= i - 1 and (size > i or size == i == 1) for n, size in zip(accepted, sizes, strict=True))
                if not able:
                    break
                self.hits[i] = FADE * self.hits[i] + sum(n >= i for n in accepted) / rows
                self.trials[i] = FADE * self.trials[i] + able / rows


def expected_in_tree(nodes: int, depth: int, chances: Sequence[float]) -> float:
    """Predict a tree's accepted nodes from a chain's chances.

    A level with w nodes is assumed to miss 1 / sqrt(w) times as often as one node. Measured for the 1, 2, 4 and 8
    likeliest
    children: misses of 0.43, 0.30, 0.22 and 0.16.
    """
    miss = (depth / nodes) ** 0.5
    expected, alive = 0.0, 1.0
    for chance in chances[:depth]:
        alive *= 1 - (1 - chance) * miss
        expected += alive
    return expected
