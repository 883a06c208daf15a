"""Tests the budget on simulated targets and drafters with noisy times."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from mmdec.core.budget import ALLOWANCE_PER_TOKEN, Budget, FixedBudget, RoundCosts
from mmdec.core.statistics import MeasurementKey
from mmdec.errors import InputError
from mmdec.types import Plan
from tests.unit.core.simulated_run import STATISTICS, Run, Seconds, cliff, median, planner, steep, tiny

# Speeds of runs, plain decoding being 1. A run of 100 tokens has an allowance of 4 passes for its tokens and of 1 or 2
# from the beginning, and the drafts that use it up may take 2 more: 8 passes in 100.
USELESS_DRAFTS = 0.92
USELESS_DRAFTS_BY_A_BAD_CLOCK = 0.9  # times that are four times too long in one round of twenty hide 3 more lost passes
RARE_ATTEMPTS = 0.98  # in 2000 tokens the allowance of the beginning does not count, and attempts become rare
NO_DRAFTS = 0.99  # a drafter that offers nothing takes hardly any time
# A run of 100 tokens that must time the passes first reaches this share of what later runs reach.
COLD_SHARE = 0.75


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    STATISTICS.clear()
    yield
    STATISTICS.clear()


@pytest.mark.parametrize("target", [cliff, tiny])
@pytest.mark.parametrize("price", [0.0, 0.02, 0.3, 3.0])
@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("prior", [(), (0.9,) * 8])
def test_a_useless_drafter_costs_little(target: Seconds, price: float, trees: bool, prior: tuple[float, ...]) -> None:
    quiet = Run(target, price, trees=trees, noise=0.0, prior=prior)
    assert quiet.speed() > USELESS_DRAFTS  # cold
    assert Run(target, price, trees=trees, noise=0.0, prior=prior).speed() > USELESS_DRAFTS  # and warm
    speeds = []
    for seed in range(9):
        STATISTICS.clear()
        speeds.append(Run(target, price, trees=trees, seed=seed, prior=prior).speed())
    assert median(speeds) > USELESS_DRAFTS
    assert min(speeds) > USELESS_DRAFTS_BY_A_BAD_CLOCK


def test_attempts_of_a_useless_drafter_become_rare() -> None:
    run = Run(cliff, 0.01, noise=0.0)
    assert run.speed(2000) > RARE_ATTEMPTS
    late = [plan for plan in run.plans[1000:] if plan.nodes]
    assert 1 <= len(late) <= 20


@pytest.mark.parametrize("target", [cliff, tiny])
def test_a_drafter_with_nothing_to_say_costs_nothing(target: Seconds) -> None:
    run = Run(target, 0.0005, offers=0.0)
    assert run.speed() > NO_DRAFTS
    assert sum(plan.nodes > 0 for plan in run.plans) > 50  # it may still find something


@pytest.mark.parametrize(
    ("target", "price", "probability", "least"),
    [(tiny, 0.005, 0.95, 5.0), (tiny, 0.1, 0.8, 1.7), (cliff, 0.005, 0.95, 3.0), (cliff, 0.005, 0.8, 1.6)],
)
def test_a_good_drafter_is_used(target: Seconds, price: float, probability: float, least: float) -> None:
    cold, warm = [], []
    for seed in range(9):
        STATISTICS.clear()
        cold.append(Run(target, price, probability, seed=seed).speed())
        warm.append(Run(target, price, probability, seed=99 + seed).speed())
    assert median(cold) > COLD_SHARE * least
    assert median(warm) > least


def test_trees_are_used_where_they_pay() -> None:
    run = Run(tiny, 0.005, 0.4, trees=True)
    run.speed(300)
    late = [plan for plan in run.plans[-50:] if plan.nodes]
    assert sum(plan.nodes > plan.depth for plan in late) > len(late) / 2


def test_chains_that_began_badly_are_tried_again() -> None:
    """The acceptance of chains is learned only from chains: a few bad ones at first must not leave trees for ever."""
    budget = planner()
    learned = budget.acceptance
    for _ in range(12):  # half of the first nodes accepted, and all of the trees
        learned.learn(Plan(7, 7), [8], 7, [0])
        learned.learn(Plan(7, 7), [8], 7, [1])
        learned.learn(Plan(15, 7), [16], 7, [4])
    plans = []
    for _ in range(600):
        plan = budget.plan(1)
        plans.append(plan)
        chain = plan.nodes == plan.depth
        accepted = plan.depth if chain else min(plan.depth, 4)  # chains are right now, trees no better than before
        budget.observe(RoundCosts(1, [plan.nodes + 1], plan.depth, [accepted], tiny(plan.nodes + 1), 0.05 * plan.depth))
    trees = [plan.nodes > plan.depth for plan in plans]
    assert any(trees[:50])
    assert not any(trees[-100:])


def test_a_drafter_of_chains_is_not_asked_for_trees() -> None:
    run = Run(tiny, 0.005, 0.6)
    run.speed(300)
    assert sum(plan.nodes > plan.depth for plan in run.plans) <= 2


def test_long_drafts_for_long_matches_and_short_ones_for_short() -> None:
    sure, unsure = Run(cliff, 0.05, 0.97), Run(cliff, 0.05, 0.75)
    sure.speed(600, name="sure")
    unsure.speed(600, name="unsure")
    # The best chains for these numbers have 31 and 5 nodes; 7 are worth 1 % less than 5.
    assert median([plan.nodes for plan in sure.plans[-30:]]) >= 11
    assert median([plan.nodes for plan in unsure.plans[-30:]]) <= 7


def test_a_batch_pays_for_all_its_rows() -> None:
    run = Run(tiny, 0.005, 0.8)
    assert run.speed(100, batch=8) > 1.8


@pytest.mark.parametrize("first", [0, 1])
def test_one_slow_pass_does_not_stop_drafting(first: int) -> None:
    """This holds even when that draft happened to be wrong."""
    budget = planner()
    asked = 0
    for step in range(40):
        plan = budget.plan(1)
        asked += plan.nodes > 0
        slow = 20.0 if asked == 1 and plan.nodes else 1.0  # the first pass over a new shape
        accepted = [plan.depth if asked > 1 or first else 0]
        budget.observe(RoundCosts(1, [1 + plan.depth], plan.depth, accepted, slow * tiny(1 + plan.depth), 0.001))
        assert asked or step < 5
    assert asked > 12  # a drafter that does not know how sure it is waits until the loss is made up


def test_later_calls_reuse_measurements() -> None:
    Run(tiny, 0.005, 0.9, noise=0.0).speed(200)
    run = Run(tiny, 0.005, 0.9, noise=0.0)
    run.speed(20)
    assert run.plans[0].nodes >= 7
    assert planner(device="cuda:0").plan(1).nodes == 0  # nothing is known of another device
    assert planner("another").plan(1).nodes == 0
    assert planner().plan(8).nodes == 0  # nor what 8 rows take


def call(tokens: int, accepts: bool, seconds: Seconds = cliff, price: float = 0.05, first_draft: float = 0.0) -> Run:
    """Decode one text with a drafter that ends its chains itself, and whose drafts are all right or all wrong.

    Args:
        first_draft: Additional seconds of the target and of the drafter in the first round with a draft.
    """
    run = Run(seconds, price)
    budget, done = Budget(STATISTICS, MeasurementKey("model", "cpu", "drafter"), (), True), 0
    while done < tokens:
        run.plans.append(plan := budget.plan(1))
        accepted = plan.depth if accepts else 0
        target, draft = seconds(plan.nodes + 1), price * plan.depth
        if plan.nodes:
            target, draft, first_draft = target + first_draft, draft + first_draft, 0.0
        budget.observe(RoundCosts(1, [plan.nodes + 1], plan.depth, [accepted], target, draft))
        run.seconds += target + draft
        done += 1 + accepted
    return run


def speech(columns: int) -> float:
    """Return the seconds of a pass of a small speech model on a CPU: a second column is almost free."""
    return 1.05 if columns == 2 else 1.0 if columns == 1 else 1.3 + 0.06 * (columns - 3)


@pytest.mark.parametrize("easy_calls", [0, 5])
def test_a_hard_text_does_not_silence_the_next(easy_calls: int) -> None:
    for _ in range(easy_calls):
        call(60, accepts=True, seconds=speech)
    call(60, accepts=False, seconds=speech)
    assert call(60, accepts=True, seconds=speech).seconds < 0.6 * 60


def test_a_hard_text_after_easy_ones_costs_little() -> None:
    for _ in range(5):
        call(60, accepts=True, seconds=speech)
    assert call(60, accepts=False, seconds=speech).seconds < 1.1 * 60


def test_many_calls_of_a_useless_drafter_lose_two_percent() -> None:
    seconds = sum(call(25, accepts=False).seconds for _ in range(30))
    assert seconds < 1.02 * 30 * 25 * cliff(1)


def test_a_cold_first_draft_does_not_silence_the_drafter() -> None:
    plans = call(80, accepts=True, first_draft=6.5).plans
    assert any(plan.nodes >= 7 for plan in plans[:10])


def test_chains_of_long_passes_are_afforded_where_they_pay() -> None:
    """The target's pass over the longest chain takes as long as ten passes over one token."""
    plans = call(300, accepts=True, seconds=lambda columns: 1 + 0.3 * (columns - 1)).plans
    assert plans[-1].nodes == 31


