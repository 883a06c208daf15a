"""Targets and drafters of simulated clocks, for the budget."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mmdec.decode.budget import Budget
from mmdec.decode.statistics import DecodingStatistics, Pair
from mmdec.types import Plan

Seconds = Callable[[int], float]
STATISTICS = DecodingStatistics()


def planner(
    target: str = "model", device: str = "cpu", drafter: str = "drafter", prior: Sequence[float] = ()
) -> Budget:
    """For one run; what it learns is for those that follow."""
    return Budget(STATISTICS, Pair(target, device, drafter), prior)


def cliff(columns: int) -> float:
    """Large models on a CPU: matrix times vector is another routine than matrix times matrix."""
    return 1.0 if columns == 1 else 1.7 if columns == 2 else 1.55 + 0.06 * (columns - 3)


def steep(columns: int) -> float:
    """No two columns share anything."""
    return 0.5 + 0.5 * columns


def tiny(columns: int) -> float:
    """Overhead is all."""
    return 1 + 0.015 * (columns - 1)


@dataclass
class Run:
    """Tokens, and the seconds that they took, of a simulated run."""

    target: Seconds
    price: float = 0.0  # seconds of a layer of the draft
    chance: float = 0.0  # of a node in a chain
    offers: float = 1.0  # share of the rounds in which there is a draft
    trees: bool = False  # whether the drafter can make them
    noise: float = 0.3
    seed: int = 0
    prior: tuple[float, ...] = ()  # what is known of the drafter beforehand
    plans: list[Plan] = field(default_factory=list)
    seconds: float = 0.0

    def speed(self, tokens: int = 100, batch: int = 1, name: str = "drafter") -> float:
        """Against plain decoding."""
        dice, budget, done = random.Random(self.seed), planner(drafter=name, prior=self.prior), 0.0
        while done < tokens:
            plan = budget.plan(batch)
            self.plans.append(plan)
            sizes, accepted = [], []
            for _ in range(batch):
                nodes = plan.nodes if self.trees else plan.depth
                nodes *= dice.random() < self.offers
                miss = (1 - self.chance) * (plan.depth / nodes if nodes else 1.0) ** 0.5 if self.chance else 1.0
                count = 0
                while nodes and count < plan.depth and dice.random() >= miss:
                    count += 1
                sizes.append(1 + nodes)
                accepted.append(count)
            target, draft = self.target(max(sizes)), self.price * plan.depth
            self.seconds += target + draft
            done += 1 + sum(accepted) / batch
            depth = plan.depth if max(sizes) > 1 else 0
            clocks = [seconds * (1 + abs(dice.gauss(0, self.noise))) for seconds in (target, draft)]
            if self.noise and dice.random() < 0.05:
                clocks[0] *= 4
            budget.observe(batch, sizes, depth, accepted, *clocks)
        return done * self.target(1) / self.seconds


def median(speeds: list[float]) -> float:
    return sorted(speeds)[len(speeds) // 2]
