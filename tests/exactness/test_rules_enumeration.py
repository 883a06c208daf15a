"""Tests by enumerating all random outcomes that each lossless rule has the distribution of autoregressive sampling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from mmdec.core.budget import FixedBudget
from mmdec.core.sampling import Processor, Sequences, Stop
from mmdec.core.tree import depths, trees_from_lists
from mmdec.core.verify import MatchRule, ResidualRule, Rule, SamplingState, TraversalRule, TypicalRule, verify
from mmdec.types import Draft, Plan, Scores
from tests.exactness.enumeration import Distribution, EnumeratedChoices, EnumeratedRng, plain_distribution
from tests.support.toy_target import AlwaysAccept, Memory, Scripted, Session, Toy, padded, run

Shape = list[int]  # parents of nodes 1, 2, ...
CHAIN: Shape = [0, 1]
STAR: Shape = [0, 0]
TREE: Shape = [0, 0, 1]
BRANCHED: Shape = [0, 1, 1]
STREAM = SamplingState(0)


def sampled(choices: EnumeratedChoices) -> Rule:
    return MatchRule(lambda scores, text, row: choices.draw(scores[0].double().softmax(-1).tolist()))


def residual(choices: EnumeratedChoices) -> Rule:
    return ResidualRule(STREAM, make_rng=lambda *key: EnumeratedRng(choices))


def traversal(choices: EnumeratedChoices) -> Rule:
    return TraversalRule(STREAM, make_rng=lambda *key: EnumeratedRng(choices))


def typical(choices: EnumeratedChoices) -> Rule:
    rule = sampled(choices)
    assert isinstance(rule, MatchRule)
    return TypicalRule(rule.choice)


def always(choices: EnumeratedChoices) -> Rule:
    rule = sampled(choices)
    assert isinstance(rule, MatchRule)
    return AlwaysAccept(rule.choice)


def warm_and_cut(ids: Tensor, scores: Tensor) -> Tensor:
    """Another temperature after each prefix, and after some the least probable token is forbidden."""
    total = int(ids.sum()) + ids.shape[1]
    scores = scores / (0.6 + 0.3 * (total % 4))
    if total % 2:
        scores = scores.masked_fill(scores <= scores.min(-1, keepdim=True).values, -torch.inf)
    return scores


Drafting = Callable[[Toy, EnumeratedChoices, list[int], Shape], Draft]


def drawn_children(replacement: bool = False, holes: bool = False, low: bool = False) -> Drafting:
    """Children drawn from the drafter's distribution; with replacement there are twins. `holes`: some tokens are never
    drafted. `low`: in single precision and not quite normalised, as real drafters have it."""

    def draft(drafter: Toy, choices: EnumeratedChoices, prefix: list[int], shape: Shape) -> Draft:
        size = len(shape) + 1
        probs = torch.zeros(1, size, drafter.vocab_size, dtype=torch.float32 if low else torch.float64)
        tokens = [prefix[-1]]
        texts = [prefix]
        left: dict[int, Tensor] = {}
        for parent in shape:
            if parent not in left:
                q = drafter.logits(texts[parent]).double().softmax(-1)
                if holes:
                    q = torch.where(q < q.max() / 4, 0.0, q)
                probs[0, parent] = q * (1.001 if low else 1.0)
                left[parent] = probs[0, parent].double()
            token = choices.draw(left[parent].tolist())
            if not replacement and (left[parent] > 0).sum() > 1:
                left[parent] = left[parent].index_fill(0, torch.tensor([token]), 0.0)
            tokens.append(token)
            texts.append([*texts[parent], token])
        return trees_from_lists(torch.tensor(prefix[-1:]), [(tokens[1:], shape)], probs)

    return draft


def fixed(twins: bool = False, probs: bool = False) -> Drafting:
    """Draft the drafter's best tokens, or one of them twice. `probs`: they pretend to be drawn, a known mistake."""

    def draft(drafter: Toy, choices: EnumeratedChoices, prefix: list[int], shape: Shape) -> Draft:
        tokens: list[int] = []
        texts, used = [prefix], [0] * (len(shape) + 1)
        q = torch.zeros(1, len(shape) + 1, drafter.vocab_size, dtype=torch.float64)
        for parent in shape:
            logits = drafter.logits(texts[parent])
            q[0, parent] = logits.double().softmax(-1)
            token = int(logits.argsort(descending=True)[used[parent]])
            used[parent] += not twins
            tokens.append(token)
            texts.append([*texts[parent], token])
        return trees_from_lists(torch.tensor(prefix[-1:]), [(tokens, shape)], q if probs else None)

    return draft