def test_drafting_resumes_when_the_text_becomes_predictable() -> None:
    """The text becomes one that the drafter knows."""
    budget, asked = planner(), []
    for step in range(400):
        plan = budget.plan(1)
        good = step >= 100
        asked.append(plan.nodes > 0)
        count = plan.depth if good else 0
        budget.observe(RoundCosts(1, [1 + plan.depth], plan.depth, [count], cliff(1 + plan.depth), 0.001))
    assert sum(asked[50:100]) <= 3
    assert sum(asked[-100:]) > 80


@pytest.mark.parametrize(("nodes", "depth", "plan"), [(5, None, Plan(5, 5)), (5, 2, Plan(5, 2)), (3, 9, Plan(3, 3))])
def test_a_fixed_budget_always_plans_the_same(nodes: int, depth: int | None, plan: Plan) -> None:
    budget = FixedBudget(nodes, depth)
    assert budget.plan(1) == plan
    budget.observe(RoundCosts(1, [4], 3, [0], 9.0, 9.0))
    assert budget.plan(8) == plan
    assert FixedBudget(0).plan(1) == Plan(0, 0)


@pytest.mark.parametrize(("nodes", "depth", "name"), [(-1, None, "nodes"), (4, 0, "depth"), (4, -2, "depth")])
def test_a_fixed_budget_refuses_impossible_sizes(nodes: int, depth: int | None, name: str) -> None:
    with pytest.raises(InputError, match=f"`{name}` must be at least"):
        FixedBudget(nodes, depth)


