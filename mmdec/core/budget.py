"""Chooses before each round how many tokens to draft, so that decoding is expected to be fastest.

The target passes over the last token and k drafted ones. A chain of k nodes yields (1 + E(k)) / (T(1 + k) + D(k))
tokens a second in each row. E is the expected number of accepted nodes. T is the time of the target's pass, by its
number of tokens. D is the drafter's time. Plain decoding yields 1 / T(1). This is the hardware-aware objective of
Sequoia (Chen et al. 2024, section 3.3), but T and D are measured while decoding, not in advance.

- T and D are curves through measured times (monotone, piecewise linear). Similar sizes share a bucket, and each bucket
  is represented by the lower quartile of its times, because a single time may be several times too long.
- E of a chain follows from p_i, the chance that node i is accepted if node i - 1 was. For trees, the mean number of
  accepted nodes is measured for each tree size.
- Some drafters estimate their own accuracy and end a chain early. The chain ends at the first node that is too
  unlikely to be accepted together with all nodes before it. The limit is (seconds of one more node) x (tokens a second
  in each row).
- If the thread waited for a CPU, wall time shows how busy the machine is, so CPU time is recorded instead. Both clocks
  have curves of their own, because CPU time on a busy machine is longer than wall time on an idle one: comparing a pass
  of one kind with a pass of the other would say nothing about drafts. The curves of the last round's kind are used.
- Each call sums the time that its drafts have lost against plain decoding. If a draft could lose more than is allowed,
  the round has no draft. So even a drafter that is always wrong costs little time. While drafting does not pay, it is
  tried again at growing intervals.

Planning takes a few tens of microseconds a round. Measurements are stored in `DecodingStatistics`, which several
`generate` calls may share. The lost time belongs to one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple, final

from mmdec.core.statistics import MAX_CHAIN_NODES, MIN_BUCKET_TIMINGS, CostCurve, DecodingStatistics, MeasurementKey
from mmdec.errors import InputError
from mmdec.types import Drafter, Plan, Target, TreeShape

# a draft's size: nodes of a chain, or (nodes, depth) of a tree; None: the budget chooses it each round
Nodes = int | tuple[int, int] | None

# the numbers of drafted tokens that the budget compares; the target's pass has one token more, the root
CHAIN_PLANS = tuple(Plan(nodes, nodes) for nodes in (1, 2, 3, 5, 7, 11, 15, 23, MAX_CHAIN_NODES))
TREE_PLANS = (Plan(7, 3), Plan(11, 5), Plan(15, 4), Plan(15, 7), Plan(31, 5), Plan(63, 6))
INITIAL_MAX_NODES = 3  # maximum nodes of a draft at first; the maximum grows as longer target passes are timed
# the same for drafters whose accuracy was estimated beforehand, or that may end chains early
INITIAL_MAX_NODES_WITH_PRIOR = 7
# if the first node's acceptance chance is above this, one slow timing does not exclude a draft size
RELIABLE_ACCEPTANCE = 0.5
NEARLY_BEST = 0.93  # draft sizes with at least this share of the best tokens per second count as equal: times are noisy
MIN_SPEEDUP = 1.02  # a draft must be expected to give at least this many times the tokens per second of plain decoding
INITIAL_LOSS_ALLOWANCE = 2.0  # maximum time that a call's drafts may lose at first, in passes over one token
# the same for drafters of unknown accuracy: 2 passes are a tenth of an answer of 20 tokens
INITIAL_LOSS_WITHOUT_PRIOR = 1.0
LOSS_PER_TOKEN = 0.04  # each new token allows the drafts to lose this much more time, in passes over one token
LOSS_OF_GAINS = 8.0  # of the time that earlier drafts gained, later drafts may lose this much, in passes over one token
NEGLIGIBLE_LOSS = 0.02  # a loss below this fraction of a pass over one token is ignored
MAX_TRIAL_GAP = 256  # maximum rounds between two trial drafts while drafting does not pay
MAX_CHAIN_TRIAL_GAP = 96  # maximum rounds with trees before a chain is tried again, to measure what chains accept
MAX_ENDING_CHAIN_TRIAL_GAP = 24  # the same for drafters that may end chains early: their chains cost little
# after this many rounds at a batch size, its own times are used; before, those of a larger batch size
MIN_ROUNDS_AT_BATCH_SIZE = 6
MAX_INITIAL_TRIAL_GAP = 8  # maximum rounds between two trial drafts when a `generate` call begins
# maximum nodes of a trial draft, that is, of a draft made only to measure whether drafting pays now
MAX_TRIAL_NODES = 7
NODE_COST_CHAIN_LENGTH = 8  # the time of one more node is estimated from chains of at most this many nodes
# a chain ends below this acceptance chance, until enough is timed to compute a better limit
DEFAULT_STOP_PROBABILITY = 0.3
STOP_PROBABILITY_RANGE = (0.02, 0.6)  # least and largest value of the computed limit, an acceptance chance
MIN_ROUND_SECONDS = 1e-9  # least seconds of a round, to divide by: a coarse clock may measure 0
# [n]: after n timed passes without a draft, maximum number of rounds with drafts before the next pass without a draft
PLAIN_EVERY = (0, 0, 8, 16, 32, 64)
NO_DRAFT = Plan(0, 0)


class RatedPlan(NamedTuple):
    """A plan, with what it is expected to bring."""

    rate: float  # tokens a second in each batch row
    accepted: float  # number of accepted nodes
    plan: Plan
    draft: CostCurve  # the drafter's seconds


@final
class Budget:
    """Chooses the draft size of each round of one `generate` call, and records times and accepted tokens.

    It holds what this call's drafts have cost and brought. Its other measurements go to a `DecodingStatistics`, where
    later calls read them.

    Args:
        statistics: Measurements of earlier calls; this call adds to them.
        key: Names of target, device and drafter.
        prior: [i]: estimated chance that node i + 1 of a chain is accepted if node i was; used before measurements.
        stops: Whether the drafter may end chains early.
    """

    def __init__(
        self, statistics: DecodingStatistics, key: MeasurementKey, prior: Sequence[float] = (), stops: bool = False
    ) -> None:
        self._stops = stops
        self._loss_allowance = INITIAL_LOSS_ALLOWANCE if stops or prior else INITIAL_LOSS_WITHOUT_PRIOR
        self._constant: Plan | None = None
        self._plan = Plan(0, 0)
        self._is_trial = False  # whether the plan is a trial draft: no gain is expected from it, it only measures
        self._rounds_since_trial = 0  # rounds since the last trial draft
        self._rounds_since_plain = 0  # rounds since the last target pass without a draft
        self._tokens = 0.0  # new tokens per row so far, mean over the rows
        self._rate = 0.0  # tokens a second in each batch row that the best draft size is expected to give
        # [whether the round waited for a CPU]: batch size -> (seconds, new tokens per row) of all rounds in which the
        # drafter was called
        self.drafting_totals: tuple[dict[int, tuple[float, float]], ...] = ({}, {})
        self._lock = statistics.lock
        with self._lock:
            self._measured = statistics.of(key, prior)
            self._acceptance = self._measured.acceptance
            self._acceptance.gap = min(self._acceptance.gap, MAX_INITIAL_TRIAL_GAP)

    @classmethod
    def fixed(cls, nodes: int, depth: int | None = None) -> Budget:
        """Return a budget that plans the same draft in every round.

        Args:
            nodes: Number of drafted tokens; 0: plain decoding.
            depth: Maximum depth of the tree; None: a chain.
        """
        if nodes < 0:
            raise InputError(f"`nodes` must be at least 0, but is {nodes}. 0 is plain decoding.")
        if depth is not None and not (1 if nodes else 0) <= depth:
            raise InputError(f"`depth` must be at least 1, but is {depth}. Leave it out for a chain.")
        budget = cls(DecodingStatistics(), MeasurementKey("", "", ""))
        budget._constant = Plan(nodes, nodes if depth is None else min(depth, nodes))
        return budget

    def plan(self, batch: int) -> Plan:
        """Return the draft size of the next round for `batch` rows. If it has 0 nodes, the drafter is not called."""
        if self._constant is not None:
            return self._constant
        with self._lock:
            self._plan, self._is_trial = self._choose(batch)
            if self._stops and self._plan.nodes == self._plan.depth >= 1:
                self._plan = replace(
                    self._plan,
                    threshold=self._threshold(batch),
                    min_expected_accepted=self._min_expected_accepted(batch),
                )
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
        columns: int = 0,
    ) -> None:
        """Record the times and the accepted tokens of the round that `plan` planned last.

        Args:
            batch: Number of rows.
            draft_sizes: Each row's number of nodes, root included.
            depth: Depth of the deepest node.
            accepted: Each row's number of accepted nodes, root excluded.
            target_seconds: Seconds of the target's pass.
            draft_seconds: Seconds of the drafter; 0 if it was not called.
            starved: Whether the thread waited for a free CPU. The seconds are then CPU time, else wall time.
            columns: Number of nodes that the pass computed for each row, padding included; 0: those of the largest
                draft.
        """
        if self._constant is not None:
            return
        with self._lock:
            self._measured.waited_for_cpu = starved
            target, chain, tree = self._curves(batch)
            size, plan, acceptance = max(draft_sizes), self._plan, self._acceptance
            columns = max(columns, size)
            target.add(columns, target_seconds)
            self._rounds_since_plain = 0 if columns == 1 else self._rounds_since_plain + 1
            tokens = 1 + sum(accepted) / len(accepted)
            self._tokens += tokens
            self._rounds_since_trial += 1
            if not plan.nodes:
                return
            acceptance.learn(plan, draft_sizes, depth, accepted, self._stops)
            draft = tree if plan.nodes > plan.depth else chain
            ending = self._stops and plan.nodes == plan.depth
            levels = max(size - 1, 1) if ending else plan.depth
            if size > 1 or not ending:
                draft.add(levels, draft_seconds)  # not for a chain that ended before its first node: it has no depth
            plain = self.plain_seconds(batch)
            cost = target.capped_estimate(columns, plain) + draft.pessimistic_estimate(levels)
            if tokens > 1 and min(target.samples(columns), draft.samples(levels)) < MIN_BUCKET_TIMINGS:
                cost = min(cost, tokens * plain)  # with few timings, a round with accepted tokens counts as no loss
            totals = self.drafting_totals[starved]
            spent, gained = totals.get(batch, (0.0, 0.0))
            totals[batch] = (spent + cost, gained + tokens)
            loss = cost - tokens * plain
            if loss <= 0:
                acceptance.gap = 1
            elif loss > NEGLIGIBLE_LOSS * plain and self._is_trial:
                acceptance.gap = min(2 * acceptance.gap, MAX_TRIAL_GAP)
                self._rounds_since_trial = 0

    def _curves(self, batch: int) -> tuple[CostCurve, CostCurve, CostCurve]:
        """Return the cost curves for batches of `batch` rows, of the last round's clock.

        Returns:
            Seconds of a target pass by its number of tokens; of the drafter for a chain by its depth; and for a tree by
            its depth.
        """
        return self._measured.costs((batch - 1).bit_length(), self._measured.waited_for_cpu)

    def _best_curves(self, batch: int) -> tuple[CostCurve, CostCurve, CostCurve]:
        """Return the cost curves for choosing a draft size: target's passes, drafter's chains, drafter's trees.

        If batches of this size were rarely timed, these are the curves of the other clock or of a larger batch size.
        """
        curves, measured, least = self._curves(batch), self._measured, (batch - 1).bit_length()
        if curves[0].timed < MIN_ROUNDS_AT_BATCH_SIZE or not curves[0].samples(1):
            for starved in (measured.waited_for_cpu, not measured.waited_for_cpu):
                for power in measured.powers(starved):
                    if power > least or (power == least and starved is not measured.waited_for_cpu):
                        target, chain, tree = measured.costs(power, starved)
                        if (
                            target.timed >= MIN_ROUNDS_AT_BATCH_SIZE
                            and target.samples(1)
                            and (chain.max_timed or tree.max_timed)
                        ):
                            return target, chain, tree
        return curves

    def plain_seconds(self, batch: int, starved: bool | None = None) -> float:
        """Return the seconds of a target pass over one token per batch row.

        If no such pass was timed at this batch size, the seconds are estimated from longer passes; 0 if nothing was
        timed.

        Args:
            starved: Whether to return CPU time as measured while the thread waited for a CPU; None: as in the last
                round.
        """
        if starved is not None and starved is not self._measured.waited_for_cpu:
            return self._measured.costs((batch - 1).bit_length(), starved)[0].at(1)
        target = self._curves(batch)[0]
        if target.samples(1) or not target.max_timed:
            return target.at(1)
        measured = self._best_curves(batch)[0]
        longer = measured.at(target.max_timed)
        return target.pessimistic_estimate(target.max_timed) * measured.at(1) / longer if longer else 0.0

    def _threshold(self, batch: int) -> float:
        """Return the acceptance chance below which a chain's next node is expected to cost more time than it saves.

        It is `DEFAULT_STOP_PROBABILITY` if too little was timed.
        """
        target, chain, _ = self._best_curves(batch)
        nodes = min(target.max_timed - 1, chain.max_timed, NODE_COST_CHAIN_LENGTH)
        if nodes < INITIAL_MAX_NODES:
            return DEFAULT_STOP_PROBABILITY
        seconds = (target.at(nodes + 1) - target.at(2) + chain.at(nodes) - chain.at(1)) / (nodes - 1)
        least, most = STOP_PROBABILITY_RANGE
        return min(max(seconds * self._rate, least), most)

    def _min_expected_accepted(self, batch: int) -> float:
        """Return how many accepted tokens a draft must bring to save time.

        This is the extra time of a target pass over two tokens, divided by the time of a pass over one token; 0 until
        such passes were timed.
        """
        target, _, _ = self._best_curves(batch)
        plain = target.at(1)
        return max(0.0, target.capped_estimate(2, plain) / plain - 1) if plain and target.max_timed > 1 else 0.0

    def _max_loss(self, plain: float) -> float:
        """Return how many seconds the next round may take longer than plain decoding.

        The limit grows with the tokens decoded so far.

        Args:
            plain: Seconds of a target pass over one token.
        """
        starved = self._measured.waited_for_cpu
        totals, other_totals = self.drafting_totals[starved], self.drafting_totals[not starved]
        lost = sum(spent - gained * self.plain_seconds(batch) for batch, (spent, gained) in totals.items())
        for batch, (spent, gained) in other_totals.items():  # in passes, as the other clock measured them
            other_plain = self.plain_seconds(batch, not starved)
            lost += (spent / other_plain - gained) * self.plain_seconds(batch) if other_plain else 0.0
        return (self._loss_allowance + LOSS_PER_TOKEN * self._tokens) * plain - max(lost, -LOSS_OF_GAINS * plain)

    def _rate_plans(
        self, target: CostCurve, chain: CostCurve, tree: CostCurve, chances: Sequence[float], reach: int
    ) -> list[RatedPlan]:
        """Rate all plans of fewer than `reach` nodes, the best plan first.

        Args:
            target, chain, tree: Cost curves, as `_curves` returns them.
            chances: [i]: chance that node i + 1 of a chain is accepted if node i was.
        """
        acceptance, plain = self._acceptance, target.at(1)
        drafted, gains = range(1, MAX_CHAIN_NODES + 1), list(accumulate(accumulate(chances, _product)))
        if self._stops:
            drafted, gains = acceptance.ending_chains(chances)
        plans = [(plan, gains[plan.nodes - 1], chain) for plan in CHAIN_PLANS if plan.nodes < reach]
        if acceptance.chains_only < 2:
            plans += [
                (plan, acceptance.tree(plan.nodes, plan.depth, chances), tree if tree.max_timed else chain)
                for plan in TREE_PLANS
                if plan.nodes < reach
            ]
        rated: list[RatedPlan] = []
        for plan, gain, draft in plans:
            if plan.nodes == plan.depth:
                nodes = levels = drafted[plan.nodes - 1]
            else:
                nodes, levels = plan.nodes, plan.depth
            expected = acceptance.offered * target.at(nodes + 1) + (1 - acceptance.offered) * plain + draft.at(levels)
            rated.append(RatedPlan((1 + gain) / max(expected, MIN_ROUND_SECONDS), gain, plan, draft))
        return sorted(rated, key=lambda plan: plan.rate, reverse=True)

    def _choose(self, batch: int) -> tuple[Plan, bool]:
        """Choose the next plan.

        Returns:
            The plan, and whether it is a trial draft, which is made only to measure.
        """
        target, chain, tree = self._best_curves(batch)
        if self._must_time_plain(batch, target):
            return NO_DRAFT, False
        acceptance, plain = self._acceptance, target.at(1)
        chances = acceptance.chain()
        is_reliable = chances[0] > RELIABLE_ACCEPTANCE
        rated = self._rate_plans(target, chain, tree, chances, self._reach(target, chain))
        self._rate = rated[0].rate
        # The curves may be measured at another batch size. So the allowed loss is multiplied by the ratio of the times
        # of a one-token pass at the two batch sizes.
        own_plain = self.plain_seconds(batch)
        max_loss = self._max_loss(own_plain) * plain / own_plain if own_plain else self._loss_allowance * plain

        # the plans that lose at most the allowed time if nothing is accepted, those with most tokens per second first
        affordable = (plan for plan in rated if self._possible_loss(plan, target, is_reliable) <= max_loss)
        best = next(affordable, RatedPlan(0.0, 0.0, NO_DRAFT, chain))
        if best.rate * plain < MIN_SPEEDUP:
            return self._choose_unprofitable([best, *affordable], plain, chain)
        chosen = _most_accepted(best, affordable, plain)
        if chosen.nodes > chosen.depth and not acceptance.prior and acceptance.since_chain >= acceptance.chain_gap:
            # Draft a chain now and then: only chains show how many nodes of a chain are accepted, and chains might
            # give more tokens per second.
            chains = [
                rating.plan
                for rating in rated
                if rating.plan.nodes == rating.plan.depth
                and self._possible_loss(rating, target, is_reliable) <= max_loss
            ]
            if chains:
                rarely = MAX_ENDING_CHAIN_TRIAL_GAP if self._stops else MAX_CHAIN_TRIAL_GAP
                acceptance.chain_gap = min(2 * acceptance.chain_gap, rarely)
                # A long chain costs little if the drafter ends the chain at the first unlikely token.
                return _longest(chains) if self._stops else chains[0], False
        return chosen, False

    def _must_time_plain(self, batch: int, target: CostCurve) -> bool:
        """Return whether the next round must have no draft, so that a pass over one token is timed."""
        curve = self._curves(batch)[0]
        if curve.timed >= MIN_ROUNDS_AT_BATCH_SIZE and not curve.samples(1):
            return True
        # an accuracy that was estimated beforehand (a prior) counts as one timed pass without a draft
        timed_plain = min(target.samples(1) + bool(self._acceptance.prior), len(PLAIN_EVERY) - 1)
        return self._rounds_since_plain >= PLAIN_EVERY[timed_plain]

    def _reach(self, target: CostCurve, chain: CostCurve) -> int:
        """Return the number of nodes that the next draft must stay below; it grows as longer passes are timed."""
        if not chain.max_timed:
            return 2  # the first draft has one node, because the drafter's cost is not known yet
        first = INITIAL_MAX_NODES_WITH_PRIOR if self._acceptance.prior or self._stops else INITIAL_MAX_NODES
        return max(first + 1, 2 * target.max_timed)

    def _possible_loss(self, rated: RatedPlan, target: CostCurve, is_reliable: bool) -> float:
        """Return the seconds that a draft costs, compared with plain decoding, if none of its tokens is accepted.

        Args:
            is_reliable: Whether the drafter's first token is usually accepted.
        """
        plan, draft, plain = rated.plan, rated.draft, target.at(1)
        columns = plan.nodes + 1
        loss = target.capped_estimate(columns, plain) + draft.pessimistic_estimate(plan.depth) - plain
        timed = target.samples(columns)
        if is_reliable and timed and min(timed, draft.samples(plan.depth)) < MIN_BUCKET_TIMINGS:
            loss = min(loss, self._loss_allowance / 2 * plain)  # one slow pass must not exclude a reliable drafter
        return loss

    def _choose_unprofitable(
        self, affordable: Sequence[RatedPlan], plain: float, chain: CostCurve
    ) -> tuple[Plan, bool]:
        """Choose while no draft is expected to pay: now and then a trial draft, to measure whether one does now.

        Args:
            affordable: The best plan first; it has no nodes if no draft is affordable.
        """
        small = [rated.plan for rated in affordable if rated.plan.nodes <= MAX_TRIAL_NODES]
        chains = [plan for plan in small if plan.nodes == plan.depth >= 1] if self._stops else []
        if self._rounds_since_trial < self._acceptance.gap or not affordable[0].rate:
            is_free = bool(chains and chain.max_timed) and chain.at(1) <= NEGLIGIBLE_LOSS * plain
            return _longest(chains) if is_free else NO_DRAFT, False
        if chains:
            # A drafter that ends its chains itself wastes little on a long one. Where a pass over two tokens takes much
            # longer than one over one token, a single node could never show that longer drafts pay.
            return _longest(chains), True
        return next(iter(small), NO_DRAFT), True


def _most_accepted(best: RatedPlan, others: Iterable[RatedPlan], plain: float) -> Plan:
    """Return the plan with the most accepted tokens among those of nearly the best rate: times are noisier than counts.

    Args:
        others: The other plans, those of the highest rates first.
        plain: Seconds of a target pass over one token.
    """
    most = best
    for rated in others:
        if rated.rate < max(NEARLY_BEST * best.rate, MIN_SPEEDUP / plain):
            break
        if rated.accepted > most.accepted:
            most = rated
    return most.plan


def _longest(plans: Sequence[Plan]) -> Plan:
    return max(plans, key=lambda plan: plan.nodes)


def _product(left: float, right: float) -> float:
    return left * right


def make_budget(
    statistics: DecodingStatistics, target: Target, drafter: Drafter | None, nodes: Nodes
) -> tuple[Budget, TreeShape | None]:
    """Make the budget of one `generate` call, and the object that shapes its trees, from earlier calls' measurements.

    Args:
        drafter: None for plain decoding.
        nodes: Fixed size of every draft, or (nodes, depth) of a tree; None: the budget chooses a size before each
            round.

    Returns:
        The budget, and the tree shape; None for a drafter without `Needs.prior`, which shapes its trees itself.
    """
    if drafter is None or nodes == 0:
        return Budget.fixed(0), None
    prior = drafter.needs.prior
    if nodes is not None and prior is None:
        return _fixed_budget(nodes), None
    key = MeasurementKey(target.name, str(target.device), drafter.name)
    shape = None if prior is None else statistics.accuracy(key, prior)
    if nodes is not None:
        return _fixed_budget(nodes), shape
    return Budget(statistics, key, () if prior is None else prior.chain, drafter.needs.may_stop_early), shape


def _fixed_budget(nodes: int | tuple[int, int]) -> Budget:
    return Budget.fixed(*nodes) if isinstance(nodes, tuple) else Budget.fixed(nodes)
