"""Chooses before each round how many tokens to draft, so that decoding is expected to be fastest.

The target passes over the last token and k drafted ones. A chain of k nodes yields (1 + E(k)) / (T(1 + k) + D(k))
tokens per second in each row. E is the expected number of accepted nodes. T is the time of the target's pass, by its
number of tokens. D is the drafter's time. Plain decoding yields 1 / T(1). This is the hardware-aware objective of
Sequoia (Chen et al. 2024, section 3.3), but T and D are measured while decoding, not in advance.

- T and D are curves through measured times (monotone, piecewise linear). Similar sizes share a bucket, and each bucket
  is represented by the lower quartile of its times, because a single time may be several times too long.
- E of a chain follows from p_i, the probability that node i is accepted if node i - 1 was. For trees, the mean number
  of accepted nodes is measured for each tree size.
- Some drafters estimate their own accuracy and end a chain early. The chain ends at the first node that is too
  unlikely to be accepted together with all nodes before it. The limit is (seconds of one more node) x (tokens per
  second in each row).
- If the thread waited for a CPU, wall time shows how busy the machine is, so CPU time is recorded instead. Both clocks
  have curves of their own, because CPU time on a busy machine is longer than wall time on an idle one: comparing a pass
  of one kind with a pass of the other would say nothing about drafts. The curves of the last round's kind are used.
- Acceptance is counted twice: over all calls, and for this call, which begins with a small weight of the others. So a
  text that is hard to draft stops drafts within a few rounds, but does not stop them in the next call.
- Each call has an allowance, the time that its drafts may lose against plain decoding. If a draft may lose more, the
  round has none. The fewer rounds were counted, the less its expected tokens are relied on.
- While no draft is expected to pay, trial drafts show whether one does now. Together, the trials of all calls may lose
  a fixed share of the time, so trials are as frequent as they are cheap.

Planning takes a few tens of microseconds a round. Measurements are stored in `DecodingStatistics`, which several
`generate` calls may share. The allowance belongs to one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import NamedTuple, Protocol, final

from mmdec.core.statistics import MAX_CHAIN_NODES, CostCurve, DecodingStatistics, MeasurementKey
from mmdec.errors import InputError
from mmdec.types import Drafter, Plan, Target, TreeShape

# a draft's size: nodes of a chain, or (nodes, depth) of a tree; None: the budget chooses it each round
DraftSize = int | tuple[int, int] | None

# the numbers of drafted tokens that the budget compares; the target's pass has one token more, the root
CHAIN_PLANS = tuple(Plan(nodes, nodes) for nodes in (1, 2, 3, 5, 7, 11, 15, 23, MAX_CHAIN_NODES))
TREE_PLANS = (Plan(7, 3), Plan(11, 5), Plan(15, 4), Plan(15, 7), Plan(31, 5), Plan(63, 6))
INITIAL_MAX_NODES = 3  # maximum nodes of a draft at first; the maximum grows as longer target passes are timed
# the same for drafters whose accuracy was estimated beforehand, or that may end chains early
INITIAL_MAX_NODES_WITH_PRIOR = 7
NEARLY_BEST = 0.93  # draft sizes with at least this share of the best tokens per second count as equal: times are noisy
MIN_SPEEDUP = 1.02  # a draft must be expected to give at least this many times the tokens per second of plain decoding
# Allowances and the share of trials were tried in replays of recorded drafts with a fake clock, on a calm and on a busy
# machine: docs/log/drafters.md has the figures, and what else was tried.
INITIAL_ALLOWANCE = 2.0  # maximum time that a call's drafts may lose at first, in passes over one token
# the same for drafters of unknown accuracy: 2 passes are a tenth of an answer of 20 tokens
INITIAL_ALLOWANCE_WITHOUT_PRIOR = 1.0
ALLOWANCE_PER_TOKEN = 0.04  # each new token raises the allowance by this
MAX_ALLOWANCE = 8.0  # what drafts gain raises the allowance up to this
TRIALS_PER_TOKEN = 0.01  # each new token lets trial drafts lose this much more time, in passes over one token
MAX_CHAIN_TRIAL_GAP = 96  # maximum rounds with trees before a chain is tried again, to measure what chains accept
MAX_ENDING_CHAIN_TRIAL_GAP = 24  # the same for drafters that may end chains early: their chains cost little
# after this many rounds at a batch size, its own times are used; before, those of a larger batch size
MIN_ROUNDS_AT_BATCH_SIZE = 6
# maximum nodes of a trial draft, that is, of a draft made only to measure whether drafting pays now
MAX_TRIAL_NODES = 7
NODE_COST_CHAIN_LENGTH = 8  # the time of one more node is estimated from chains of at most this many nodes
# a chain ends below this acceptance probability, until enough is timed to compute a better limit
DEFAULT_STOP_PROBABILITY = 0.3
STOP_PROBABILITY_RANGE = (0.02, 0.6)  # least and largest value of the computed limit, an acceptance probability
MIN_ROUND_SECONDS = 1e-9  # least seconds of a round, to divide by: a coarse clock may measure 0
# [n]: after n timed passes without a draft, maximum number of rounds with drafts before the next pass without a draft
PLAIN_EVERY = (0, 0, 8, 16, 32, 64)
NO_DRAFT = Plan(0, 0)


class RatedPlan(NamedTuple):
    """A plan, with what it is expected to bring."""

    rate: float  # tokens per second in each batch row
    accepted: float  # number of accepted nodes
    plan: Plan
    draft: CostCurve  # the drafter's seconds


@dataclass(frozen=True)
class RoundCosts:
    """What a round cost, and how much of its draft was accepted."""

    batch: int  # number of rows
    draft_sizes: Sequence[int]  # each row's number of nodes, root included
    depth: int  # depth of the deepest node
    accepted: Sequence[int]  # each row's number of accepted nodes, root excluded
    # Seconds of the target's pass, and of the drafter (0: it was not called). Wall time; CPU time if `waited_for_cpu`.
    target_seconds: float
    draft_seconds: float
    waited_for_cpu: bool = False  # whether the thread waited for a free CPU
    # mean number of nodes that the pass computed for each row, rounded up; None: those of the largest draft
    mean_nodes_per_row: int | None = None


class DraftBudget(Protocol):
    """Chooses the size of each draft from what earlier rounds cost and gained."""

    def plan(self, batch: int) -> Plan:
        """Return the maximum size of the next draft for `batch` rows. If it has 0 nodes, the drafter is not called."""
        ...

    def observe(self, costs: RoundCosts) -> None:
        """Record the round that `plan` planned last."""
        ...


@final
class FixedBudget:
    """Plans the same draft in every round.

    Args:
        nodes: Number of drafted tokens; 0: plain decoding.
        depth: Maximum depth of the tree; None: a chain.
    """

    def __init__(self, nodes: int, depth: int | None = None) -> None:
        if nodes < 0:
            raise InputError(f"`nodes` must be at least 0, but is {nodes}. 0 is plain decoding.")
        if depth is not None and not (1 if nodes else 0) <= depth:
            raise InputError(f"`depth` must be at least 1, but is {depth}. Leave it out for a chain.")
        self._plan = Plan(nodes, nodes if depth is None else min(depth, nodes))

    def plan(self, batch: int) -> Plan:
        return self._plan

    def observe(self, costs: RoundCosts) -> None:
        """Measure nothing."""


@final
class Budget:
    """Chooses the draft size of each round of one `generate` call, and records times and accepted tokens.

    It holds what this call's drafts have cost and brought. Its other measurements go to a `DecodingStatistics`, where
    later calls read them.

    Args:
        statistics: Measurements of earlier calls; this call adds to them.
        key: Names of target, device and drafter.
        prior: [i]: estimated probability that node i + 1 of a chain is accepted if node i was; used before
            measurements.
        may_stop_early: Whether the drafter may end chains early.
    """

    def __init__(
        self,
        statistics: DecodingStatistics,
        key: MeasurementKey,
        prior: Sequence[float] = (),
        may_stop_early: bool = False,
    ) -> None:
        self._may_stop_early = may_stop_early
        self._has_prior = bool(prior)
        self._plan = Plan(0, 0)
        self._is_trial = False  # whether the plan is a trial draft: no gain is expected from it, it only measures
        self._rounds_since_plain = 0  # rounds since the last target pass without a draft
        self._rate = 0.0  # tokens per second in each batch row that the best draft size is expected to give
        # passes over one token that this call's drafts may still lose
        self.allowance = INITIAL_ALLOWANCE if may_stop_early or prior else INITIAL_ALLOWANCE_WITHOUT_PRIOR
        self._lock = statistics.lock
        with self._lock:
            self._measured = statistics.pair(key, prior)
            self.acceptance = self._measured.acceptance.at_start_of_call()

    def plan(self, batch: int) -> Plan:
        """Return the draft size of the next round for `batch` rows."""
        with self._lock:
            self._plan, self._is_trial = self._choose(batch)
            if self._may_stop_early and self._plan.is_chain and self._plan.nodes:
                self._plan = replace(
                    self._plan,
                    threshold=self._threshold(batch),
                    min_expected_accepted=self._min_expected_accepted(batch),
                )
        return self._plan

    def observe(self, costs: RoundCosts) -> None:
        """Record the times and the accepted tokens of the round that `plan` planned last."""
        with self._lock:
            self._measured.waited_for_cpu = costs.waited_for_cpu
            target, chain, tree = self._curves(costs.batch)
            size, plan, acceptance = max(costs.draft_sizes), self._plan, self.acceptance
            nodes = size if costs.mean_nodes_per_row is None else costs.mean_nodes_per_row
            target.add(nodes, costs.target_seconds)
            self._rounds_since_plain = 0 if nodes == 1 else self._rounds_since_plain + 1
            tokens = 1 + sum(costs.accepted) / len(costs.accepted)
            self.allowance = min(self.allowance + ALLOWANCE_PER_TOKEN * tokens, MAX_ALLOWANCE)
            self._measured.allow_trials(TRIALS_PER_TOKEN * tokens)
            if not plan.nodes:
                return
            for counts in (acceptance, self._measured.acceptance):
                counts.learn(plan, costs.draft_sizes, costs.depth, costs.accepted, self._may_stop_early)
            draft = chain if plan.is_chain else tree
            ending = self._may_stop_early and plan.is_chain
            levels = max(size - 1, 1) if ending else plan.depth
            if size > 1 or not ending:
                draft.add(levels, costs.draft_seconds)  # a chain that ended before its first node has no depth
            plain = self.plain_seconds(costs.batch)
            if plain:
                gain = tokens - 1 - _extra_passes(target, draft, nodes, levels, plain)
                self.allowance = min(self.allowance + gain, MAX_ALLOWANCE)
                if self._is_trial:
                    self._measured.allow_trials(gain)

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
        curves, measured, own_power = self._curves(batch), self._measured, (batch - 1).bit_length()
        if curves[0].timed < MIN_ROUNDS_AT_BATCH_SIZE or not curves[0].samples(1):
            for waited in (measured.waited_for_cpu, not measured.waited_for_cpu):
                for power in measured.powers(waited):
                    if power > own_power or (power == own_power and waited is not measured.waited_for_cpu):
                        target, chain, tree = measured.costs(power, waited)
                        if (
                            target.timed >= MIN_ROUNDS_AT_BATCH_SIZE
                            and target.samples(1)
                            and (chain.max_timed or tree.max_timed)
                        ):
                            return target, chain, tree
        return curves

    def plain_seconds(self, batch: int, waited_for_cpu: bool | None = None) -> float:
        """Return the seconds of a target pass over one token per batch row.

        If no such pass was timed at this batch size, the seconds are estimated from longer passes; 0 if nothing was
        timed.

        Args:
            waited_for_cpu: Whether to return CPU time as measured while the thread waited for a CPU; None: as in the
                last round.
        """
        if waited_for_cpu is not None and waited_for_cpu is not self._measured.waited_for_cpu:
            return self._measured.costs((batch - 1).bit_length(), waited_for_cpu)[0].at(1)
        target = self._curves(batch)[0]
        if target.samples(1) or not target.max_timed:
            return target.at(1)
        measured = self._best_curves(batch)[0]
        longer = measured.at(target.max_timed)
        return target.pessimistic_estimate(target.max_timed) * measured.at(1) / longer if longer else 0.0

    def _threshold(self, batch: int) -> float:
        """Return the acceptance probability below which a chain's next node is expected to lose time.

        It is `DEFAULT_STOP_PROBABILITY` if too little was timed.
        """
        target, chain, _ = self._best_curves(batch)
        nodes = min(target.max_timed - 1, chain.max_timed, NODE_COST_CHAIN_LENGTH)
        if nodes < INITIAL_MAX_NODES:
            return DEFAULT_STOP_PROBABILITY
        seconds = (target.at(nodes + 1) - target.at(2) + chain.at(nodes) - chain.at(1)) / (nodes - 1)
        lowest, highest = STOP_PROBABILITY_RANGE
        return min(max(seconds * self._rate, lowest), highest)

    def _min_expected_accepted(self, batch: int) -> float:
        """Return how many accepted tokens a draft must bring to save time.

        This is the extra time of a target pass over two tokens, divided by the time of a pass over one token; 0 until
        such passes were timed.
        """
        target, _, _ = self._best_curves(batch)
        plain = target.at(1)
        return max(0.0, target.capped_estimate(2, plain) / plain - 1) if plain and target.max_timed > 1 else 0.0

    def _rate_plans(
        self, target: CostCurve, chain: CostCurve, tree: CostCurve, probabilities: Sequence[float], reach: int
    ) -> list[RatedPlan]:
        """Rate all plans of fewer than `reach` nodes, the best plan first.

        Args:
            target, chain, tree: Cost curves, as `_curves` returns them.
            probabilities: [i]: probability that node i + 1 of a chain is accepted if node i was.
        """
        acceptance, plain = self.acceptance, target.at(1)
        drafted: Sequence[float] = range(1, MAX_CHAIN_NODES + 1)
        gains: list[float] = list(accumulate(accumulate(probabilities, mul)))
        if self._may_stop_early:
            drafted, gains = acceptance.ending_chains(probabilities)
        plans = [(plan, gains[plan.nodes - 1], chain) for plan in CHAIN_PLANS if plan.nodes < reach]
        if not acceptance.makes_only_chains:
            plans += [
                (plan, acceptance.tree(plan.nodes, plan.depth, probabilities), tree if tree.max_timed else chain)
                for plan in TREE_PLANS
                if plan.nodes < reach
            ]
        rated: list[RatedPlan] = []
        for plan, gain, draft in plans:
            if plan.is_chain:
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
        acceptance, plain = self.acceptance, target.at(1)
        probabilities = acceptance.chain()
        rated = self._rate_plans(target, chain, tree, probabilities, self._reach(target, chain))
        self._rate = rated[0].rate

        # the plans that may lose at most the allowance, those with most tokens per second first
        affordable = (plan for plan in rated if self._loss(plan, target) <= self.allowance)  # lazy: a loss costs time
        best = next(affordable, RatedPlan(0.0, 0.0, NO_DRAFT, chain))
        if best.rate * plain < MIN_SPEEDUP:
            return self._choose_trial(rated, target), True
        chosen = _most_accepted(best, affordable, plain)
        if not chosen.is_chain and not self._has_prior and acceptance.since_chain >= acceptance.chain_gap:
            # Draft a chain now and then: only chains show how many nodes of a chain are accepted, and chains might
            # give more tokens per second.
            chains = [
                rating.plan for rating in rated if rating.plan.is_chain and self._loss(rating, target) <= self.allowance
            ]
            if chains:
                rarely = MAX_ENDING_CHAIN_TRIAL_GAP if self._may_stop_early else MAX_CHAIN_TRIAL_GAP
                acceptance.chain_gap = min(2 * acceptance.chain_gap, rarely)
                self._measured.acceptance.chain_gap = acceptance.chain_gap
                # A long chain costs little if the drafter ends the chain at the first unlikely token.
                return _longest(chains) if self._may_stop_early else chains[0], False
        return chosen, False

    def _must_time_plain(self, batch: int, target: CostCurve) -> bool:
        """Return whether the next round must have no draft, so that a pass over one token is timed."""
        curve = self._curves(batch)[0]
        if curve.timed >= MIN_ROUNDS_AT_BATCH_SIZE and not curve.samples(1):
            return True
        # an accuracy that was estimated beforehand (a prior) counts as one timed pass without a draft
        timed_plain = min(target.samples(1) + self._has_prior, len(PLAIN_EVERY) - 1)
        return self._rounds_since_plain >= PLAIN_EVERY[timed_plain]

    def _reach(self, target: CostCurve, chain: CostCurve) -> int:
        """Return the number of nodes that the next draft must stay below; it grows as longer passes are timed."""
        if not chain.max_timed:
            return 2  # the first draft has one node, because the drafter's cost is not known yet
        first = INITIAL_MAX_NODES_WITH_PRIOR if self._has_prior or self._may_stop_early else INITIAL_MAX_NODES
        return max(first + 1, 2 * target.max_timed)

    def _loss(self, rated: RatedPlan, target: CostCurve) -> float:
        """Return how many passes over one token a draft may lose, cautiously; 0 if it gains."""
        extra = _extra_passes(target, rated.draft, rated.plan.nodes + 1, rated.plan.depth, target.at(1))
        return max(extra - self._measured.acceptance.confidence * rated.accepted, 0.0)

    def _choose_trial(self, rated: Sequence[RatedPlan], target: CostCurve) -> Plan:
        """Choose a trial draft, which shows whether drafting pays now, if trials may lose what it is expected to lose.

        Args:
            rated: All plans, the best first.
        """
        small = [rating for rating in rated if rating.plan.nodes <= MAX_TRIAL_NODES]
        if self._may_stop_early:
            # A drafter that ends its chains itself wastes little on a long one. Where a pass over two tokens takes much
            # longer than one over one token, a single node could never show that longer drafts pay.
            chains = [rating for rating in small if rating.plan.is_chain]
            small = sorted(chains, key=lambda rating: rating.plan.nodes, reverse=True)
        for rating in small:
            if self._loss(rating, target) <= self._measured.trial_allowance:
                return rating.plan
        return NO_DRAFT


def _extra_passes(target: CostCurve, draft: CostCurve, tokens: int, levels: int, plain: float) -> float:
    """Return how much longer than a round without a draft a round may take, cautiously, in passes over one token.

    If the drafter was timed once, it is at most one pass for each level, because the first draft includes work
    that is done only once.

    Args:
        tokens: Number of tokens of the target's pass.
        levels: Depth of the draft.
        plain: Seconds of a target pass over one token.
    """
    plain = max(plain, MIN_ROUND_SECONDS)
    extra = (target.capped_estimate(tokens, plain) + draft.pessimistic_estimate(levels)) / plain - 1
    return min(extra, levels) if draft.samples(levels) == 1 else extra


def _most_accepted(best: RatedPlan, others: Iterable[RatedPlan], plain: float) -> Plan:
    """Return the plan with the most accepted tokens among those of nearly the best rate: times are noisier than counts.

    Args:
        others: The other plans, those of the highest rates first.
        plain: Seconds of a target pass over one token.
    """
    longest = best
    for rated in others:
        if rated.rate < max(NEARLY_BEST * best.rate, MIN_SPEEDUP / plain):
            break
        if rated.accepted > longest.accepted:
            longest = rated
    return longest.plan


def _longest(plans: Sequence[Plan]) -> Plan:
    return max(plans, key=lambda plan: plan.nodes)


def make_budget(
    statistics: DecodingStatistics, target: Target, drafter: Drafter | None, nodes: DraftSize
) -> tuple[Budget | FixedBudget, TreeShape | None]:
    """Make the budget of one `generate` call, and the object that shapes its trees, from earlier calls' measurements.

    Args:
        drafter: None for plain decoding.
        nodes: Fixed size of every draft, or (nodes, depth) of a tree; None: the budget chooses a size before each
            round.

    Returns:
        The budget, and the tree shape; None for a drafter without `Needs.prior`, which shapes its trees itself.
    """
    if drafter is None or nodes == 0:
        return FixedBudget(0), None
    prior = drafter.needs.prior
    fixed = None if nodes is None else FixedBudget(*nodes) if isinstance(nodes, tuple) else FixedBudget(nodes)
    if fixed is not None and prior is None:
        return fixed, None
    key = MeasurementKey(target.name, str(target.device), drafter.name)  # slow: it may hash the weights
    shape = None if prior is None else statistics.accuracy(key, prior)
    return fixed or Budget(statistics, key, () if prior is None else prior.chain, drafter.needs.may_stop_early), shape
