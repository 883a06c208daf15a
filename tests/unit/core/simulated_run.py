"""Simulated targets and drafters whose passes take a given time, to test the budget of drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mmdec.core.budget import Budget, RoundCosts
from mmdec.core.statistics import DecodingStatistics, MeasurementKey
from mmdec.types import Plan

Seconds = Callable[[int], float]  # columns of a pass -> its seconds
STATISTICS = DecodingStatistics()


def planner(
    target: str = "model", device: str = "cpu", drafter: str = "drafter", prior: Sequence[float] = ()
) -> Budget:
    """Make the budget of one run. What it learns is shared with later runs, in `STATISTICS`."""
    return Budget(STATISTICS, MeasurementKey(target, device, drafter), prior)


def cliff(columns: int) -> float:
    """Return the seconds of a pass of a large model on a CPU, which is much faster for one column than for two."""
    return 1.0 if columns == 1 else 1.7 if columns == 2 else 1.55 + 0.06 * (columns - 3)


def steep(columns: int) -> float:
    """Return the seconds of a pass that grow with each column."""
    return 0.5 + 0.5 * columns


def tiny(columns: int) -> float:
    """Return the seconds of a pass that hardly depend on the columns."""
    return 1 + 0.015 * (columns - 1)


@dataclass
class Run:
    """A simulated decoding run."""

    target: Seconds
    price: float = 0.0  # drafter's seconds for each level of the draft
    probability: float = 0.0  # probability that a node of a chain is accepted
    offers: float = 1.0  # share of the rounds in which there is a draft
    trees: bool = False  # whether the drafter makes trees; else chains
    noise: float = 0.3  # relative noise of the measured seconds
    seed: int = 0
    prior: tuple[float, ...] = ()  # the budget's prior for this drafter
    plans: list[Plan] = field(default_factory=list)  # the plan of each round
    seconds: float = 0.0  # all seconds so far, without noise

    def speed(self, tokens: int = 100, batch: int = 1, name: str = "drafter") -> float:
        """Simulate decoding of `tokens` tokens. Returns how many times faster than plain decoding it was."""
        rng, budget, done = random.Random(self.seed), planner(drafter=name, prior=self.prior), 0.0
        while done < tokens:
            plan = budget.plan(batch)
            self.plans.append(plan)
            sizes, accepted = [], []
            for _ in range(batch):
                nodes = plan.nodes if self.trees else plan.depth
                nodes *= rng.random() < self.offers
                miss = (
                    (1 - self.probability) * (plan.depth / nodes if nodes else 1.0) ** 0.5 if self.probability else 1.0
                )
                count = 0
                while nodes and count < plan.depth and rng.random() >= miss:
                    count += 1
                sizes.append(1 + nodes)
                accepted.append(count)
            target, draft = self.target(max(sizes)), self.price * plan.depth
            self.seconds += target + draft
            done += 1 + sum(accepted) / batch
            depth = plan.depth if max(sizes) > 1 else 0
            clocks = [seconds * (1 + abs(rng.gauss(0, self.noise))) for seconds in (target, draft)]
            if self.noise and rng.random() < 0.05:
                clocks[0] *= 4
            budget.observe(RoundCosts(batch, sizes, depth, accepted, *clocks))
        return done * self.target(1) / self.seconds


def median(speeds: list[float]) -> float:
    return sorted(speeds)[len(speeds) // 2]