def drafted_distribution(
    rule: Callable[[EnumeratedChoices], Rule],
    target: Toy,
    draft: Callable[[EnumeratedChoices, list[int]], Draft],
    prefix: list[int],
    length: int,
    eos: frozenset[int] = frozenset(),
    processors: list[Processor] | None = None,
) -> Distribution:
    """Rounds of drafting and verifying, until `length` tokens or an end."""
    known: dict[tuple[int, ...], Distribution] = {}

    def rounds(text: list[int]) -> Distribution:
        room = len(prefix) + length - len(text)
        if room == 0 or (len(text) > len(prefix) and text[-1] in eos):
            return {(): 1.0}
        if tuple(text) in known:
            return known[tuple(text)]
        drafting, verifying = EnumeratedChoices(), EnumeratedChoices()
        distribution: Distribution = defaultdict(float)
        for drafted, trees in drafting.outcomes(lambda: draft(drafting, text)):
            scores = target.score(Session([text[:-1]]), trees)

            def draw(trees: Draft = trees, scores: Scores = scores) -> tuple[int, ...]:
                state = Sequences(torch.tensor([text]), Stop(len(text) + room, eos), processors or [])
                verify(trees, scores, rule(verifying), state)
                return tuple(state.tokens[0])

            for probability, tokens in verifying.outcomes(draw):
                for rest, p in rounds([*text, *tokens]).items():
                    distribution[(*tokens, *rest)] += drafted * probability * p
        known[tuple(text)] = distribution
        return distribution

    return rounds(prefix)


def difference(first: Distribution, second: Distribution) -> float:
    assert abs(sum(first.values()) - 1) < 1e-9
    return max(abs(first.get(key, 0.0) - second.get(key, 0.0)) for key in {*first, *second})


@pytest.mark.parametrize("processors", [[], [warm_and_cut]], ids=["raw", "processed"])
@pytest.mark.parametrize(
    ("rule", "drafting", "shape"),
    [
        (sampled, fixed(), TREE),
        (sampled, fixed(twins=True), TREE),
        (sampled, drawn_children(), CHAIN),
        (residual, drawn_children(), CHAIN),
        (residual, drawn_children(), TREE),
        (residual, drawn_children(holes=True), BRANCHED),
        (residual, drawn_children(low=True), STAR),
        (residual, drawn_children(replacement=True), TREE),
        (residual, fixed(), TREE),
        (residual, fixed(twins=True), BRANCHED),
        (traversal, drawn_children(), CHAIN),
        (traversal, drawn_children(), TREE),
        (traversal, drawn_children(holes=True), BRANCHED),
        (traversal, drawn_children(low=True), STAR),
        (traversal, drawn_children(replacement=True), TREE),
        (traversal, fixed(), TREE),
        (traversal, fixed(twins=True), BRANCHED),
    ],
)
@pytest.mark.parametrize("eos", [frozenset(), frozenset({2})], ids=["endless", "ending"])
def test_several_rounds_have_the_targets_distribution(
    rule: Callable[[EnumeratedChoices], Rule],
    drafting: Drafting,
    shape: Shape,
    processors: list[Processor],
    eos: frozenset[int],
) -> None:
    target, drafter = Toy(3, seed=1, scale=1.0), Toy(3, seed=2, scale=1.0)
    expected = plain_distribution(target, [1, 0], 4, eos, processors)
    got = drafted_distribution(
        rule, target, lambda o, text: drafting(drafter, o, text, shape), [1, 0], 4, eos, processors
    )
    assert difference(got, expected) < 1e-9


