"""Tests the budget on chains that end when the drafter is unsure, in simulations with noisy times."""

from __future__ import annotations

import random

import pytest

from mmdec.core.budget import Budget, RoundCosts
from mmdec.core.statistics import DecodingStatistics, MeasurementKey
from tests.unit.core.simulated_run import cliff, median, tiny


def speed_of_chains(may_stop_early: bool, seed: int, honest: bool = True, batch: int = 1) -> float:
    """Tokens a second against plain decoding, of a drafter whose next token is right in 97 or in 45 of a hundred cases
    and which knows in which; dishonest: it is always wrong, and sure of itself."""
    key = MeasurementKey("model", "cpu", "drafter")
    rng, budget = random.Random(seed), Budget(DecodingStatistics(), key, (), may_stop_early)
    seconds = tokens = 0.0
    while tokens < 1500:
        plan = budget.plan(batch)
        assert plan.threshold <= 0.6
        assert not plan.threshold or (may_stop_early and plan.nodes == plan.depth)
        sure, accepted, right, drafted = [1.0] * batch, [0] * batch, [honest] * batch, 0
        while drafted < plan.nodes and (drafted == 0 or sum(sure) / batch >= plan.threshold):
            drafted += 1
            for row in range(batch):
                probability = rng.choice((0.97, 0.97, 0.45))
                sure[row] *= probability if honest else 0.97
                right[row] = right[row] and rng.random() < probability
                accepted[row] += right[row] and drafted <= plan.depth
        target, draft = tiny(drafted + 1) + 0.05 * drafted, 0.06 * min(drafted, plan.depth)
        seconds, tokens = seconds + target + draft, tokens + 1 + sum(accepted) / batch
        clocks = [value * (1 + abs(rng.gauss(0, 0.2))) for value in (target, draft)]
        budget.observe(RoundCosts(batch, [drafted + 1] * batch, min(drafted, plan.depth), accepted, *clocks))
    return tokens * tiny(1) / seconds


@pytest.mark.parametrize(("batch", "least"), [(1, 1.08), (4, 1.02), (8, 1.0)])
def test_chains_that_end_where_the_drafter_is_not_sure_are_faster(batch: int, least: float) -> None:
    gains = []
    for seed in range(5):
        gains.append(speed_of_chains(True, seed, batch=batch) / speed_of_chains(False, seed, batch=batch))
    assert median(gains) > least


def test_a_drafter_that_is_falsely_sure_of_itself_costs_little() -> None:
    assert speed_of_chains(True, 0, honest=False) > 0.92


def test_a_drafter_that_ends_its_chains_drafts_more_from_its_second_draft_on() -> None:
    plans, budget = [], Budget(DecodingStatistics(), MeasurementKey("model", "cpu", "drafter"), (), True)
    for _ in range(4):
        plans.append(budget.plan(1))
        columns = 1 + plans[-1].nodes
        budget.observe(RoundCosts(1, [columns], plans[-1].depth, [plans[-1].depth], tiny(columns), 0.01))
    assert [plan.nodes for plan in plans] == [0, 0, 1, 7]


@pytest.mark.parametrize(("price", "least", "most"), [(0.001, 50, 60), (0.2, 3, 20)])
def test_a_drafter_that_takes_no_time_is_asked_while_its_drafts_do_not_pay(price: float, least: int, most: int) -> None:
    """Such a drafter drafts where it expects to gain the cost of a second column; one that takes time drafts rarely."""
    budget, plans = Budget(DecodingStatistics(), MeasurementKey("model", "cpu", "drafter"), (), True), []
    for _ in range(60):
        plans.append(plan := budget.plan(1))
        drafted = plan.nodes if plan.min_expected_accepted < 0.6 else 0  # it expects 0.6 tokens, and is always wrong
        budget.observe(RoundCosts(1, [drafted + 1], drafted, [0], cliff(drafted + 1), price * bool(plan.nodes)))
    assert least <= sum(plan.nodes > 0 for plan in plans) <= most
    # two columns take 1.7 times what one takes
    assert {round(plan.min_expected_accepted, 1) for plan in plans[20:]} <= {0.0, 0.7}


WHISPER_BASE = (13.5, 13.5, 17.8, 18.8, 21.4, 22.2, 23.7, 25.2, 25.6, 25.9, 26.3, 26.6)  # milliseconds, 1 to 12 columns


def rates(seed: int, rounds: int) -> list[tuple[float, float]]:
    """Return (tokens, milliseconds) of a first run: whisper-base's passes, a head that knows its acceptance."""
    rng, run = random.Random(seed), list[tuple[float, float]]()
    budget = Budget(DecodingStatistics(), MeasurementKey("model", "cpu", "drafter"), (), True)
    for _ in range(rounds):
        plan, sure, drafted, accepted = budget.plan(1), 1.0, 0, 0
        while drafted < min(plan.nodes, len(WHISPER_BASE) - 1):
            probability = rng.choice((0.95, 0.9, 0.5, 0.3))
            sure *= probability
            if sure < plan.threshold:
                break
            accepted += accepted == drafted and rng.random() < probability
            drafted += 1
        cost = WHISPER_BASE[drafted], (1.0 + 0.1 * drafted) * bool(plan.nodes)
        run.append((1.0 + accepted, sum(cost)))
        clocks = [value * (1 + abs(rng.gauss(0, 0.2))) / 1000 for value in cost]
        budget.observe(RoundCosts(1, [drafted + 1], drafted, [accepted], *clocks))
    return run


def test_twenty_rounds_are_enough_to_learn() -> None:
    """From then on a first run is as fast as after two hundred."""

    def rate(runs: list[list[tuple[float, float]]], begin: int, end: int) -> float:
        tokens, seconds = (sum(pair[at] for run in runs for pair in run[begin:end]) for at in (0, 1))
        return tokens / seconds

    runs = [rates(seed, 300) for seed in range(30)]
    assert rate(runs, 20, 40) > 0.95 * rate(runs, 200, 300)
    assert rate(runs, 0, 20) > 0.8 * rate(runs, 200, 300)
