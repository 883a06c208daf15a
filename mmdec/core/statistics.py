"""Measurements of decoding that later `generate` calls use.

They are the seconds of target passes and of the drafter (`CostCurve`), how often drafts were accepted (`Acceptance`),
and the accuracy of heads (`HeadAccuracy`). `DecodingStatistics` holds them. Calls that get the same object share its
measurements. Threads may share it, too: take `lock` to read or write its contents. It can be copied and pickled.

Measurements are stored by the names of the target's and the drafter's weights and of the device (`MeasurementKey`), not
by memory addresses, because a later model may get the same address. At most `MAX_STORED_PAIRS` pairs are stored; the
least recently used are dropped.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, final

from mmdec.core.tree_shape import HeadAccuracy
from mmdec.types import Plan, Prior

MAX_CHAIN_NODES = 31  # maximum nodes of a chain that are observed
ROUND_DECAY = 0.95  # each new round multiplies the weight of all earlier rounds by this factor
# the same factor for chains that end early: their shares change slowly, so old rounds are still valid
ENDING_CHAIN_DECAY = 0.98
LONG_DECAY = 0.995  # the same factor for what is counted over all calls
MAX_WEIGHT_OF_CALLS = 6.0  # a call begins with the counts of all calls, with the weight of at most this many rounds
CONFIDENCE_WEIGHT = 4.0  # after this many counted rounds, half of an expected number of accepted nodes is relied on
DEFAULT_ACCEPTANCE = 0.6  # assumed probability that a node is accepted, before any observation
CHAIN_GAP = 6  # rounds with trees until a chain is drafted, only to measure what chains accept
PRIOR_WEIGHT = 2.0  # the assumed acceptance probability has the weight of this many observed rounds
MAX_BUCKET_TIMINGS = 15  # maximum timings that are stored for each bucket of a cost curve; older ones are dropped
# minimum timings of a bucket of the target's cost curve; buckets with fewer are ignored as too noisy
MIN_BUCKET_TIMINGS = 3
MAX_TRIAL_ALLOWANCE = 1.0  # maximum time that trial drafts may lose, in passes over one token
MAX_STORED_PAIRS = 256  # maximum pairs of target and drafter that are stored; the least recently used ones are dropped


@dataclass
class ChainNode:
    """What was observed of node i of chains.

    Each field is a sum over rounds, in which older rounds weigh less, of the share of rows in which this happened.
    """

    tried: float = 0.0  # the node was drafted, and node i - 1 was accepted
    accepted: float = 0.0
    # the same for chains that may end early, in rounds whose plan included the node
    planned: float = 0.0  # all of these rounds
    nonempty: float = 0.0  # those with at least one drafted node
    drafted: float = 0.0  # those in which the node was drafted
    accepted_if_planned: float = 0.0

    def at_start_of_call(self) -> ChainNode:
        """Return a copy in which all rounds so far have little weight."""
        tried, planned = _scale(self.tried), _scale(self.planned)
        return ChainNode(
            tried=tried * self.tried,
            accepted=tried * self.accepted,
            planned=planned * self.planned,
            nonempty=planned * self.nonempty,
            drafted=planned * self.drafted,
            accepted_if_planned=planned * self.accepted_if_planned,
        )


@final
class Acceptance:
    """How often the drafts of one drafter are accepted by one target; recent rounds weigh more.

    For chains it holds a probability for each node, for trees the mean number of accepted nodes of each tree size. A
    drafter may end a chain early where it is unsure. For such chains it also counts how often node i is drafted, and
    how often it is accepted.

    Args:
        prior: Estimated probabilities p_1, p_2, ... that node i of a chain is accepted if node i - 1 was; nodes beyond
            the last count as never accepted. Empty: unknown.
        decay: Each new round multiplies the weight of all earlier rounds by this factor.
        ending_decay: The same for chains that end early.
    """

    def __init__(
        self, prior: Sequence[float] = (), decay: float = ROUND_DECAY, ending_decay: float = ENDING_CHAIN_DECAY
    ) -> None:
        self.prior, self._decay, self._ending_decay = list(prior)[:MAX_CHAIN_NODES], decay, ending_decay
        self.nodes = [ChainNode() for _ in range(MAX_CHAIN_NODES)]  # [i]: node i + 1 of chains
        # tree size (nodes, depth) -> (sum of the rounds' weights, weighted sum of accepted nodes per row)
        self.trees: dict[tuple[int, int], tuple[float, float]] = {}
        # of all trees, older rounds weighing less: number of accepted nodes, and the number that the probabilities of
        # chains predicted
        self.tree_accepted = self.tree_predicted = 0.0
        self.offered = 1.0  # share of the drafter's calls in which it returned a draft
        self.has_made_tree = False
        self.chains_for_trees = 0  # how often a tree was planned but the drafter made a chain, before its first tree
        self.since_chain = 0  # number of rounds with trees since the last chain
        self.chain_gap = CHAIN_GAP  # number of rounds with trees before a chain is tried; grows with each try
        self.rounds = 0.0  # sum of the weights of all rounds

    def at_start_of_call(self) -> Acceptance:
        """Return what one call counts: a copy in which all rounds so far have little weight."""
        counts = Acceptance(self.prior)
        counts.nodes = [node.at_start_of_call() for node in self.nodes]
        for size, (weight, accepted) in self.trees.items():
            counts.trees[size] = _scale(weight) * weight, _scale(weight) * accepted
        scale = _scale(self.tree_predicted)
        counts.tree_accepted, counts.tree_predicted = scale * self.tree_accepted, scale * self.tree_predicted
        counts.offered = self.offered
        counts.has_made_tree, counts.chains_for_trees = self.has_made_tree, self.chains_for_trees
        counts.since_chain, counts.chain_gap = self.since_chain, self.chain_gap
        return counts

    @property
    def makes_only_chains(self) -> bool:
        """Whether the drafter makes a chain even if a tree is planned."""
        return not self.has_made_tree and self.chains_for_trees >= 2

    @property
    def confidence(self) -> float:
        """The share of an expected number of accepted nodes that may be relied on: it grows with the counted rounds."""
        return self.rounds / (self.rounds + CONFIDENCE_WEIGHT)

    def chain(self, deepest: int = MAX_CHAIN_NODES) -> list[float]:
        """Return the probabilities p_i that node i of a chain is accepted if node i - 1 was, for i = 1 .. `deepest`.

        A node never observed gets the prior's probability; without a prior it gets the probability of node i - 1.
        """
        probabilities: list[float] = []
        before = DEFAULT_ACCEPTANCE
        for i, node in enumerate(self.nodes[:deepest], 1):
            if self.prior:
                before = self.prior[i - 1] if i <= len(self.prior) else 0.0
            probability = (node.accepted + PRIOR_WEIGHT * before) / (node.tried + PRIOR_WEIGHT)
            probabilities.append(probability)
            # An empty draft counts as a rejected node 1. So node 1 may have too low a probability to predict node 2.
            before = probability if i > 1 else max(probability, DEFAULT_ACCEPTANCE)
        return probabilities

    def ending_chains(self, probabilities: Sequence[float]) -> tuple[list[float], list[float]]:
        """Return the expected numbers of drafted and of accepted nodes of chains that may end early.

        Args:
            probabilities: [i]: probability that node i + 1 is accepted if node i was. A node never observed is assumed
                to be drafted as often as the node before it.

        Returns:
            Two lists; entry i is for chains of at most i + 1 nodes.
        """
        drafted: list[float] = []
        accepted: list[float] = []
        length = gain = 0.0
        share = reached = 1.0
        for node, probability in zip(self.nodes, probabilities, strict=False):
            share = (node.drafted + PRIOR_WEIGHT * share) / (node.nonempty + PRIOR_WEIGHT)
            reached = (node.accepted_if_planned + PRIOR_WEIGHT * reached * probability) / (node.planned + PRIOR_WEIGHT)
            length, gain = length + share, gain + reached
            drafted.append(length)
            accepted.append(gain)
        return drafted, accepted

    def tree(self, nodes: int, depth: int, probabilities: Sequence[float]) -> float:
        """Return the expected number of accepted nodes of a tree.

        A tree size without observations gets a prediction from the probabilities of chains. If earlier trees accepted
        fewer nodes than predicted, the prediction is reduced by this ratio.

        Args:
            probabilities: [i]: probability that node i + 1 of a chain is accepted if node i was.
        """
        weight, accepted = self.trees.get((nodes, depth), (0.0, 0.0))
        trust = min(1.0, (self.tree_accepted + 1) / (self.tree_predicted + 1))
        guess = expected_in_tree(nodes, depth, probabilities)
        return (accepted + PRIOR_WEIGHT * trust * guess) / (weight + PRIOR_WEIGHT)

    def learn(
        self, plan: Plan, sizes: Sequence[int], depth: int, accepted: Sequence[int], may_stop_early: bool = False
    ) -> None:
        """Add the result of one round.

        Args:
            plan: The draft size that the drafter was asked for.
            sizes: Each batch row's number of nodes, root included.
            depth: Depth of the deepest node.
            accepted: Each row's number of accepted nodes, root excluded.
            may_stop_early: Whether the drafter may end chains early.
        """
        longest = max(sizes)
        self.rounds = self._decay * self.rounds + 1
        self.offered = self._decay * self.offered + (1 - self._decay) * (longest > 1)
        is_chain = depth >= longest - 1
        if not plan.is_chain:
            if longest > 2:
                self.has_made_tree |= not is_chain
                self.chains_for_trees += is_chain
            self._learn_tree(plan, accepted)
        self.since_chain = 0 if is_chain else self.since_chain + 1
        if may_stop_early and plan.is_chain:
            self._learn_ending_chain(plan, longest, accepted)
        if is_chain:
            self._learn_chain(plan, sizes, accepted)

    def _learn_tree(self, plan: Plan, accepted: Sequence[int]) -> None:
        weight, total = self.trees.get((plan.nodes, plan.depth), (0.0, 0.0))
        mean = sum(accepted) / len(accepted)
        predicted = expected_in_tree(plan.nodes, plan.depth, self.chain(min(plan.depth, MAX_CHAIN_NODES)))
        self.trees[plan.nodes, plan.depth] = self._decay * weight + 1, self._decay * total + mean
        self.tree_accepted = self._decay * self.tree_accepted + mean
        self.tree_predicted = self._decay * self.tree_predicted + predicted

    def _learn_ending_chain(self, plan: Plan, longest: int, accepted: Sequence[int]) -> None:
        for i, node in enumerate(self.nodes[: plan.depth], 1):
            reached = sum(n >= i for n in accepted) / len(accepted)
            node.planned = self._ending_decay * node.planned + 1.0
            node.nonempty = self._ending_decay * node.nonempty + (longest > 1)
            node.drafted = self._ending_decay * node.drafted + (longest > i)
            node.accepted_if_planned = self._ending_decay * node.accepted_if_planned + reached

    def _learn_chain(self, plan: Plan, sizes: Sequence[int], accepted: Sequence[int]) -> None:
        rows = len(sizes)
        for i, node in enumerate(self.nodes[: plan.depth], 1):
            # Count the rows that tried node i: they drafted it and accepted node i - 1. An empty draft counts as a
            # rejected node 1.
            tried = sum(n >= i - 1 and (size > i or size == i == 1) for n, size in zip(accepted, sizes, strict=True))
            if not tried:
                break
            node.accepted = self._decay * node.accepted + sum(n >= i for n in accepted) / rows
            node.tried = self._decay * node.tried + tried / rows


def _scale(weight: float) -> float:
    return min(1.0, MAX_WEIGHT_OF_CALLS / weight) if weight else 1.0


def expected_in_tree(nodes: int, depth: int, probabilities: Sequence[float]) -> float:
    """Predict the number of accepted nodes of a tree from the acceptance probabilities of a chain.

    If a chain's node misses the target's token with probability m, a level of w nodes is assumed to miss it with
    probability m / sqrt(w). Measured probabilities for the 1, 2, 4 and 8 likeliest children: 0.43, 0.30, 0.22 and 0.16.

    Args:
        nodes, depth: Size of the tree, root excluded.
        probabilities: [i]: probability that node i + 1 of a chain is accepted if node i was.
    """
    miss = (depth / nodes) ** 0.5
    expected, alive = 0.0, 1.0
    for probability in probabilities[:depth]:
        alive *= 1 - (1 - probability) * miss
        expected += alive
    return expected


@final
class CostCurve:
    """Estimates the seconds of a target pass from its number of tokens, or a drafter's seconds from the draft's depth.

    The number of tokens or the depth is called the count. The newest timings are held in buckets of counts (1, 2, 3-4,
    5-8, ...). A monotone piecewise-linear curve goes through the lower quartiles of the buckets, so that a few slow
    timings do not move the curve.

    Args:
        slope: Beyond the largest timed count, the curve continues with its last slope times this factor.
        origin: Whether a count of 0 takes 0 seconds.
        enough: A bucket is used if it has at least this many timings; the bucket of count 1 needs only one timing.
    """

    def __init__(self, slope: float, origin: bool, enough: int) -> None:
        self._slope = slope
        self._enough = enough
        self._start = [(0.0, 0.0)] if origin else []
        self.windows: dict[int, deque[tuple[float, int]]] = {}  # bucket -> its newest timings (seconds, count)
        # bucket -> (mean number of tokens or depth, lower quartile of the seconds)
        self._quartiles: dict[int, tuple[float, float]] = {}
        # the points (tokens or depth, seconds) between which the curve is linear
        self._points: list[tuple[float, float]] = [*self._start]
        self.max_timed = 0  # the largest count that was timed
        self.timed = 0  # number of timings so far

    def samples(self, count: int) -> int:
        """Return the number of stored timings in the bucket of `count` (1, 2, 3-4, 5-8, ...)."""
        return len(self.windows.get((count - 1).bit_length(), ()))

    def add(self, count: int, seconds: float) -> None:
        """Add a timing: the seconds that a pass over `count` tokens, or a draft of depth `count`, took."""
        self.timed += 1
        bucket = (count - 1).bit_length()
        window = self.windows.setdefault(bucket, deque(maxlen=MAX_BUCKET_TIMINGS))
        window.append((seconds, count))
        self._summarise(bucket)
        self.max_timed = max(self.max_timed, count)
        self._connect()

    def _summarise(self, bucket: int) -> None:
        window = self.windows[bucket]
        quartile = sorted(sample for sample, _ in window)[(len(window) - 1) // 4]
        self._quartiles[bucket] = (sum(size for _, size in window) / len(window), quartile)

    def _connect(self) -> None:
        self._points = []
        lowest = math.inf
        for key in sorted(self._quartiles, reverse=True):
            size, quartile = self._quartiles[key]
            # a smaller count takes at most as long as a larger one, so that the curve is monotone
            lowest = min(lowest, quartile)
            if not key or len(self.windows[key]) >= self._enough:
                self._points.append((size, lowest))
        self._points += self._start
        self._points.reverse()

    def at(self, count: float) -> float:
        """Return the curve's seconds at `count`. It uses only buckets with enough timings.

        Below the curve's first point it returns the seconds of that point; without any timings 0.
        """
        if not self._points:
            return 0.0
        before = after = self._points[0]
        if count <= after[0]:
            return after[1]
        for point in self._points[1:]:
            before, after = after, point
            if count <= after[0]:
                return before[1] + (after[1] - before[1]) * (count - before[0]) / (after[0] - before[0])
        rise = (after[1] - before[1]) / (after[0] - before[0]) if after is not before else 0.0
        return after[1] + self._slope * rise * (count - after[0])

    def pessimistic_estimate(self, count: int) -> float:
        """Return a cautious estimate of the seconds at `count`: the lower quartile of the bucket, even of one timing.

        If `count` is above the largest timed count c, it is at least (seconds at c) x sqrt(count / c).
        """
        quartile = self._quartiles.get((count - 1).bit_length())
        if quartile:
            return quartile[1]
        largest = self._quartiles.get((self.max_timed - 1).bit_length()) if count > self.max_timed else None
        return max(self.at(count), largest[1] * (count / self.max_timed) ** 0.5) if largest else self.at(count)

    def capped_estimate(self, count: int, plain: float) -> float:
        """Return the cautious estimate of `pessimistic_estimate`, but at most `count` times `plain`.

        The limit is needed because the first pass over a new shape may be much slower than later ones.

        Args:
            plain: Seconds of a target pass over one token per batch row.
        """
        return min(self.pessimistic_estimate(count), count * plain)


@dataclass(frozen=True)
class MeasurementKey:
    """The key of stored measurements: the names of the target, of its device, and of the drafter."""

    target: str
    device: str
    drafter: str


@dataclass
class PairStatistics:
    """Measurements of one target with one drafter.

    Times are stored separately for batches of up to 1, 2, 4, ... rows. The key `power` stands for batches of up to 2 **
    power rows.

    Rounds in which the thread waited for a CPU have curves of CPU time. They show how fast this busy machine computes
    now, so no other drafter shares them.
    """

    target: dict[int, CostCurve]  # power -> seconds of a target pass by tokens per row; shared by the target's drafters
    acceptance: Acceptance
    # power -> seconds of the drafter for a chain of tokens, by the length of the chain
    chains: dict[int, CostCurve] = field(default_factory=lambda: {})
    trees: dict[int, CostCurve] = field(default_factory=lambda: {})  # the same for a tree
    accuracy: HeadAccuracy | None = None  # only for drafters that guess each depth independently (`Needs.prior`)
    waited_for_cpu: bool = False  # whether the thread waited for a CPU in the last round
    # power -> CPU seconds of rounds that waited for a CPU: of the target's passes, the drafter's chains, its trees
    waiting_costs: dict[int, tuple[CostCurve, CostCurve, CostCurve]] = field(default_factory=lambda: {})
    trial_allowance: float = MAX_TRIAL_ALLOWANCE  # passes over one token that trial drafts may still lose

    def allow_trials(self, passes: float) -> None:
        """Add `passes` over one token to what trial drafts may still lose; a negative number is what they have lost."""
        self.trial_allowance = min(self.trial_allowance + passes, MAX_TRIAL_ALLOWANCE)

    def powers(self, waited_for_cpu: bool = False) -> list[int]:
        """Return the keys of the batch sizes that have cost curves, in ascending order."""
        return sorted(self.waiting_costs if waited_for_cpu else self.target)

    def costs(self, power: int, waited_for_cpu: bool = False) -> tuple[CostCurve, CostCurve, CostCurve]:
        """Return the cost curves for batches of up to 2 ** power rows.

        Args:
            power: Logarithm of the batch size to base 2, rounded up.
            waited_for_cpu: Whether to return the CPU seconds of the rounds in which the thread waited for a CPU.

        Returns:
            Seconds of the target's passes, of the drafter's chains, and of its trees.
        """
        if waited_for_cpu:
            if power not in self.waiting_costs:
                self.waiting_costs[power] = target_curve(), drafter_curve(), drafter_curve()
            return self.waiting_costs[power]
        if power not in self.target:
            self.target[power] = target_curve()
        if power not in self.chains:
            self.chains[power], self.trees[power] = drafter_curve(), drafter_curve()
        return self.target[power], self.chains[power], self.trees[power]


def target_curve() -> CostCurve:
    """Return an empty cost curve for a target: seconds of a pass by its number of tokens per batch row."""
    return CostCurve(0.5, False, MIN_BUCKET_TIMINGS)


def drafter_curve() -> CostCurve:
    """Return an empty cost curve for a drafter: seconds by the draft's depth."""
    return CostCurve(1.0, True, 1)


