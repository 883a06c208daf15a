"""How much to draft: learned while decoding, for the most expected tokens per second.

A plan of k nodes in a chain is worth (1 + E(k)) / (T(1 + k) + D(k)) tokens a second in each row: E the expected number
of accepted nodes, T the target's pass over the draft, D the drafter's time (the hardware-aware form of Sequoia, Chen et
al. 2024, section 3.3, with everything measured here instead of profiled beforehand). Plain decoding is worth 1 / T(1).

- T and D are monotone and piecewise linear through the lower quartiles of a few buckets: single timings are off
  by several times. A draft within the reach of what was timed counts as cheap until it was timed often enough.
- E of a chain follows from the chance p_i that node i is accepted when node i - 1 was; each tree has its own mean.
- A drafter that knows how sure it is ends a chain early: with the first node that, with all before it, is accepted with
  a chance below (seconds of one more node) x (tokens a second in each row), where another would cost more than it
  gives. What such chains draft and give is counted by itself.
- A round in which the thread waited for a processor says what the machine had to do, and nothing of what a draft costs:
  its seconds are not learned. Where too little is timed yet the processor's own seconds count: a machine that is busy
  for hours drafts, too.
- What drafting has cost beyond plain decoding is kept in a ledger. Before it is overdrawn a round is plain, so that
  even a drafter that is always wrong costs little. Where drafting does not pay, it is tried again ever more rarely.

Plain floats: a round's planning and learning take a few tens of microseconds. What is measured goes into the
`DecodingStatistics` that the run was given (`statistics.py`); the ledger is the run's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import final

from mmdec.decode.acceptance import DEEPEST
from mmdec.decode.cost_model import CostCurve
from mmdec.decode.statistics import ENOUGH, DecodingStatistics, Pair
from mmdec.types import Drafter, InputError, Plan, Target, TreeShape

Nodes = int | tuple[int, int] | None  # of a draft: a chain's, or a tree's with its depth; None: learned

# Nodes; with the root these are 2, 3, 4, 6, 8, ... columns.
CHAINS = tuple(Plan(nodes, nodes) for nodes in (1, 2, 3, 5, 7, 11, 15, 23, DEEPEST))
TREES = (Plan(7, 3), Plan(11, 5), Plan(15, 4), Plan(15, 7), Plan(31, 5), Plan(63, 6))
FIRST = 3  # nodes of the first chain
FIRST_WITH_PRIOR = 7  # nodes of the first draft where the drafter's chances are known beforehand
RELIABLE = 0.5  # below this acceptance of the first node, a single slow timing counts too
NEARLY_BEST = 0.93  # rates above this part of the best count as equal: seconds are noisy
MARGIN = 1.02  # the expected gain over plain decoding must be at least this
LOSS_AT_FIRST = 2.0  # plain passes that a run may lose to drafting from the start
LOSS_PER_TOKEN = 0.04  # plain passes that it may lose more for each token
LOSS_OF_GAINS = 8.0  # plain passes of earlier gains that a run may lose again
NOTICED = 0.02  # of a plain pass: a smaller loss is none
RARELY = 256  # rounds between attempts at most
CHAINS_RARELY = 96  # rounds of trees at most until a chain is tried again
ENDING_RARELY = 24  # the same for chains that end early, which lose little
SETTLED = 6  # rounds with so many rows, until their own timings are believed before those with more rows
GAP_OF_NEW_RUN = 8  # rounds between attempts at most when a run begins
ATTEMPT = 7  # nodes of an attempt at most
LENGTH = 8  # nodes of a chain at most by which the cost of one more is told
THRESHOLD = (0.02, 0.6)  # at least and at most: chances below which a chain ends
INSTANT = 1e-9  # seconds of a round at least: some clocks do not move in so short a time
PLAIN_EVERY = (0, 0, 8, 16, 32, 64)  # rounds until a plain pass is timed again, by those timed already


@final
class Budget:
    """Plans the rounds of one run, and learns from them for the runs to come: make one for each run."""

    def __init__(
        self, statistics: DecodingStatistics, pair: Pair, prior: Sequence[float] = (), stops: bool = False
    ) -> None:
        """statistics: what earlier runs measured; this run adds to it. prior: see `Acceptance`; it counts until these
        statistics have seen better. stops: whether the drafter ends chains early (`Needs.stops`)."""
        self._stops = stops
        self._constant: Plan | None = None
        self._plan = Plan(0, 0)
        self._attempt = False  # the plan is an attempt, although drafting is not expected to pay
        self._waited = 0  # rounds since the last attempt
        self._unplain = 0  # rounds since the last plain pass
        self._tokens = 0.0  # a row's, so far
        self._rate = 0.0  # tokens a second that the best plan promises
        self.ledger: dict[int, tuple[float, float]] = {}  # batch -> seconds and tokens of the rounds with a drafter
        self._lock = statistics.lock
        with self._lock:
            self._measured = statistics.of(pair, prior)
            self._acceptance = self._measured.acceptance
            self._acceptance.gap = min(self._acceptance.gap, GAP_OF_NEW_RUN)

    @classmethod
    def fixed(cls, nodes: int, depth: int | None = None) -> Budget:
        """Always `nodes` nodes at most `depth` deep; without a depth a chain. 0 is plain decoding."""
        if nodes < 0:
            raise InputError(f"`nodes` must be at least 0, but is {nodes}. 0 is plain decoding.")
        if depth is not None and not (1 if nodes else 0) <= depth:
            raise InputError(f"`depth` must be at least 1, but is {depth}. Leave it out for a chain.")
        budget = cls(DecodingStatistics(), Pair("", "", ""))
        budget._constant = Plan(nodes, nodes if depth is None else min(depth, nodes))
        return budget

    def plan(self, batch: int) -> Plan:
        """The next round's plan for `batch` rows; 0 nodes: a plain round, ask no drafter."""
        if self._constant is not None:
            return self._constant
        with self._lock:
            self._plan, self._attempt = self._choose(batch)
            if self._stops and self._plan.nodes == self._plan.depth > 1:
                self._plan = replace(self._plan, threshold=self._threshold(batch))
        return self._plan

    def observe(
        self,
        batch: int,
        draft_sizes: Sequence[int],
        depth: int,
        accepted: Sequence[int],
        target_seconds: float,
        draft_seconds: float,
        starved: bool = False,
    ) -> None:
        """Record the result of the last plan: each row's nodes, root included, and accepted nodes, root excluded; the
        draft's depth; seconds of the target's pass and of the drafter, 0 where it was not asked; whether the thread
        waited for a processor: then they are the processor's seconds."""
        if self._constant is not None:
            return
        with self._lock:
            target, chain, tree = self._curves(batch)
            columns, plan, acceptance = max(draft_sizes), self._plan, self._acceptance
            if not starved or target.samples(columns) < ENOUGH:
                target.add(columns, target_seconds)
            self._unplain = 0 if columns == 1 else self._unplain + 1
            tokens = 1 + sum(accepted) / len(accepted)
            self._tokens += tokens
            self._waited += 1
            if not plan.nodes:
                return
            acceptance.learn(plan, draft_sizes, depth, accepted, self._stops)
            draft = tree if plan.nodes > plan.depth else chain
            ending = self._stops and plan.nodes == plan.depth
            levels = max(columns - 1, 1) if ending else plan.depth
            if (columns > 1 or not ending) and not (starved and draft.samples(levels) >= ENOUGH):
                draft.add(levels, draft_seconds)  # nothing proposed is no level
            plain = self.plain_seconds(batch)
            cost = target.capped(columns, plain) + draft.pessimistic(levels)
            if tokens > 1 and min(target.samples(columns), draft.samples(levels)) < ENOUGH:
                cost = min(cost, tokens * plain)  # accepted drafts are timed again before they count as a loss
            spent, gained = self.ledger.get(batch, (0.0, 0.0))
            self.ledger[batch] = (spent + cost, gained + tokens)
            loss = cost - tokens * plain
            if loss <= 0:
                acceptance.gap = 1
            elif loss > NOTICED * plain and self._attempt:
                acceptance.gap = min(2 * acceptance.gap, RARELY)
                self._waited = 0

    def _curves(self, batch: int) -> tuple[CostCurve, CostCurve, CostCurve]:
        """Seconds of the target by columns, of a drafter's chains and of its trees by depth."""
        return self._measured.costs((batch - 1).bit_length())

    def _best_curves(self, batch: int) -> tuple[CostCurve, CostCurve, CostCurve]:
        """The curves to plan by: when rows have just ended, those of larger batches are still the better measured."""
        own = self._curves(batch)
        if own[0].timed < SETTLED or not own[0].samples(1):
            for power in sorted(self._measured.target):
                if power > (batch - 1).bit_length():
                    target, chain, tree = self._curves(1 << power)
                    if target.timed >= SETTLED and target.samples(1) and (chain.reach or tree.reach):
                        return target, chain, tree
        return own

    def plain_seconds(self, batch: int) -> float:
        """Seconds of a plain pass; if none was timed, estimated from passes with more rows; 0 if there are none."""
        own = self._curves(batch)[0]
        if own.samples(1) or not own.reach:
            return own.at(1)
        near = self._best_curves(batch)[0]
        longer = near.at(own.reach)
        return own.pessimistic(own.reach) * near.at(1) / longer if longer else 0.0

    def _threshold(self, batch: int) -> float:
        """The chance below which one more node of a chain costs more than it gives; 0 while too little is timed."""
        target, chain, _ = self._best_curves(batch)
        nodes = min(target.reach - 1, chain.reach, LENGTH)
        if nodes < FIRST:
            return 0.0
        seconds = (target.at(nodes + 1) - target.at(2) + chain.at(nodes) - chain.at(1)) / (nodes - 1)
        least, most = THRESHOLD
        return min(max(seconds * self._rate, least), most)

    def _affordable(self, plain: float) -> float:
        """Seconds that may be lost now, with `plain` seconds for a plain pass."""
        lost = sum(spent - gained * self.plain_seconds(batch) for batch, (spent, gained) in self.ledger.items())
        return (LOSS_AT_FIRST + LOSS_PER_TOKEN * self._tokens) * plain - max(lost, -LOSS_OF_GAINS * plain)

    def _rated(
        self, target: CostCurve, chain: CostCurve, tree: CostCurve, chances: Sequence[float], reach: int
    ) -> list[tuple[float, float, Plan, CostCurve]]:
        """Plans of less than `reach` nodes, the best first: tokens a second, accepted nodes, the drafter's costs."""
        acceptance, plain = self._acceptance, target.at(1)
        drafted, gains = range(1, DEEPEST + 1), list(accumulate(accumulate(chances, _product)))
        if self._stops:
            drafted, gains = acceptance.ending_chains(chances)
        plans = [(plan, gains[plan.nodes - 1], chain) for plan in CHAINS if plan.nodes < reach]
        if acceptance.chains_only < 2:
            plans += [
                (plan, acceptance.tree(plan.nodes, plan.depth, chances), tree if tree.reach else chain)
                for plan in TREES
                if plan.nodes < reach
            ]
        rated: list[tuple[float, float, Plan, CostCurve]] = []
        for plan, gain, draft in plans:
            nodes, levels = (drafted[plan.nodes - 1],) * 2 if plan.nodes == plan.depth else (plan.nodes, plan.depth)
            drafting = draft.at(levels)
            expected = acceptance.offered * target.at(nodes + 1) + (1 - acceptance.offered) * plain + drafting
            rated.append(((1 + gain) / max(expected, INSTANT), gain, plan, draft))
        return sorted(rated, key=_rate, reverse=True)

    def _choose(self, batch: int) -> tuple[Plan, bool]:
        """The plan, and whether it is an attempt."""
        no_draft, acceptance = Plan(0, 0), self._acceptance
        target, chain, tree = self._best_curves(batch)
        own, has_prior = self._curves(batch)[0], bool(acceptance.prior)
        if own.timed >= SETTLED and not own.samples(1):
            return no_draft, False
        timed_plain = min(target.samples(1) + has_prior, len(PLAIN_EVERY) - 1)  # with a prior one timing will do
        if self._unplain >= PLAIN_EVERY[timed_plain]:
            return no_draft, False
        plain, own_plain = target.at(1), self.plain_seconds(batch)
        # In seconds of the curves planned by:
        affordable = self._affordable(own_plain) * plain / own_plain if own_plain else LOSS_AT_FIRST * plain
        chances = acceptance.chain()
        first = FIRST_WITH_PRIOR if has_prior else FIRST
        reach = max(first + 1, 2 * target.reach) if chain.reach else 2  # one node shows what the drafter costs
        rated = self._rated(target, chain, tree, chances, reach)
        self._rate = rated[0][0]

        def bearable(plan: Plan, draft: CostCurve) -> bool:
            """Nothing accepted is the worst that can happen: a run that cannot bear it must not try."""
            columns = plan.nodes + 1
            risk = target.capped(columns, plain) + draft.pessimistic(plan.depth) - plain
            timed = target.samples(columns)
            if chances[0] > RELIABLE and timed and min(timed, draft.samples(plan.depth)) < ENOUGH:
                risk = min(risk, LOSS_AT_FIRST * plain)  # one slow pass does not bar a drafter that is right
            return risk <= affordable

        able = ((rate, gain, plan) for rate, gain, plan, draft in rated if bearable(plan, draft))  # the best one first
        best, most, chosen = next(able, (0.0, 0.0, no_draft))
        if best * plain >= MARGIN:
            # Seconds are noisier than counts: of plans that promise nearly as much, the one with the most tokens.
            for rate, gain, plan in able:
                if rate < max(NEARLY_BEST * best, MARGIN / plain):
                    break
                if gain > most:
                    most, chosen = gain, plan
            if chosen.nodes > chosen.depth and not has_prior and acceptance.since_chain >= acceptance.chain_gap:
                # What chains accept is learned in rounds of chains alone: without one now and then trees stay for ever.
                chains = [plan for _, _, plan, draft in rated if plan.nodes == plan.depth and bearable(plan, draft)]
                if chains:
                    rarely = ENDING_RARELY if self._stops else CHAINS_RARELY
                    acceptance.chain_gap = min(2 * acceptance.chain_gap, rarely)
                    # One that ends where the drafter is not sure may as well be long.
                    return max(chains, key=lambda plan: plan.nodes) if self._stops else chains[0], False
            return chosen, False
        if self._waited < acceptance.gap or not best:
            return no_draft, False
        return next((plan for _, _, plan in ((best, most, chosen), *able) if plan.nodes <= ATTEMPT), no_draft), True


def _rate(rated: tuple[float, float, Plan, CostCurve]) -> float:
    return rated[0]


def _product(left: float, right: float) -> float:
    return left * right


def learned(
    statistics: DecodingStatistics, target: Target, drafter: Drafter | None, nodes: Nodes
) -> tuple[Budget, TreeShape | None]:
    """A run's budget, and the shape of its trees where its drafter has a prior, as far as the statistics know the pair.

    nodes: of every draft; None lets the budget learn what pays."""
    if drafter is None or nodes == 0:
        return Budget.fixed(0), None
    prior = drafter.needs.prior
    if nodes is not None and prior is None:
        return _fixed(nodes), None
    pair = Pair(target.name, str(target.device), drafter.name)
    shape = None if prior is None else statistics.accuracy(pair, prior)
    if nodes is not None:
        return _fixed(nodes), shape
    return Budget(statistics, pair, () if prior is None else prior.chain, drafter.needs.stops), shape


def _fixed(nodes: int | tuple[int, int]) -> Budget:
    return Budget.fixed(*nodes) if isinstance(nodes, tuple) else Budget.fixed(nodes)