def test_a_round_is_a_thousand_calls_at_most_however_long_the_run() -> None:
    """Some 840 calls of functions, built-in ones included, are what takes it less than 100 microseconds."""
    budget, calls = planner(), list[int]()

    def count(_frame: object, event: str, _argument: object) -> None:
        calls[-1] += event in ("call", "c_call")

    for step in range(1000):
        calls.append(0)
        sys.setprofile(count)
        try:
            plan = budget.plan(1)
            taken = [plan.depth - (step % 2 and plan.depth > 0)]
            budget.observe(RoundCosts(1, [1 + plan.depth], plan.depth, taken, tiny(1 + plan.depth), 0.001))
        finally:
            sys.setprofile(None)
    assert 0 < max(calls) < 1000
    assert max(calls[900:]) <= max(calls[:100])


def test_a_drafter_that_knows_its_probabilities_soon_drafts_more() -> None:
    for prior, begin in (((), [0, 0, 1, 3]), ((0.9,) * 8, [0, 1, 7])):
        STATISTICS.clear()
        run = Run(tiny, 0.01, 0.9, noise=0.0, prior=prior)
        run.speed(30)
        assert [plan.nodes for plan in run.plans[: len(begin)]] == begin


@pytest.mark.parametrize("target", [cliff, steep])
def test_a_false_prior_costs_a_short_run_little_more_than_none(target: Seconds) -> None:
    for tokens in (20, 50):
        speeds = []
        for prior in ((), (0.9,) * 8):
            STATISTICS.clear()
            speeds.append(Run(target, 0.0, trees=True, noise=0.0, prior=prior).speed(tokens))
        assert speeds[1] > speeds[0] - 0.12


