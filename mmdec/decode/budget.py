"""How much to draft in each round: chosen while decoding, for the most expected tokens per second.

A chain of k nodes yields (1 + E(k)) / (T(1 + k) + D(k)) tokens a second in each row: E is the expected number of
accepted nodes, T the time of the target's pass over the draft, D the drafter's time (the hardware-aware objective of
Sequoia, Chen et al. 2024, section 3.3, measured online instead of profiled beforehand). Plain decoding yields 1 / T(1).

- The curves of T and D go through the lower quartiles of a few buckets of timings (monotone, piecewise linear), because
  a single timing may be wrong by several times. A draft size close to a timed one counts as cheap until it was timed
  often enough itself.
- E of a chain follows from the chance p_i that node i is accepted if node i - 1 was; each tree size has its own mean.
- A drafter that estimates its own accuracy ends a chain early: at the first node whose chance to be accepted, with all
  nodes before it, is below (seconds of one more node) x (tokens a second in each row). Such chains are counted
  separately.
- If the thread waited for a CPU, the round's wall time measures the machine's load, not the draft's cost: it is not
  recorded. While there are too few timings, CPU time is recorded instead, so that a busy machine drafts, too.
- A ledger records what drafting has cost beyond plain decoding. A round that could overdraw it is plain, so even a
  drafter that is always wrong costs little. While drafting does not pay, it is tried at growing intervals. A drafter
  that takes no time and estimates its own accuracy is still called each round: it ends chains where they do not pay.

Planning and learning use plain floats and take a few tens of microseconds a round. Measurements are stored in the run's
`DecodingStatistics` (`statistics.py`); the ledger belongs to the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import final

from mmdec.decode.statistics import DEEPEST, ENOUGH, CostCurve, DecodingStatistics, Pair
from mmdec.types import Drafter, InputError, Plan, Target, TreeShape

# a draft's size: nodes of a chain, or (nodes, depth) of a tree; None: the budget chooses it each round
Nodes = int | tuple[int, int] | None

# Numbers of nodes that the budget compares; with the root these are 2, 3, 4, 6, 8, ... columns of a pass.
CHAINS = tuple(Plan(nodes, nodes) for nodes in (1, 2, 3, 5, 7, 11, 15, 23, DEEPEST))
TREES = (Plan(7, 3), Plan(11, 5), Plan(15, 4), Plan(15, 7), Plan(31, 5), Plan(63, 6))
FIRST = 3  # maximum nodes of a draft until longer passes were timed
FIRST_WITH_PRIOR = 7  # the same maximum for a drafter that has a prior or may end chains early
RELIABLE = 0.5  # up to this acceptance chance of the first node, a single slow timing can rule out a plan
NEARLY_BEST = 0.93  # rates above this part of the best count as equal: seconds are noisy
MARGIN = 1.02  # the expected gain over plain decoding must be at least this
LOSS_AT_FIRST = 2.0  # maximum loss of a new run, in plain passes, if the drafter has a prior or may end chains early
LOSS_TO_GUESSES = 1.0  # the same for other drafters: losing 2 passes costs an answer of 20 tokens a tenth of its time
LOSS_PER_TOKEN = 0.04  # each new token raises the maximum loss by so many plain passes
LOSS_OF_GAINS = 8.0  # maximum of earlier gains, in plain passes, that a run may lose again
NOTICED = 0.02  # a loss below this part of a plain pass's time counts as none
RARELY = 256  # maximum rounds between two trial drafts while drafting does not pay
CHAINS_RARELY = 96  # after at most so many rounds with trees, a chain is tried again
ENDING_RARELY = 24  # the same maximum for chains that may end early: trying them costs little
SETTLED = 6  # rounds at a new batch size after which its own timings are preferred to those of larger batches
GAP_OF_NEW_RUN = 8  # maximum rounds between two trial drafts when a run begins
ATTEMPT = 7  # maximum nodes of a trial draft, from which no gain is expected
LENGTH = 8  # maximum nodes of the chains from which the cost of one more node is estimated
UNTIMED = 0.3  # acceptance chance below which a chain ends, while too little is timed to compute it
THRESHOLD = (0.02, 0.6)  # bounds of this chance once it is computed
INSTANT = 1e-9  # seconds that a round counts at least: some clocks do not move in so short a time
PLAIN_EVERY = (0, 0, 8, 16, 32, 64)  # [n]: rounds until the next plain pass, if n were timed


@final
class Budget:
    """Plans the rounds of one run and records their results for later runs. Make one for each run."""

    def __init__(
        self, statistics: DecodingStatistics, pair: Pair, prior: Sequence[float] = (), stops: bool = False
    ) -> None:
        """statistics: measurements of earlier runs; this run adds its own. pair: target, device and drafter.
        prior: acceptance chances of a chain's nodes, used until there are measurements. stops: whether the drafter may
            end chains early (`Needs.stops`).
        """
        self._stops = stops
        self._patience = LOSS_AT_FIRST if stops or prior else LOSS_TO_GUESSES
        self._constant: Plan | None = None
        self._plan = Plan(0, 0)
        self._attempt = False  # whether the plan is a trial draft: no gain is expected from it
        self._waited = 0  # rounds since the last trial draft
        self._unplain = 0  # rounds since the last plain pass
        self._tokens = 0.0  # new tokens per row so far
        self._rate = 0.0  # tokens a second that the best plan is expected to give
        self.ledger: dict[int, tuple[float, float]] = {}  # batch size -> (seconds, tokens) of rounds with a drafter
        self._lock = statistics.lock
        with self._lock:
            self._measured = statistics.of(pair, prior)
            self._acceptance = self._measured.acceptance
            self._acceptance.gap = min(self._acceptance.gap, GAP_OF_NEW_RUN)

    @classmethod
    def fixed(cls, nodes: int, depth: int | None = None) -> Budget:
        """Return a budget that always plans `nodes` nodes, at most `depth` deep (None: a chain). 0: plain decoding."""
        if nodes < 0:
            raise InputError(f"`nodes` must be at least 0, but is {nodes}. 0 is plain decoding.")
        if depth is not None and not (1 if nodes else 0) <= depth:
            raise InputError(f"`depth` must be at least 1, but is {depth}. Leave it out for a chain.")
        budget = cls(DecodingStatistics(), Pair("", "", ""))
        budget._constant = Plan(nodes, nodes if depth is None else min(depth, nodes))
        return budget

    def plan(self, batch: int) -> Plan:
        """Plan the next round for `batch` rows. With 0 nodes the round is plain and the drafter is not called."""
        if self._constant is not None:
            return self._constant
        with self._lock:
            self._plan, self._attempt = self._choose(batch)
            if self._stops and self._plan.nodes == self._plan.depth >= 1:
                self._plan = replace(self._plan, threshold=self._threshold(batch), least=self._least(batch))
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
        """Record the result of the last plan.

        batch: number of rows. draft_sizes: each row's number of nodes, root included. depth: depth of the draft.
        accepted: each row's number of accepted nodes, root excluded.
        target_seconds: seconds of the target's pass. draft_seconds: seconds of the drafter; 0 if it was not called.
        starved: whether the thread waited for a processor; then the seconds are CPU time.
        """
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
                draft.add(levels, draft_seconds)  # an empty draft has 0 levels, but takes time
            plain = self.plain_seconds(batch)
            cost = target.capped(columns, plain) + draft.pessimistic(levels)
            if tokens > 1 and min(target.samples(columns), draft.samples(levels)) < ENOUGH:
                cost = min(cost, tokens * plain)  # an accepted draft is no loss until it was timed again
            spent, gained = self.ledger.get(batch, (0.0, 0.0))
            self.ledger[batch] = (spent + cost, gained + tokens)
            loss = cost - tokens * plain
            if loss <= 0:
                acceptance.gap = 1
            elif loss > NOTICED * plain and self._attempt:
                acceptance.gap = min(2 * acceptance.gap, RARELY)
                self._waited = 0

    def _curves(self, batch: int) -> tuple[CostCurve, CostCurve, CostCurve]:
        """Return the cost curves in seconds: the target's pass by columns; the drafter's chains and trees by depth."""
        return self._measured.costs((batch - 1).bit_length())

    def _best_curves(self, batch: int) -> tuple[CostCurve, CostCurve, CostCurve]:
        """Return the cost curves to plan with: a larger batch size's, if this size has few timings."""
        own = self._curves(batch)
        if own[0].timed < SETTLED or not own[0].samples(1):
            for power in sorted(self._measured.target):
                if power > (batch - 1).bit_length():
                    target, chain, tree = self._curves(1 << power)
                    if target.timed >= SETTLED and target.samples(1) and (chain.reach or tree.reach):
                        return target, chain, tree
        return own

    def plain_seconds(self, batch: int) -> float:
        """Return the seconds of a plain pass; without timings, estimated from passes with more rows, else 0."""
        own = self._curves(batch)[0]
        if own.samples(1) or not own.reach:
            return own.at(1)
        near = self._best_curves(batch)[0]
        longer = near.at(own.reach)
        return own.pessimistic(own.reach) * near.at(1) / longer if longer else 0.0

    def _threshold(self, batch: int) -> float:
        """Return the chance below which a chain's next node does not pay; `UNTIMED` if too little was timed."""
        target, chain, _ = self._best_curves(batch)
        nodes = min(target.reach - 1, chain.reach, LENGTH)
        if nodes < FIRST:
            return UNTIMED
        seconds = (target.at(nodes + 1) - target.at(2) + chain.at(nodes) - chain.at(1)) / (nodes - 1)
        least, most = THRESHOLD
        return min(max(seconds * self._rate, least), most)

    def _least(self, batch: int) -> float:
        """Return how many accepted tokens pay for a pass over two columns instead of one; 0 until one was timed."""
        target, _, _ = self._best_curves(batch)
        plain = target.at(1)
        return max(0.0, target.capped(2, plain) / plain - 1) if plain and target.reach > 1 else 0.0

    def _affordable(self, plain: float) -> float:
        """Return the seconds that this round may lose against a plain pass, which takes `plain` seconds."""
        lost = sum(spent - gained * self.plain_seconds(batch) for batch, (spent, gained) in self.ledger.items())
        return (self._patience + LOSS_PER_TOKEN * self._tokens) * plain - max(lost, -LOSS_OF_GAINS * plain)

    def _rated(
        self, target: CostCurve, chain: CostCurve, tree: CostCurve, chances: Sequence[float], reach: int
    ) -> list[tuple[float, float, Plan, CostCurve]]:
        """Rate all plans of fewer than `reach` nodes by cost curves and chances of a chain's nodes. Returns: (tokens a
        second, accepted nodes, plan, drafter's cost curve) of each plan, the best first."""
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
        """Choose the next plan. Returns: the plan, and whether it is a trial draft, from which no gain is expected."""
        no_draft, acceptance = Plan(0, 0), self._acceptance
        target, chain, tree = self._best_curves(batch)
        own, has_prior = self._curves(batch)[0], bool(acceptance.prior)
        if own.timed >= SETTLED and not own.samples(1):
            return no_draft, False
        # a prior replaces one timing of a plain pass
        timed_plain = min(target.samples(1) + has_prior, len(PLAIN_EVERY) - 1)
        if self._unplain >= PLAIN_EVERY[timed_plain]:
            return no_draft, False
        plain, own_plain = target.at(1), self.plain_seconds(batch)
        # The loss is in seconds of this batch size; convert it to seconds of the curves that are used for planning:
        affordable = self._affordable(own_plain) * plain / own_plain if own_plain else self._patience * plain
        chances = acceptance.chain()
        first = FIRST_WITH_PRIOR if has_prior or self._stops else FIRST
        # the first draft has one node, because the drafter's cost is not known yet
        reach = max(first + 1, 2 * target.reach) if chain.reach else 2
        rated = self._rated(target, chain, tree, chances, reach)
        self._rate = rated[0][0]

        def bearable(plan: Plan, draft: CostCurve) -> bool:
            """Return whether the run can afford the plan if no node is accepted."""
            columns = plan.nodes + 1
            risk = target.capped(columns, plain) + draft.pessimistic(plan.depth) - plain
            timed = target.samples(columns)
            if chances[0] > RELIABLE and timed and min(timed, draft.samples(plan.depth)) < ENOUGH:
                risk = min(risk, self._patience / 2 * plain)  # one slow pass must not exclude a reliable drafter
            return risk <= affordable

        # the affordable plans, best rate first
        able = ((rate, gain, plan) for rate, gain, plan, draft in rated if bearable(plan, draft))
        best, most, chosen = next(able, (0.0, 0.0, no_draft))
        if best * plain >= MARGIN:
            # Times are noisier than token counts: among plans of nearly equal rate, take the one with the most tokens.
            for rate, gain, plan in able:
                if rate < max(NEARLY_BEST * best, MARGIN / plain):
                    break
                if gain > most:
                    most, chosen = gain, plan
            if chosen.nodes > chosen.depth and not has_prior and acceptance.since_chain >= acceptance.chain_gap:
                # Only chains show what chains accept: without occasional chains the budget would plan trees for ever.
                chains = [plan for _, _, plan, draft in rated if plan.nodes == plan.depth and bearable(plan, draft)]
                if chains:
                    rarely = ENDING_RARELY if self._stops else CHAINS_RARELY
                    acceptance.chain_gap = min(2 * acceptance.chain_gap, rarely)
                    # A long chain costs little if the drafter ends it where it is unsure.
                    return max(chains, key=lambda plan: plan.nodes) if self._stops else chains[0], False
            return chosen, False
        tried = [plan for _, _, plan in ((best, most, chosen), *able) if plan.nodes <= ATTEMPT]
        if self._waited < acceptance.gap or not best:
            chains = [plan for plan in tried if plan.nodes == plan.depth >= 1]
            if self._stops and chains and chain.reach and chain.at(1) <= NOTICED * plain:
                return max(chains, key=lambda plan: plan.nodes), False
            return no_draft, False
        return next(iter(tried), no_draft), True


def _rate(rated: tuple[float, float, Plan, CostCurve]) -> float:
    return rated[0]


def _product(left: float, right: float) -> float:
    return left * right


def learned(
    statistics: DecodingStatistics, target: Target, drafter: Drafter | None, nodes: Nodes
) -> tuple[Budget, TreeShape | None]:
    """Make a run's budget, and the tree shape of a drafter with a prior, from the statistics.

    drafter: None for plain decoding. nodes: number of nodes of every draft; None lets the budget choose.
    Returns: the budget, and the `TreeShape` or None.
    """
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