@pytest.mark.parametrize(
    ("rule", "drafting", "shape", "vocab"),
    [
        (residual, drawn_children(), [0, 0, 0, 0], 5),
        (residual, drawn_children(), [0, 0, 0], 6),
        (residual, drawn_children(), [0, 0, 1, 1, 2, 2], 3),
        (residual, drawn_children(), [0, 0, 0], 2),  # more children than tokens
        (residual, drawn_children(), [0, 1, 2, 3], 1),
        (traversal, drawn_children(), [0, 0, 0, 0], 5),
        (traversal, drawn_children(), [0, 0, 1, 1, 2, 2], 3),
        (traversal, drawn_children(), [0, 0, 0], 2),
        (traversal, drawn_children(), [0, 1, 2, 3], 1),
        (sampled, fixed(), [0, 0, 1, 1, 2, 3], 6),
    ],
)
def test_one_round_of_a_larger_draft_has_the_targets_distribution(
    rule: Callable[[EnumeratedChoices], Rule], drafting: Drafting, shape: Shape, vocab: int
) -> None:
    target, drafter = Toy(vocab, seed=3, scale=1.0), Toy(vocab, seed=4, scale=0.7)
    calls = 0

    def draft(choices: EnumeratedChoices, text: list[int]) -> Draft:
        nonlocal calls
        calls += 1
        return drafting(drafter, choices, text, shape if len(text) == 2 else [])  # later rounds are plain

    length = 2 if vocab > 4 else 3
    got = drafted_distribution(rule, target, draft, [0, 0], length)
    assert difference(got, plain_distribution(target, [0, 0], length, frozenset(), [])) < 1e-9
    assert calls > 1 or vocab == 1


def shapes(nodes: int) -> list[Shape]:
    """Return all shapes of a tree with `nodes` nodes below the root and at most three children each, depth first."""
    found: list[Shape] = [[]]
    for node in range(nodes):
        longer: list[Shape] = []
        for shape in found:
            parent = node
            while parent >= 0:
                if shape.count(parent) < 3:
                    longer.append([*shape, parent])
                parent = shape[parent - 1] if parent else -1
        found = longer
    return found


@pytest.mark.parametrize("shape", [shape for nodes in range(1, 5) for shape in shapes(nodes)], ids=str)
def test_traversal_has_the_targets_distribution_for_every_shape_up_to_five_nodes(shape: Shape) -> None:
    target, drafter = Toy(3, seed=3, scale=1.0), Toy(3, seed=4, scale=0.7)
    length = 1 + max(depths([-1, *shape]))

    def draft(choices: EnumeratedChoices, text: list[int]) -> Draft:
        return drawn_children()(drafter, choices, text, shape if len(text) == 2 else [])  # later rounds are plain

    got = drafted_distribution(traversal, target, draft, [0, 0], length)
    assert difference(got, plain_distribution(target, [0, 0], length, frozenset(), [])) < 1e-12


@pytest.mark.parametrize("rule", [residual, traversal])
def test_a_nodes_children_may_depend_on_its_siblings(rule: Callable[[EnumeratedChoices], Rule]) -> None:
    """The first child has a child only if the second one is token 0."""
    target, drafter = Toy(3, seed=3, scale=1.0), Toy(3, seed=4, scale=0.7)

    def draft(choices: EnumeratedChoices, text: list[int]) -> Draft:
        if len(text) > 2:
            return drawn_children()(drafter, choices, text, [])
        pair = drawn_children()(drafter, choices, text, STAR)
        assert pair.probs is not None
        first, second = pair.tokens[0, 1:].tolist()
        if second:
            return pair
        below = drawn_children()(drafter, choices, [*text, first], [0])
        assert below.probs is not None
        probs = torch.cat([pair.probs[:, :1], below.probs[:, :1], torch.zeros(1, 2, 3, dtype=torch.float64)], 1)
        tokens = [first, second, int(below.tokens[0, 1])]
        return trees_from_lists(torch.tensor(text[-1:]), [(tokens, TREE)], probs)

    expected = plain_distribution(target, [0, 0], 3, frozenset(), [])
    assert difference(drafted_distribution(rule, target, draft, [0, 0], 3), expected) < 1e-12


