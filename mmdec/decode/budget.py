"""How much to draft: learned while decoding, for the most expected tokens per second.

A plan of k nodes in a chain is worth (1 + E(k)) / (T(1 + k) + D(k)) tokens a second in each row: E the expected number
of accepted nodes, T the target's pass over the draft, D the drafter's time (the hardware-aware form of Sequoia, Chen et
al. 2024, section 3.3, with everything measured here instead of profiled beforehand). Plain decoding is worth 1 / T(1).

- T and D are monotone and piecewise linear through the lower quartiles of a few buckets: single timings are off
  by several times. A draft within the reach of what was timed counts as cheap until it was timed often enough.
- E of a chain follows from the chance p_i that node i is accepted when node i - 1 was; each tree has its own mean.
- What drafting has cost beyond plain decoding is kept in a ledger. Before it is overdrawn a round is plain, so that
  even a drafter that is always wrong costs little. Where drafting does not pay, it is tried again ever more rarely.

Plain floats: a round's planning and learning take a few tens of microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from threading import Lock
from typing import ClassVar, final

from mmdec.decode.acceptance import DEEPEST, Acceptance
from mmdec.decode.cost_model import Curve
from mmdec.types import InputError, Plan

CHAINS = (1, 2, 3, 5, 7, 11, 15, 23, DEEPEST)  # nodes; with the root these are 2, 3, 4, 6, 8, ... columns
TREES = ((7, 3), (11, 5), (15, 4), (15, 7), (31, 5), (63, 6))  # nodes, depth
FIRST = 3  # nodes of the first chain
TOLD = 7  # of the first draft of a drafter that knows its own chances
ENOUGH = 3  # timings of a target's bucket before it is believed
DOUBT = 0.5  # a first node that is accepted less often earns no patience
NEAR = 0.93  # of the best promise: as good, where seconds are noisy
MARGIN = 1.02  # drafting must promise that much more than plain decoding
CREDIT = 2.0  # plain passes that a run may lose to drafting from the start
SHARE = 0.04  # and of its time, as it goes on
SAVINGS = 8.0  # plain passes of earlier gains that a run may lose again
NOTICED = 0.02  # of a plain pass: a loss below it is none
RARELY = 256  # rounds between attempts at most
SETTLED = 6  # rounds with so many rows, until their own timings are believed before those with more rows
AGAIN = 8  # rounds between attempts at most when a run begins
ATTEMPT = 7  # nodes of an attempt at most
PLAIN_EVERY = (0, 0, 8, 16, 32, 64)  # rounds until a plain pass is timed again, by those timed already


@final
class Budget:
    """Plans the rounds of one run, and learns from them for the runs to come: make one for each run.

    What it learns is kept in the process: the target's seconds by (model, device, batch), the drafter's seconds by
    (model, device, batch, drafter), acceptance by (model, drafter), for the batch shrinks as rows end. Batches are told
    apart by powers of two.
    """

    _targets: ClassVar[dict[tuple[str, str, int], Curve]] = {}
    _drafters: ClassVar[dict[tuple[str, str, int, str, bool], Curve]] = {}  # the last: for trees
    _accepted: ClassVar[dict[tuple[str, str], Acceptance]] = {}
    _lock: ClassVar[Lock] = Lock()

    def __init__(self, model: str, device: str, drafter: str, hopes: Sequence[float] = ()) -> None:
        """hopes: see `Acceptance`; they count until this process has seen better."""
        self._place, self._drafter = (model, device), drafter
        self._constant: Plan | None = None
        self._plan = Plan(0, 0)
        self._attempt = False  # the plan is an attempt, although drafting is not expected to pay
        self._waited = 0  # rounds since the last attempt
        self._unplain = 0  # rounds since the last plain pass
        self._tokens = 0.0  # a row's, so far
        self._books: dict[int, tuple[float, float]] = {}  # batch -> seconds and tokens of the rounds with a drafter
        with self._lock:
            self._known = self._accepted.setdefault((model, drafter), Acceptance(hopes))
            self._known.gap = min(self._known.gap, AGAIN)

    @classmethod
    def fixed(cls, nodes: int, depth: int | None = None) -> Budget:
        """Always `nodes` nodes at most `depth` deep; without a depth a chain. 0 is plain decoding."""
        if nodes < 0:
            raise InputError(f"`nodes` must be at least 0, but is {nodes}. 0 is plain decoding.")
        if depth is not None and not (1 if nodes else 0) <= depth:
            raise InputError(f"`depth` must be at least 1, but is {depth}. Leave it out for a chain.")
        budget = cls("", "", "")
        budget._constant = Plan(nodes, nodes if depth is None else min(depth, nodes))
        return budget

    @classmethod
    def forget(cls) -> None:
        """Drop what earlier runs have taught."""
        with cls._lock:
            cls._targets.clear()
            cls._drafters.clear()
            cls._accepted.clear()

    def plan(self, batch: int) -> Plan:
        """The next round's plan for `batch` rows; 0 nodes: a plain round, ask no drafter."""
        if self._constant is not None:
            return self._constant
        with self._lock:
            self._plan, self._attempt = self._choose(batch)
        return self._plan

    def observe(
        self,
        batch: int,
        draft_sizes: Sequence[int],
        depth: int,
        accepted: Sequence[int],
        target_seconds: float,
        draft_seconds: float,
    ) -> None:
        """What became of the last plan: each row's nodes, root included, and accepted nodes, root excluded; the draft's
        depth; seconds of the target's pass and of the drafter, 0 where it was not asked."""
        if self._constant is not None:
            return
        with self._lock:
            target, chain, tree = self._curves(batch)
            columns, plan, known = max(draft_sizes), self._plan, self._known
            target.add(columns, target_seconds)
            self._unplain = 0 if columns == 1 else self._unplain + 1
            tokens = 1 + sum(accepted) / len(accepted)
            self._tokens += tokens
            self._waited += 1
            if not plan.nodes:
                return
            known.learn(plan, draft_sizes, depth, accepted)
            draft = tree if plan.nodes > plan.depth else chain
            draft.add(plan.depth, draft_seconds)
            once = self._once(batch)
            cost = target.dear(columns, once) + draft.seen(plan.depth)
            if tokens > 1 and min(target.samples(columns), draft.samples(plan.depth)) < ENOUGH:
                cost = min(cost, tokens * once)  # what was accepted deserves more timings before it counts as a loss
            spent, gained = self._books.get(batch, (0.0, 0.0))
            self._books[batch] = (spent + cost, gained + tokens)
            loss = cost - tokens * once
            if loss <= 0:
                known.gap = 1
            elif loss > NOTICED * once and self._attempt:
                known.gap = min(2 * known.gap, RARELY)
                self._waited = 0

    def _curves(self, batch: int) -> tuple[Curve, Curve, Curve]:
        """Seconds of the target by columns, of a drafter's chains and of its trees by depth."""
        place = (*self._place, (batch - 1).bit_length())
        target = self._targets.setdefault(place, Curve(0.5, False, ENOUGH))
        chain = self._drafters.setdefault((*place, self._drafter, False), Curve(1.0, True, 1))
        return target, chain, self._drafters.setdefault((*place, self._drafter, True), Curve(1.0, True, 1))

    def _known_best(self, batch: int) -> tuple[Curve, Curve, Curve]:
        """The curves to plan by: as rows end, those of more rows still know best how columns compare."""
        own = self._curves(batch)
        if own[0].timed < SETTLED or not own[0].samples(1):
            for power in sorted(power for model, device, power in self._targets if (model, device) == self._place):
                if power > (batch - 1).bit_length():
                    target, chain, tree = self._curves(1 << power)
                    if target.timed >= SETTLED and target.samples(1) and (chain.reach or tree.reach):
                        return target, chain, tree
        return own

    def _once(self, batch: int) -> float:
        """Seconds of a plain pass; where none was timed, what those of more rows say of it; 0 where nothing is known"""
        own = self._curves(batch)[0]
        if own.samples(1) or not own.reach:
            return own.at(1)
        near = self._known_best(batch)[0]
        longer = near.at(own.reach)
        return own.seen(own.reach) * near.at(1) / longer if longer else 0.0

    def _purse(self, once: float) -> float:
        """Seconds that may be lost now, with `once` seconds for a plain pass."""
        lost = sum(spent - gained * self._once(batch) for batch, (spent, gained) in self._books.items())
        return (CREDIT + SHARE * self._tokens) * once - max(lost, -SAVINGS * once)

    def _choose(self, batch: int) -> tuple[Plan, bool]:
        """The plan, and whether it is an attempt."""
        plain, known = Plan(0, 0), self._known
        target, chain, tree = self._known_best(batch)
        own, told = self._curves(batch)[0], bool(known.expected)
        if own.timed >= SETTLED and not own.samples(1):
            return plain, False
        if self._unplain >= PLAIN_EVERY[min(target.samples(1) + told, len(PLAIN_EVERY) - 1)]:  # told: once will do
            return plain, False
        once, here = target.at(1), self._once(batch)
        purse = self._purse(here) * once / here if here else CREDIT * once  # in seconds of the curves planned by
        chances = known.chain()
        first = TOLD if told else FIRST
        reach = max(first + 1, 2 * target.reach) if chain.reach else 2  # one node tells the drafter's price
        able: list[tuple[float, float, Plan]] = []
        small, hoped = plain, 0.0  # of the plans that an attempt may take
        gains = list(accumulate(accumulate(chances, mul)))
        plans = [(nodes, nodes, gains[nodes - 1], chain) for nodes in CHAINS]
        if known.chains_only < 2:
            plans += [
                (nodes, depth, known.tree(nodes, depth, chances), tree if tree.reach else chain)
                for nodes, depth in TREES
            ]
        for nodes, depth, gain, draft in plans:
            if nodes + 1 > reach:
                continue
            seconds, drafting = target.at(nodes + 1), draft.at(depth)
            rate = (1 + gain) / (known.offered * seconds + (1 - known.offered) * once + drafting)
            # Nothing accepted is the worst that can happen: a run that cannot bear it must not try.
            risk = target.dear(nodes + 1, once) + draft.seen(depth) - once
            timed = target.samples(nodes + 1)
            if chances[0] > DOUBT and timed and min(timed, draft.samples(depth)) < ENOUGH:
                risk = min(risk, CREDIT * once)  # one slow pass does not bar a drafter that is right
            if risk > purse:
                continue
            able.append((rate, gain, Plan(nodes, depth)))
            if rate > hoped and nodes <= ATTEMPT:
                small, hoped = Plan(nodes, depth), rate
        promise = max((rate for rate, _, _ in able), default=0.0)
        if promise * once >= MARGIN:
            # Seconds are noisier than counts: of plans that promise nearly as much, the one with the most tokens.
            near = [(gain, plan) for rate, gain, plan in able if rate >= max(NEAR * promise, MARGIN / once)]
            return max(near, key=lambda one: one[0])[1], False
        return (small, True) if self._waited >= known.gap else (plain, False)