@dataclass
class Batch:
    """A budget whose rows end: what a round costs and brings is given."""

    budget: Budget
    target: Seconds
    accepted: int
    price: float = 0.01

    def run(self, rows: int, rounds: int) -> list[Plan]:
        plans = []
        for _ in range(rounds):
            plan = self.budget.plan(rows)
            plans.append(plan)
            columns, taken = 1 + plan.nodes, min(plan.depth, self.accepted)
            seconds = rows**0.5 * self.target(columns)
            self.budget.observe(
                RoundCosts(rows, [columns] * rows, plan.depth, [taken] * rows, seconds, self.price * plan.depth)
            )
        return plans


def test_shrinking_batches_need_no_new_timing() -> None:
    """Eight rows, of which one after the other ends: what columns cost relative to one another is known by then."""
    batch = Batch(planner(prior=[0.9, 0.9, 0.9, 0.9, 0.1]), tiny, 4)
    assert batch.run(8, 1)[0].nodes == 0  # a plain pass to compare with
    batch.run(8, 19)
    shrinking = [plan for rows in (4, 2, 1) for plan in batch.run(rows, 3)]
    assert sum(plan.nodes == 0 for plan in shrinking) <= 1  # now and then one is due
    assert sum(plan.nodes >= 5 for plan in shrinking) >= 8
    assert any(plan.nodes == 0 for plan in batch.run(2, 5))  # in the end its own timings count
    assert batch.run(16, 1)[0].nodes == 0  # of more rows fewer say nothing


def test_what_is_lost_on_fewer_rows_is_counted() -> None:
    """Planned by what more rows taught, where no plain pass was timed: the allowance knows what one would take."""
    budget = planner(prior=[0.9] * 8)
    Batch(budget, cliff, 4).run(8, 30)
    before = budget.allowance
    plans = Batch(budget, cliff, 0).run(1, 6)
    assert all(plan.nodes for plan in plans)
    lost = sum(cliff(1 + plan.nodes) + 0.01 * plan.depth for plan in plans) / budget.plain_seconds(1) - 6
    assert before - budget.allowance == pytest.approx(lost - 6 * ALLOWANCE_PER_TOKEN, rel=0.05)
    assert budget.plain_seconds(1) == pytest.approx(1.0, rel=0.15)
    later = Batch(budget, cliff, 0).run(1, 60)
    assert sum(plan.nodes > 0 for plan in later[40:]) <= 5


def test_another_drafter_is_not_known_by_what_the_target_was_timed_with() -> None:
    """Its cost must be measured anew."""
    Batch(planner(drafter="cheap", prior=[0.9] * 8), cliff, 4).run(8, 30)
    dear = Batch(planner(drafter="dear"), cliff, 0, price=3.0)
    plans = dear.run(1, 12)
    assert sum(plan.depth for plan in plans) <= 3


@pytest.mark.parametrize(("waited_for_cpu", "timed"), [(True, 3), (False, 11)])
def test_a_starved_rounds_seconds_are_not_learned(waited_for_cpu: bool, timed: int) -> None:
    """A thread that waited for a processor says nothing of what a pass costs."""
    budget = planner()
    for spent, waited in [*((1.0, False) for _ in range(3)), *((9.0, waited_for_cpu) for _ in range(8))]:
        budget.plan(1)
        budget.observe(RoundCosts(1, [1], 0, [0], spent, 0.0, waited))
    assert STATISTICS.pair(MeasurementKey("model", "cpu", "drafter")).costs(0)[0].timed == timed