@pytest.mark.parametrize("rule", [residual, traversal])
def test_children_that_are_dropped_for_their_own_token_are_caught(rule: Callable[[EnumeratedChoices], Rule]) -> None:
    target, drafter = Toy(6, seed=3, scale=1.0), Toy(6, seed=4, scale=0.7)

    def draft(choices: EnumeratedChoices, text: list[int]) -> Draft:
        pair = drawn_children()(drafter, choices, text, STAR)
        return pair if int(pair.tokens[0, 2]) > 2 else replace(pair, size=pair.size - 1)

    expected = plain_distribution(target, [0, 0], 2, frozenset(), [])
    assert difference(drafted_distribution(rule, target, draft, [0, 0], 2), expected) > 1e-3


@pytest.mark.parametrize("rule", [residual, traversal])
def test_a_drafter_equal_to_the_target_is_always_accepted(rule: Callable[[EnumeratedChoices], Rule]) -> None:
    target = Toy(3, seed=5)
    got = drafted_distribution(rule, target, lambda o, text: drawn_children()(target, o, text, CHAIN), [0], 3)
    assert difference(got, plain_distribution(target, [0], 3, frozenset(), [])) < 1e-9


@pytest.mark.parametrize(
    ("rule", "drafting"),
    [
        (typical, fixed()),
        (typical, drawn_children()),
        (always, fixed()),
        (always, drawn_children()),
        (residual, fixed(probs=True)),
    ],
    ids=["typical", "typical, drawn", "always", "always, drawn", "best tokens that pretend to be drawn"],
)
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_lossy_rules_are_caught(rule: Callable[[EnumeratedChoices], Rule], drafting: Drafting, shape: Shape) -> None:
    target, drafter = Toy(3, seed=1, scale=1.0), Toy(3, seed=2, scale=1.0)
    got = drafted_distribution(rule, target, lambda o, text: drafting(drafter, o, text, shape), [1, 0], 3)
    assert difference(got, plain_distribution(target, [1, 0], 3, frozenset(), [])) > 1e-2


@pytest.mark.parametrize(
    ("rule", "drafting"), [(sampled, fixed()), (residual, drawn_children()), (traversal, drawn_children())]
)
def test_the_whole_loop_with_two_rows_has_the_targets_distribution(
    rule: Callable[[EnumeratedChoices], Rule], drafting: Drafting
) -> None:
    """The loop itself, prompt's round, guard and leaving rows included: rows are independent and each has its
    distribution."""
    target, drafter = Toy(2, seed=6, scale=1.0), Toy(2, seed=7, scale=1.0)
    prompts, eos, choices = [[1, 0], [1]], frozenset({1}), EnumeratedChoices()

    class Drawing(Scripted):
        def propose(self, state: Memory, roots: Tensor, plan: Plan) -> Draft:
            drafts = [drafting(drafter, choices, row, [0]) for row in state.rows]
            probs = [draft.probs for draft in drafts if draft.probs is not None]
            return Draft(
                torch.cat([draft.tokens for draft in drafts]),
                torch.cat([draft.parents for draft in drafts]),
                torch.cat([draft.size for draft in drafts]),
                torch.cat(probs) if probs else None,
            )

    def draw() -> tuple[tuple[int, ...], ...]:
        stop = Stop(padded(prompts)["input_ids"].shape[1] + 3, eos)
        text, _ = run(target, prompts, stop, rule(choices), Drawing(lambda *_: ([], [])), FixedBudget(1))
        return tuple(map(tuple, text.tokens))

    got: dict[tuple[tuple[int, ...], ...], float] = defaultdict(float)
    for probability, tokens in choices.outcomes(draw):
        got[tokens] += probability
    distributions = [plain_distribution(target, prompt, 3, eos, []) for prompt in prompts]
    assert set(got) == set(product(*distributions))
    for tokens, probability in got.items():
        assert abs(probability - distributions[0][tokens[0]] * distributions[1][tokens[1]]) < 1e-9
