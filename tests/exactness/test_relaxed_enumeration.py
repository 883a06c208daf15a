"""Tests by enumerating all random outcomes that the relaxed rule accepts what its formulas say, and no more.

A formula gives the distribution of the first token of a round: of the drafted token, and of what follows its rejection.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import permutations
from math import isclose, prod
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from mmdec.core.sampling import KeyedSample, Sequences, Stop, most_probable
from mmdec.core.token_groups import TokenGroups
from mmdec.core.tree import trees_from_lists
from mmdec.core.verify import DrawsRule, GroupRule, MatchRule, Relaxation, ResidualRule, Rule, SamplingState, verify
from mmdec.errors import InputError
from mmdec.types import Draft, Scores
from tests.exactness.enumeration import EnumeratedChoices, EnumeratedRng
from tests.support.toy_target import RandomBudget, Scripted, Toy, random_tree_drafts, run

VOCAB = 5
OVERLAPPING = TokenGroups(torch.tensor([0, 1, 1, 2, 3, 4, 4]), torch.tensor([0, 0, 1, 1, 2, 2, 3]), VOCAB)
APART = TokenGroups.from_labels([7, 7, -1, 3, 3])


def logits_of(seed: int, holes: tuple[int, ...] = ()) -> Tensor:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5
    return logits.index_fill(0, torch.tensor(holes, dtype=torch.long), -torch.inf)


def distribution(seed: int, holes: tuple[int, ...] = ()) -> Tensor:
    return logits_of(seed, holes).double().softmax(-1)


def membership(groups: TokenGroups) -> Tensor:
    """Return (V, V): the share of each token in each group."""
    table = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    table[groups.tokens, groups.groups] = 1.0
    return table / table.sum(1, keepdim=True)


def first_tokens(
    make: Callable[[EnumeratedChoices], Rule], scores: Tensor, q: Tensor, children: int = 1, drawn: bool = True
) -> Tensor:
    """Return the distribution (V,) of a round's first token: `children` tokens are drawn from q without replacement.

    Args:
        scores: (V,), the target's logits.
    """
    drafting, verifying = EnumeratedChoices(), EnumeratedChoices()
    found = torch.zeros(VOCAB, dtype=torch.float64)

    def draft() -> Draft:
        left, tokens = q.clone(), list[int]()
        for _ in range(children):
            tokens.append(drafting.draw(left.tolist()))
            left[tokens[-1]] = 0.0
        probs = torch.zeros(1, children + 1, VOCAB, dtype=torch.float64)
        probs[0, 0] = q
        return trees_from_lists(torch.tensor([0]), [(tokens, [0] * children)], probs if drawn else None)

    logits = scores.expand(1, children + 1, VOCAB)
    for drafted, tree in drafting.outcomes(draft):

        def draw(tree: Draft = tree) -> int:
            text = Sequences(torch.tensor([[0]]), Stop(3))
            verify(tree, Scores(logits), make(verifying), text)
            return text.tokens[0][0]

        for probability, token in verifying.outcomes(draw):
            found[token] += drafted * probability
    return found


def rejecting(relaxation: Relaxation) -> Callable[[EnumeratedChoices], Rule]:
    def rule(choices: EnumeratedChoices) -> Rule:
        def rng(*key: object) -> EnumeratedRng:
            return EnumeratedRng(choices)

        if relaxation.groups is not None:
            return GroupRule(relaxation.groups, SamplingState(0), rng)
        assert relaxation.tolerance is not None
        return ResidualRule(SamplingState(0), relaxation.tolerance, rng)

    return rule


def drawing(draws: int) -> Callable[[EnumeratedChoices], Rule]:
    def choose(choices: EnumeratedChoices) -> Callable[[Tensor, Sequences, int], int]:
        return lambda scores, text, row: choices.draw(scores[0].double().softmax(-1).tolist())

    return lambda choices: DrawsRule(draws, choose(choices))


@pytest.mark.parametrize("tolerance", [0.0, 0.15, 0.6, 1.0])
@pytest.mark.parametrize("holes", [(), (1, 3)], ids=["all", "some excluded"])
def test_a_tolerance_has_the_distribution_of_its_formula(tolerance: float, holes: tuple[int, ...]) -> None:
    p, q = distribution(1, holes), distribution(2)
    accept = torch.where(p > 0, ((p / q).clamp(max=1.0) + tolerance).clamp(max=1.0), 0.0)
    residual = (p - q).clamp(min=0.0)
    expected = q * accept + (1 - (q * accept).sum()) * residual / residual.sum()
    torch.testing.assert_close(
        first_tokens(rejecting(Relaxation(tolerance=tolerance)), logits_of(1, holes), q), expected
    )
    assert bool(((expected - p).abs().max() > 1e-3) == (tolerance > 0.0))  # a lossless rule has the distribution p


@pytest.mark.parametrize("groups", [APART, OVERLAPPING], ids=["apart", "overlapping"])
@pytest.mark.parametrize("holes", [(), (2,), (1, 3)], ids=["all", "one excluded", "one of each group"])
def test_groups_have_the_distribution_of_their_formula(groups: TokenGroups, holes: tuple[int, ...]) -> None:
    p, q = distribution(1, holes), distribution(2)
    share = membership(groups)
    big_p, big_q = p @ share, q @ share
    torch.testing.assert_close(groups.group_probs(p), big_p)
    inside = (p[:, None] * share / big_p.clamp(min=1e-300)).T  # (group, token), a token's distribution in its group
    ratio = (big_p / big_q.clamp(min=1e-300)).clamp(max=1.0)
    accepted = q[:, None] * share * ratio  # (token, group)
    own = torch.where(p > 0, accepted.sum(1), 0.0)
    replaced = (p <= 0).double() @ accepted @ inside
    residual = (big_p - big_q).clamp(min=0.0)
    expected = own + replaced + (1 - accepted.sum()) * residual / residual.sum() @ inside
    found = first_tokens(rejecting(Relaxation(groups=groups)), logits_of(1, holes), q)
    torch.testing.assert_close(found, expected)
    assert not found[torch.tensor(holes, dtype=torch.long)].any()
    assert bool((found - p).abs().max() > 1e-3) == (len(holes) < 2)  # groups of a single token are lossless


@pytest.mark.parametrize("children", [1, 2, 3])
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "given"])
def test_groups_that_do_not_overlap_have_the_targets_distribution(children: int, drawn: bool) -> None:
    p, q = distribution(3), distribution(4)
    found = first_tokens(rejecting(Relaxation(groups=APART)), logits_of(3), q, children, drawn)
    torch.testing.assert_close(APART.group_probs(found), APART.group_probs(p))
    assert (found - p).abs().max() > 1e-3


@pytest.mark.parametrize("draws", [1, 2, 3, VOCAB, 64])
@pytest.mark.parametrize("holes", [(), (1, 3)], ids=["all", "some excluded"])
def test_several_draws_have_the_distribution_of_their_formula(draws: int, holes: tuple[int, ...]) -> None:
    p, q = distribution(1, holes), distribution(2)
    possible = [token for token in range(VOCAB) if token not in holes]
    expected = torch.zeros(VOCAB, dtype=torch.float64)
    for order in permutations(possible, min(draws, len(possible))):
        probability = prod(
            float(p[token]) / (1 - sum(float(p[earlier]) for earlier in order[:k])) for k, token in enumerate(order)
        )
        for drafted in range(VOCAB):
            expected[drafted if drafted in order else order[0]] += probability * q[drafted]
    found = first_tokens(drawing(draws), logits_of(1, holes), q, drawn=False)
    torch.testing.assert_close(found, expected)
    assert ((found - p).abs().max() < 1e-9) == (draws == 1)


@pytest.mark.parametrize(
    ("relaxed", "lossless"),
    [
        (
            GroupRule(TokenGroups.from_labels(range(6)), SamplingState(5)),
            ResidualRule(SamplingState(5)),
        ),
        (DrawsRule(1, KeyedSample(5)), MatchRule(KeyedSample(5))),
        (DrawsRule(1, most_probable), MatchRule()),
    ],
    ids=["groups", "draws, sampled", "draws, greedy"],
)
def test_without_relaxation_every_token_is_the_lossless_rules(relaxed: Rule, lossless: Rule) -> None:
    target = Toy(6, seed=8, scale=1.0)
    texts = []
    for rule in (relaxed, lossless):
        text, rounds = run(
            target, [[1, 2], [3]], Stop(60), rule, Scripted(random_tree_drafts(target)), RandomBudget(Random(3))
        )
        texts.append((text.tokens, [round_.tokens for round_ in rounds]))
    assert texts[0] == texts[1]


def test_greedy_draws_are_the_most_probable_tokens() -> None:
    logits = torch.tensor([[[3.0, 2.0, 1.0, 0.0, -1.0]] * 2])
    for drafted, draws, expected in ((2, 3, 2), (2, 2, 0), (0, 2, 0), (4, 5, 4)):
        text = Sequences(torch.tensor([[0]]), Stop(2))
        tree = trees_from_lists(torch.tensor([0]), [([drafted], [0])])
        verify(tree, Scores(logits), DrawsRule(draws), text)
        assert text.tokens == [[expected]]


def test_seeded_draws_extend_those_of_fewer() -> None:
    """More draws accept what fewer accept: the same noise ranks the tokens."""
    scores = torch.randn(1, 1, VOCAB)
    for drafted in range(VOCAB):
        tokens = []
        for draws in range(1, VOCAB + 1):
            text = Sequences(torch.tensor([[0]]), Stop(2))
            tree = trees_from_lists(torch.tensor([0]), [([drafted], [0])])
            verify(tree, Scores(scores.expand(1, 2, -1)), DrawsRule(draws, KeyedSample(2)), text)
            tokens.append(text.tokens[0][0])
        accepted = [token == drafted for token in tokens]
        assert accepted == sorted(accepted)
        assert accepted[-1]


def test_groups_around_codes_hold_what_is_near() -> None:
    codebook = [[0.0, 0.0], [0.0, 1.0], [0.0, 2.0]]
    groups = TokenGroups.near(codebook, 1.0, vocab_size=VOCAB, first_code=1)
    members = defaultdict[int, set[int]](set)
    for token, group in zip(groups.tokens.tolist(), groups.groups.tolist(), strict=True):
        members[group].add(token)
    assert dict(members) == {0: {0}, 1: {1, 2}, 2: {1, 2, 3}, 3: {2, 3}, 4: {4}}
    alone = TokenGroups.near(codebook, 0.0, vocab_size=VOCAB, first_code=1)
    assert sorted(zip(alone.tokens.tolist(), alone.groups.tolist(), strict=True)) == [(i, i) for i in range(VOCAB)]
    assert isclose(float(groups.group_probs(distribution(1)).sum()), 1.0)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Relaxation(), "one of `tolerance`, `draws` and `groups`, but has none"),
        (lambda: Relaxation(tolerance=0.1, draws=2), "but has tolerance and draws"),
        (lambda: Relaxation(tolerance=-0.1), "`tolerance` must be from 0 to 1, but is -0.1"),
        (lambda: Relaxation(tolerance=1.5), "`tolerance` must be from 0 to 1, but is 1.5"),
        (lambda: Relaxation(tolerance=float("nan")), "`tolerance` must be from 0 to 1, but is nan"),
        (lambda: Relaxation(draws=0), "`draws` must be a whole number from 1 to 64, but is 0"),
        (lambda: Relaxation(draws=1.5), "`draws` must be a whole number"),  # type: ignore[arg-type]
        (lambda: Relaxation(groups=[0, 1]), "`groups` must be a mmdec.TokenGroups"),  # type: ignore[arg-type]
        (lambda: TokenGroups.from_labels([[0, 1]]), r"`labels` must be .* of the shape \(1, 2\)"),
        (lambda: TokenGroups.from_labels([]), "`labels` must be"),
        (lambda: TokenGroups.from_labels([0.5, 1.0]), "`labels` must be .* whole numbers"),
        (lambda: TokenGroups.from_labels("codes"), "`labels` must be an array of numbers, but cannot be read"),
        (lambda: TokenGroups.near([[0.0]] * 4, 1.0, vocab_size=3), "`vocab_size` must hold the codes 0 to 3, but is 3"),
        (lambda: TokenGroups.near([[0.0]], 1.0, vocab_size=3, first_code=3), "the codes 3 to 3, but is 3"),
        (lambda: TokenGroups.near([[0.0]], 1.0, vocab_size=3, first_code=-1), "the codes -1 to -1"),
        (lambda: TokenGroups.near([[float("nan")]], 1.0, vocab_size=3), "`codebook` must be finite, but holds NaN"),
        (
            lambda: TokenGroups.near([0.0, 1.0], 1.0, vocab_size=3),
            "`codebook` must have two dimensions",
        ),
        (lambda: TokenGroups.near("codes", 1.0, vocab_size=3), "`codebook` must be an array of numbers"),
        (lambda: TokenGroups.near([[0.0]], 1.0, vocab_size=0), "`vocab_size` must be a whole number from 1"),
        (lambda: TokenGroups(torch.tensor([0, 1]), torch.tensor([0]), 2), "must name a group below 2 for each"),
        (lambda: TokenGroups(torch.tensor([0, 1]), torch.tensor([0, 2]), 2), "must name a group below 2"),
        (lambda: TokenGroups(torch.tensor([0, 0]), torch.tensor([0, 1]), 2), "must name a group below 2"),
        (lambda: TokenGroups.near([[0.0]], -1.0, vocab_size=3), "`distance` must be 0 or more and finite, but is -1.0"),
        (lambda: TokenGroups.near(torch.zeros(5000, 1), 0.0, vocab_size=5000), "`distance` must leave groups of 3200"),
    ],
)
def test_wrong_values_are_refused(make: Callable[[], Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        make()