def test_acceptance_of_a_starved_round_is_learned() -> None:
    budget = planner()
    for _ in range(40):
        plan = budget.plan(1)
        budget.observe(
            RoundCosts(1, [plan.nodes + 1], plan.depth, [plan.depth], tiny(plan.nodes + 1), 0.01 * plan.depth, True)
        )
    assert STATISTICS.pair(MeasurementKey("model", "cpu", "drafter")).acceptance.chain()[0] > 0.9


def test_a_machine_that_is_always_busy_drafts_too() -> None:
    """No round was ever undisturbed: CPU seconds are used instead, and drafting pays."""
    budget, plans = planner(), list[Plan]()
    for _ in range(40):
        plans.append(plan := budget.plan(1))
        columns = plan.nodes + 1
        budget.observe(RoundCosts(1, [columns], plan.depth, [plan.depth], tiny(columns), 0.01 * plan.depth, True))
    assert STATISTICS.pair(MeasurementKey("model", "cpu", "drafter")).costs(0)[0].timed < 20
    assert sum(plan.nodes > 4 for plan in plans[20:]) > 15


def waiting_call(slowdown: Seconds, tokens: int = 60, waited_for_cpu: bool = True) -> list[Plan]:
    """Decode a text with a drafter that is right four times in five, beside other work. slowdown: round -> how many
    times longer than alone its computations take."""
    budget, plans, done, rng = planner(), list[Plan](), 0, random.Random(0)
    while done < tokens:
        plans.append(plan := budget.plan(1))
        accepted = next((node for node in range(plan.depth) if rng.random() > 0.8), plan.depth)
        slow = slowdown(len(plans))
        seconds = slow * tiny(plan.nodes + 1), slow * 0.01 * plan.depth
        budget.observe(RoundCosts(1, [plan.nodes + 1], plan.depth, [accepted], *seconds, waited_for_cpu))
        done += 1 + accepted
    return plans


@pytest.mark.parametrize("lucky", [2, 3, 6])
def test_a_busy_start_does_not_affect_later_calls(lucky: int) -> None:
    """The first passes without a draft were quick and the first with one slow, by the neighbours' doing."""
    budget = planner()
    for step in range(lucky + 12):
        plan = budget.plan(1)
        slow = 1.0 if step < lucky else 2.2
        budget.observe(
            RoundCosts(1, [plan.nodes + 1], plan.depth, [0], slow * tiny(plan.nodes + 1), 0.01 * plan.depth, True)
        )
    calls = [60 / len(waiting_call(lambda _: 2.2)) for _ in range(3)]
    assert min(calls[1:]) > 2


@pytest.mark.parametrize(("first", "second"), [(False, True), (True, False)])
@pytest.mark.parametrize("slow", [1.5, 2.0])
def test_a_machine_that_becomes_busy_or_idle_is_compared_with_itself(first: bool, second: bool, slow: float) -> None:
    """A processor that other work shares computes longer: that says nothing against drafts."""
    budget = planner()
    for _ in range(20):  # a call in which only passes without a draft were timed
        budget.plan(1)
        budget.observe(RoundCosts(1, [1], 0, [0], slow if first else 1.0, 0.0, first))
    for _ in range(2):
        assert 60 / len(waiting_call(lambda _: slow if second else 1.0, waited_for_cpu=second)) > 2


@pytest.mark.parametrize("waited_for_cpu", [False, True])
def test_losses_on_a_busy_machine_are_counted_in_passes(waited_for_cpu: bool) -> None:
    """A draft that lost half a pass on a busy machine has not lost ten passes of an idle one."""
    budget = planner()
    for step in range(60):
        plan, waits = budget.plan(1), waited_for_cpu is (step >= 30)
        slow = 10.0 if waits else 1.0
        taken = plan.depth if step >= 30 else 0
        budget.observe(RoundCosts(1, [plan.nodes + 1], plan.depth, [taken], slow * cliff(plan.nodes + 1), 0.0, waits))
    assert budget.plan(1).nodes > 3
