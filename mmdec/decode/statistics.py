"""`DecodingStatistics` stores what a run measures, for later runs: the seconds of passes (`CostCurve`), the acceptance
of drafts (`Acceptance`), and the accuracy of heads.

The object is passed in: runs that share it use each other's measurements; runs with different objects are independent.
It belongs to no model and no drafter. Threads may share it: take `lock` to read or write its contents. A saved file
carries the measurements to a new process.

Keys are the names of weights (`Target.name`, `Drafter.name`) and the device, never memory addresses, which a later
model may reuse. At most `MOST` pairs are stored; the least recently used are dropped.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import RLock
from typing import Any, final

from mmdec.checks.files import write_whole
from mmdec.decode.tree import HeadAccuracy
from mmdec.types import InputError, Plan, Prior

DEEPEST = 31  # maximum nodes of a chain
FADE = 0.95  # per round, the weight of earlier rounds decays by this factor
SLOW = 0.98  # the same factor for chains that end early: their statistics change little, so old rounds stay useful
UNKNOWN = 0.6  # assumed acceptance chance of a node without any observation
CHAIN_GAP = 6  # rounds with trees until the first trial chain
PRIOR_WEIGHT = 2.0  # a drafter's prior counts as so many observed rounds
WINDOW = 15  # maximum timings that are stored for each bucket of a cost curve: the newest ones
FORMAT = {"format": "mmdec decoding statistics", "version": 1}
LARGEST = 16 << 20  # maximum bytes of a file of statistics
ENOUGH = 3  # minimum timings of a bucket of the target's curve: with fewer it is not used
MOST = 256  # maximum pairs of target and drafter that are stored


@final
class Acceptance:
    """Acceptance statistics of one drafter with one target: a chance for each node of a chain, a mean for each tree
    size. Recent rounds weigh more.

    A drafter may end a chain early where it is unsure (`Plan.threshold`). The chances then hold only for nodes that
    were drafted. How often such chains reach node i, and how often node i is accepted, is counted separately.
    """

    def __init__(self, prior: Sequence[float] = ()) -> None:
        """prior: acceptance chances p_1, p_2, ... in [0, 1], and 0 beyond the last; empty if unknown."""
        self.prior = list(prior)[:DEEPEST]
        self.hits = [0.0] * (DEEPEST + 1)  # [i]: how often node i of a chain was accepted, per row
        self.trials = [0.0] * (DEEPEST + 1)  # [i]: how often node i - 1 was accepted, so that node i was tried
        # Four counts for chains that may end early, by node i: rounds whose plan included node i; and of these, rounds
        # in which node i was accepted (share of the rows), rounds with a draft, and rounds in which node i was drafted.
        self.ending = [[0.0] * (DEEPEST + 1) for _ in range(4)]
        # (nodes, depth) -> (weight, weighted accepted nodes)
        self.trees: dict[tuple[int, int], tuple[float, float]] = {}
        self.of_trees = (0.0, 0.0)  # (accepted nodes of all trees, the number predicted from chances of chains)
        self.offered = 1.0  # share of the drafter's calls in which it returned a draft
        self.chains_only = 0  # how many tree plans were answered by a chain; -1 after the first real tree
        self.since_chain = 0  # number of rounds with trees since the last chain
        self.chain_gap = CHAIN_GAP  # number of rounds with trees between two trial chains; grows each time
        self.gap = 1  # number of rounds between two trial drafts while drafting does not pay

    def content(self) -> dict[str, Any]:
        """Return the statistics as values that JSON can hold."""
        names = ("prior", "hits", "trials", "ending", "of_trees", "offered", "chains_only", "gap")
        trees = [[*shape, *mean] for shape, mean in self.trees.items()]
        return {**{name: getattr(self, name) for name in names}, "trees": trees}

    def chain(self, deepest: int = DEEPEST) -> list[float]:
        """Return the acceptance chances p_i of nodes i = 1 .. `deepest`. A depth never observed gets the prior's
        chance, or without a prior that of depth i - 1."""
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
        """Return the expected drafted and accepted nodes of chains that may end early, for maximum lengths 1, 2, ...

        chances: acceptance chances, as `chain` returns them. An unobserved depth is assumed to be drafted as often as
            the depth above, and accepted by its chance.
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
        """Return the expected accepted nodes of a tree.

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

        plan: the plan that the drafter got. sizes: number of nodes of each row's draft, root included. depth: depth of
            the deepest node. accepted: number of accepted nodes of each row, root excluded. ends: whether the drafter
            may end chains early.
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
                # A node that was planned but not drafted counts neither as accepted nor as rejected. If a round has no
                # draft at all, node 1 counts as rejected.
                able = sum(n >= i - 1 and (size > i or size == i == 1) for n, size in zip(accepted, sizes, strict=True))
                if not able:
                    break
                self.hits[i] = FADE * self.hits[i] + sum(n >= i for n in accepted) / rows
                self.trials[i] = FADE * self.trials[i] + able / rows


def expected_in_tree(nodes: int, depth: int, chances: Sequence[float]) -> float:
    """Predict a tree's accepted nodes from a chain's chances.

    A level with w nodes is assumed to miss 1 / sqrt(w) times as often as one node. Measured for the 1, 2, 4 and 8
    likeliest children: misses of 0.43, 0.30, 0.22 and 0.16.
    """
    miss = (depth / nodes) ** 0.5
    expected, alive = 0.0, 1.0
    for chance in chances[:depth]:
        alive *= 1 - (1 - chance) * miss
        expected += alive
    return expected


@final
class CostCurve:
    """Estimates the seconds that a number of items (columns or levels) takes, by a monotone piecewise-linear curve.
    The curve goes through the lower quartiles of the buckets 1, 2, 3-4, 5-8, ..., so single timings that are off by
    several times do not move it.
    """

    def __init__(self, slope: float, origin: bool, enough: int) -> None:
        """slope: beyond the last bucket, the curve continues with its last slope times this factor.
        origin: whether a count of 0 takes 0 seconds.
        enough: number of timings that a bucket other than the first needs before it is used.
        """
        self._slope = slope
        self._enough = enough
        self._start = [(0.0, 0.0)] if origin else []
        self.windows: dict[int, deque[tuple[float, int]]] = {}  # bucket -> its newest timings (seconds, count)
        self._quartiles: dict[int, tuple[float, float]] = {}  # bucket -> lower quartile: count, seconds
        self._points: list[tuple[float, float]] = [*self._start]  # the curve's corners: count, seconds
        self.reach = 0  # the largest count of items that was timed
        self.timed = 0  # number of timings so far

    def samples(self, count: int) -> int:
        """Return the number of timings in the count's bucket."""
        return len(self.windows.get((count - 1).bit_length(), ()))

    def add(self, count: int, seconds: float) -> None:
        """Add a timing: the seconds that `count` items took."""
        self.timed += 1
        bucket = (count - 1).bit_length()
        window = self.windows.setdefault(bucket, deque(maxlen=WINDOW))
        window.append((seconds, count))
        self._summarise(bucket)
        self.reach = max(self.reach, count)
        self._connect()

    def restore(self, windows: dict[int, deque[tuple[float, int]]], reach: int, timed: int) -> None:
        """Replace the timings by those of a saved curve. windows: bucket -> (seconds, count), never empty. reach:
        largest timed count. timed: number of timings.
        """
        self.windows, self.reach, self.timed = windows, reach, timed
        self._quartiles = {}
        for bucket in windows:
            self._summarise(bucket)
        self._connect()

    def content(self) -> dict[str, Any]:
        """Return the timings as values that JSON can hold."""
        windows = [[bucket, [list(timing) for timing in window]] for bucket, window in self.windows.items()]
        return {"reach": self.reach, "timed": self.timed, "windows": windows}

    def _summarise(self, bucket: int) -> None:
        window = self.windows[bucket]
        quartile = sorted(sample for sample, _ in window)[(len(window) - 1) // 4]
        self._quartiles[bucket] = (sum(size for _, size in window) / len(window), quartile)

    def _connect(self) -> None:
        self._points = []
        least = math.inf
        for key in sorted(self._quartiles, reverse=True):
            size, quartile = self._quartiles[key]
            least = min(least, quartile)  # more items take at least as long, so larger buckets bound smaller ones
            if not key or len(self.windows[key]) >= self._enough:
                self._points.append((size, least))
        self._points += self._start
        self._points.reverse()

    def at(self, count: float) -> float:
        """Return the seconds that `count` items take, from buckets with enough timings. Below the first point it
        returns the first point's seconds, and without any timings 0."""
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

    def pessimistic(self, count: int) -> float:
        """Return a cautious estimate: the lower quartile of the count's own bucket, even if it was timed only once.

        A count beyond the largest timed count is assumed to take at least the seconds of that one, times the square
        root of the ratio of both counts.
        """
        own = self._quartiles.get((count - 1).bit_length())
        if own:
            return own[1]
        largest = self._quartiles.get((self.reach - 1).bit_length()) if count > self.reach else None
        return max(self.at(count), largest[1] * (count / self.reach) ** 0.5) if largest else self.at(count)

    def capped(self, count: int, plain: float) -> float:
        """Return `pessimistic(count)`, but at most `count` times `plain`, the seconds of a pass over one column.

        A slow first pass over a new shape does not measure the cost of the shape.
        """
        return min(self.pessimistic(count), count * plain)


@dataclass(frozen=True)
class Pair:
    """The key of stored measurements: the names of a target, of its device, and of a drafter."""

    target: str
    device: str
    drafter: str


@dataclass
class PairStatistics:
    """Measurements of one pair. Times are stored separately for batch sizes up to 1, 2, 4, ... rows: `power` is the
    base-2 logarithm of that size."""

    target: dict[int, CostCurve]  # power -> seconds of a target pass by columns; all drafters of the target share it
    acceptance: Acceptance
    chains: dict[int, CostCurve] = field(default_factory=lambda: {})  # power -> the drafter's seconds by depth
    trees: dict[int, CostCurve] = field(default_factory=lambda: {})  # power -> the same for its trees
    accuracy: HeadAccuracy | None = None  # only for drafters with `Needs.prior`

    def costs(self, power: int) -> tuple[CostCurve, CostCurve, CostCurve]:
        """Return the curves of the target, the drafter's chains and its trees, for up to 2 ** power rows."""
        if power not in self.target:
            self.target[power] = target_curve()
        if power not in self.chains:
            self.chains[power], self.trees[power] = drafter_curve(), drafter_curve()
        return self.target[power], self.chains[power], self.trees[power]


def target_curve() -> CostCurve:
    """Return an empty cost curve for a target: seconds by columns."""
    return CostCurve(0.5, False, ENOUGH)


def drafter_curve() -> CostCurve:
    """Return an empty cost curve for a drafter: seconds by depth."""
    return CostCurve(1.0, True, 1)


@final
class DecodingStatistics:
    """Measurements of runs: seconds of passes and acceptance of drafts, from which later runs choose their drafts.

    Pass the same object to several calls of `generate`, `stream`, `speculate`, `transcribe` or `describe`. Its times
    hold for one machine only: do not use a saved file on another.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self._targets: dict[tuple[str, str], dict[int, CostCurve]] = {}  # target, device -> power -> curve
        self._pairs: dict[Pair, PairStatistics] = {}  # in order of use, the least recent first

    def of(self, pair: Pair, prior: Sequence[float] = ()) -> PairStatistics:
        """Return the measurements of a pair, created if there are none.

        pair: target, device and drafter.
        prior: acceptance chances in [0, 1] of a chain's nodes 1, 2, ..., used for a new pair. Default (): unknown.
        """
        with self.lock:
            statistics = self._pairs.pop(pair, None)
            if statistics is None:
                target = self._targets.setdefault((pair.target, pair.device), {})
                statistics = PairStatistics(target, Acceptance(prior))
            self._pairs[pair] = statistics
            while len(self._pairs) > MOST:
                self._drop(next(iter(self._pairs)))
            return statistics

    def accuracy(self, pair: Pair, prior: Prior) -> HeadAccuracy:
        """Return the counts of how often each rank (k-th best token) of the pair's drafter was right. If there are none
        of this size yet, they begin with `prior`."""
        with self.lock:
            statistics = self.of(pair, prior.chain)
            accuracy = statistics.accuracy
            if accuracy is None or (accuracy.depth, accuracy.width) != (len(prior.ranks), len(prior.ranks[0])):
                accuracy = statistics.accuracy = HeadAccuracy(prior.ranks)
            return accuracy

    def clear(self) -> None:
        """Remove all measurements. Runs in progress continue with their own."""
        with self.lock:
            self._pairs.clear()
            self._targets.clear()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the measurements to a JSON file.

        Runs may continue meanwhile. If writing fails, an existing file stays as it was.

        path: the file. Returns: the path.
        Raises: OSError if the file cannot be written; InputError if `path` is something other than a file.
        """
        return write_whole(path, f"{json.dumps(self._content(), allow_nan=False)}\n".encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DecodingStatistics:
        """Read a file that `save` wrote.

        path: the file. Returns: the measurements.
        Raises: InputError if the file is missing, too large or malformed.
        """
        source = Path(path)
        if not source.is_file():
            raise InputError(f"`path` must be a file that `save` wrote, but '{source}' is none. Begin without it.")
        with open(source, "rb") as file:
            raw = file.read(LARGEST + 1)
        if len(raw) > LARGEST:
            raise InputError(f"`path` must hold at most {LARGEST} bytes, but '{source}' holds more. Begin without it.")
        from mmdec.decode.statistics_json import fill  # imports pydantic, which takes a tenth of a second

        statistics = cls()
        try:
            fill(statistics._targets, statistics._pairs, raw)
        except (ValueError, KeyError) as error:
            raise InputError(
                f"`path` must hold decoding statistics of this version, but '{source}' does not "
                f"({type(error).__name__}: {' '.join(str(error).split())[:300]}). Begin without it."
            ) from error
        return statistics

    def _drop(self, pair: Pair) -> None:
        del self._pairs[pair]
        if not any((other.target, other.device) == (pair.target, pair.device) for other in self._pairs):
            self._targets.pop((pair.target, pair.device), None)

    def _content(self) -> dict[str, Any]:
        with self.lock:
            targets = [
                {"target": target, "device": device, "columns": _contents(curves)}
                for (target, device), curves in self._targets.items()
            ]
            pairs = [
                {
                    "target": pair.target,
                    "device": pair.device,
                    "drafter": pair.drafter,
                    "acceptance": statistics.acceptance.content(),
                    "chains": _contents(statistics.chains),
                    "trees": _contents(statistics.trees),
                    "accuracy": None
                    if statistics.accuracy is None
                    else dict(zip(("hits", "trials"), statistics.accuracy.counts(), strict=True)),
                }
                for pair, statistics in self._pairs.items()
            ]
        return {**FORMAT, "targets": targets, "pairs": pairs}


def _contents(curves: Mapping[int, CostCurve]) -> list[dict[str, Any]]:
    """Return the cost curves of each batch size as values that JSON can hold."""
    return [{"power": power, **curve.content()} for power, curve in curves.items()]