@final
class DecodingStatistics:
    """Measured seconds of passes and shares of accepted drafts, from which later calls choose the size of their drafts.

    Pass the same object to several calls of `generate`, `stream`, `speculate`, `transcribe` or `describe`. Its times
    hold for one machine only: do not use a copy on another machine.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self._targets: dict[tuple[str, str], dict[int, CostCurve]] = {}  # target, device -> power -> curve
        self._pairs: dict[MeasurementKey, PairStatistics] = {}  # the least recently used first

    def __getstate__(self) -> dict[str, Any]:
        """Return a snapshot of the measurements for a copy, without the lock, which cannot be copied."""
        with self.lock:
            return copy.deepcopy({"_targets": self._targets, "_pairs": self._pairs})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.lock = RLock()
        vars(self).update(state)

    def pair(self, key: MeasurementKey, prior: Sequence[float] = ()) -> PairStatistics:
        """Return the measurements of one target with one drafter; creates empty ones if there are none.

        Args:
            key: Names of target, device and drafter.
            prior: For a new key: [i]: estimated probability that node i + 1 of a chain is accepted if node i was; ():
                unknown.
        """
        with self.lock:
            statistics = self._pairs.pop(key, None)
            if statistics is None:
                target = self._targets.setdefault((key.target, key.device), {})
                statistics = PairStatistics(target, Acceptance(prior, LONG_DECAY, LONG_DECAY))
            self._pairs[key] = statistics
            while len(self._pairs) > MAX_STORED_PAIRS:
                self._drop(next(iter(self._pairs)))
            return statistics

    def accuracy(self, key: MeasurementKey, prior: Prior) -> HeadAccuracy:
        """Return the counts of how often the drafter's k-th best token (rank k) was right at each depth.

        Args:
            prior: Initial probabilities. They are used if there are no counts with the same numbers of depths and ranks
                yet.
        """
        with self.lock:
            statistics = self.pair(key, prior.chain)
            accuracy = statistics.accuracy
            if accuracy is None or (accuracy.depth, accuracy.width) != (len(prior.ranks), len(prior.ranks[0])):
                accuracy = statistics.accuracy = HeadAccuracy(prior.ranks)
            return accuracy

    def clear(self) -> None:
        """Remove all measurements. Calls in progress continue with the measurements that they began with."""
        with self.lock:
            self._pairs.clear()
            self._targets.clear()

    def _drop(self, key: MeasurementKey) -> None:
        del self._pairs[key]
        if not any((other.target, other.device) == (key.target, key.device) for other in self._pairs):
            self._targets.pop((key.target, key.device), None)
