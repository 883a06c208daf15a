"""Tests by chi-square that sampled outputs have the target's distribution, for large and small vocabularies.

Drafts use the run's random stream for drafts. So a stream that is used for two purposes would be found here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar, cast

import pytest
import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mmdec.core.budget import FixedBudget
from mmdec.core.loop import decode
from mmdec.core.sampling import KeyedSample, Rng, Sequences, Stop
from mmdec.core.verify import MatchRule, ResidualRule, Rule, SamplingState, TraversalRule
from mmdec.drafters.small_model.drafter import SmallModelDrafter
from mmdec.generation.hf_bridge import draft_warp
from mmdec.types import Draft, Plan
from tests.exactness.enumeration import chi_square, plain_distribution
from tests.support import blended_toy
from tests.support.draft_warps import at_temperature
from tests.support.grid import slow_but
from tests.support.toy_target import AlwaysAccept, Memory, Scripted, Toy, run

K = TypeVar("K", bound=Hashable)


class Flat(Toy):
    """The same distribution whatever was said."""

    @staticmethod
    def _hash(prefix: Sequence[int], start: int = 7) -> int:
        return 0


class Racing(Scripted):
    """Draws children of the root without replacement, and grandchildren of the first, by a race of exponentials."""

    def __init__(self, model: Toy, width: int, depth: int) -> None:
        super().__init__(lambda *_: ([], []))
        self.model, self.width, self.depth = model, width, depth
        self.noise = torch.empty(0)  # (B, V) of the root's children

    def propose(self, state: Memory, roots: Tensor, plan: Plan) -> Draft:
        assert plan.generator is not None
        assert plan.warp is not None
        texts = [list(row) for row in state.rows]
        tokens, parents, probs = [roots[:, None]], [-1], []
        for level in range(self.depth):
            logits = torch.stack([self.model.logits(row) for row in texts])
            q = plan.warp(logits[:, None])[:, 0].double()
            noise = torch.empty_like(q).exponential_(generator=plan.generator)
            drawn = (q / noise).topk(1 if level else self.width).indices
            if level == 0:
                self.noise = noise
            probs += [q, *[torch.zeros_like(q)] * (drawn.shape[1] - 1)]
            parents += [max(len(parents) - self.width, 0)] * drawn.shape[1]
            tokens.append(drawn)
            texts = [[*row, token] for row, token in zip(texts, drawn[:, 0].tolist(), strict=True)]
        probs.append(torch.zeros_like(probs[0]))
        nodes = torch.cat(tokens, 1)
        links = torch.tensor(parents).expand_as(nodes)
        return Draft(nodes, links, torch.full_like(roots, nodes.shape[1]), torch.stack(probs, 1))


class Shared(Rng):
    """A mistake: the residual is drawn with the noise that the draft was drawn with."""

    def __init__(self, drafter: Racing, seed: int, row: int, place: int) -> None:
        super().__init__(torch.Generator().manual_seed(hash((seed, row, place))))
        self.drafter, self.row = drafter, row

    def draw(self, weights: Tensor) -> int:
        if len(self.drafter.noise) <= self.row:  # the prompt's round
            return super().draw(weights)
        return int((weights / self.drafter.noise[self.row]).argmax())


def keyed_match(drafter: Racing) -> Rule:
    class Drawn(MatchRule):
        """Matching is lossless for drawn drafts, too."""

        def drafting_plan(self, plan: Plan, sequences: Sequences) -> Plan:
            return stream.drafting_plan(plan, sequences)

    stream = SamplingState(11)
    return Drawn(KeyedSample(11))


def residual(drafter: Racing) -> Rule:
    return ResidualRule(SamplingState(12, at_temperature(1.3)))


def traversal(drafter: Racing) -> Rule:
    return TraversalRule(SamplingState(13, at_temperature(1.3)))


def always(drafter: Racing) -> Rule:
    class Drawn(AlwaysAccept):
        def drafting_plan(self, plan: Plan, sequences: Sequences) -> Plan:
            return stream.drafting_plan(plan, sequences)

    stream = SamplingState(14)
    return Drawn(KeyedSample(14))


def shared(drafter: Racing) -> Rule:
    return ResidualRule(
        SamplingState(15), make_rng=lambda device, seed, kind, row, place: Shared(drafter, seed, row, place)
    )


def texts(target: Toy, drafter: Racing, rule: Rule, rows: int, length: int) -> list[list[int]]:
    nodes = drafter.width + drafter.depth - 1
    text, rounds = run(target, [[1]] * rows, Stop(1 + length), rule, drafter, FixedBudget(nodes, drafter.depth))
    assert sum(map(sum, (round_.accepted for round_ in rounds))) > 0
    return text.tokens


def wide(rule: Callable[[Racing], Rule], width: int, depth: int) -> float:
    """4096 tokens, 2400 draws; the draft knows the target roughly."""
    target, drafter = Flat(4096, seed=1), Flat(4096, seed=2)
    drafter.table = 0.7 * target.table + 0.5 * drafter.table
    distribution = dict(enumerate(target.logits([]).double().softmax(-1).tolist()))
    racing = Racing(drafter, width, depth)
    rows = texts(target, racing, rule(racing), 200, 12)
    return chi_square(Counter(token for row in rows for token in row), distribution)


def narrow(rule: Callable[[Racing], Rule], width: int, depth: int) -> float:
    """16 tokens, 6000 draws; the draft likes best what the target likes least."""
    target, drafter = Flat(16, seed=1, scale=1.0), Flat(16)
    drafter.table = -target.table
    distribution = dict(enumerate(target.logits([]).double().softmax(-1).tolist()))
    racing = Racing(drafter, width, depth)
    rows = texts(target, racing, rule(racing), 500, 12)
    return chi_square(Counter(token for row in rows for token in row), distribution)


def joint(rule: Callable[[Racing], Rule], width: int, depth: int) -> float:
    """Return texts of four tokens of a vocabulary of 4: 256 texts, 1500 draws, each by all before."""
    target, racing = Toy(4, seed=1, scale=1.0), Racing(Toy(4, seed=2, scale=1.0), width, depth)
    rows = texts(target, racing, rule(racing), 1500, 4)
    return chi_square(Counter(map(tuple, rows)), plain_distribution(target, [1], 4))


DRAWN_CASES = {  # rule and shape of its drafts -> the experiment that `make test` runs
    (keyed_match, 3, 2): narrow,
    (residual, 1, 3): joint,
    (residual, 3, 2): wide,
    (traversal, 1, 3): narrow,
    (traversal, 3, 2): joint,
}


@pytest.mark.parametrize(
    ("rule", "width", "depth", "experiment"),
    slow_but(
        [(*case, experiment) for case in DRAWN_CASES for experiment in (wide, narrow, joint)],
        [(*case, experiment) for case, experiment in DRAWN_CASES.items()],
    ),
)
def test_samples_follow_the_targets_distribution(
    rule: Callable[[Racing], Rule], width: int, depth: int, experiment: Callable[..., float]
) -> None:
    assert experiment(rule, width, depth) < 10


@pytest.mark.parametrize(("experiment", "rule"), [(wide, always), (narrow, always), (joint, always), (joint, shared)])
def test_planted_mistakes_are_caught(experiment: Callable[..., float], rule: Callable[[Racing], Rule]) -> None:
    assert experiment(rule, 1, 1) > 10


@pytest.mark.parametrize(
    ("nodes", "depth", "kind"),
    slow_but(
        [(nodes, 3, kind) for nodes in (3, 7) for kind in (ResidualRule, TraversalRule)],
        [(3, 3, TraversalRule), (7, 3, ResidualRule)],
    ),
)
def test_drafts_through_the_targets_processors_leave_its_distribution(
    nodes: int, depth: int, kind: type[ResidualRule | TraversalRule]
) -> None:
    """Texts of three of six tokens, with a penalty for those that the text or the draft already holds."""
    processors: list[Any] = [
        RepetitionPenaltyLogitsProcessor(1.5),
        TemperatureLogitsWarper(0.8),
        TopKLogitsWarper(5),
        TopPLogitsWarper(0.9),
        MinPLogitsWarper(0.05),
    ]
    small = blended_toy.Toy(6, seed=12)
    target, rows = blended_toy.Toy(6, seed=13, blend=small, share=0.5), 1000
    ids = torch.tensor([[1, 2]] * rows)
    sequences = Sequences(ids, Stop(5), processors)
    rule = kind(SamplingState(4, draft_warp(processors)))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    rounds = list(decode(target, inputs, sequences, rule, SmallModelDrafter(small), FixedBudget(nodes, depth)))
    assert sum(sum(round_.accepted) for round_ in rounds) > rows / 2
    distribution = plain_distribution(cast(Any, target), [1, 2], 3, processors=processors)
    assert chi_square(Counter(map(tuple, sequences.tokens)), distribution) < 10
