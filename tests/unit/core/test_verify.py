"""Tests verdicts: their shapes, their ends, and each rule's verdict on a small tree."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import get_args

import pytest
import torch
from torch import Tensor

from mmdec.core.sampling import KeyedSample, Sequences, Stop
from mmdec.core.token_groups import TokenGroups
from mmdec.core.tree import chain_drafts, root_only, trees_from_lists
from mmdec.core.verify import RULES as RULES_BY_NAME
from mmdec.core.verify import (
    BuiltInRuleName,
    DrawsRule,
    GroupRule,
    MatchRule,
    Relaxation,
    ResidualRule,
    Rule,
    SamplingState,
    TraversalRule,
    TypicalRule,
    register_rule,
    verify,
)
from mmdec.errors import InputError
from mmdec.types import Draft, Plan, Scores
from tests.support.draft_warps import at_temperature
from tests.support.toy_target import AlwaysAccept, RandomBudget, Scripted, Toy, random_tree_drafts, run

VOCAB = 8
RULES: list[Rule] = [
    MatchRule(),
    ResidualRule(SamplingState(0)),
    TraversalRule(SamplingState(0)),
    TypicalRule(),
]


def scores(best: list[list[int]]) -> Scores:
    """Make scores whose most probable token after each node (B, N) is given."""
    return Scores(10.0 * torch.nn.functional.one_hot(torch.tensor(best), VOCAB).float())


def text(rows: int, room: int = 10, eos: int = 7) -> Sequences:
    return Sequences(torch.ones(rows, 1, dtype=torch.long), Stop(1 + room, frozenset({eos})))


def tree() -> Draft:
    """0 -> 1 (token 2) -> 3 (token 4) -> 4 (token 5), and 0 -> 2 (token 3); the second row is a chain of one."""
    return trees_from_lists(torch.tensor([1, 1]), [([2, 3, 4, 5], [0, 0, 1, 3]), ([6], [0])])


def test_rows_of_one_draft_accept_different_lengths() -> None:
    verdict = verify(tree(), scores([[2, 4, 0, 5, 6], [3, 0, 0, 0, 0]]), MatchRule(), text(2))
    assert verdict.path.tolist() == [[0, 1, 3, 4], [0, -1, -1, -1]]
    assert verdict.tokens.tolist() == [[2, 4, 5, 6], [3, -1, -1, -1]]
    assert verdict.lengths.tolist() == [4, 1]
    assert verdict.new_tokens == [[2, 4, 5, 6], [3]]
    assert verdict.next.tolist() == [6, 3]
    assert verdict.done.tolist() == [False, False]
    assert all(part.dtype == torch.long for part in (verdict.path, verdict.next, verdict.tokens, verdict.lengths))


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_accepts_what_is_certain(rule: Rule) -> None:
    certain = Scores(100 * scores([[2, 4, 0, 5, 6], [6, 3, 0, 0, 0]]).logits)
    verdict = verify(tree(), certain, rule, text(2))
    assert verdict.tokens.tolist() == [[2, 4, 5, 6], [6, 3, -1, -1]]
    assert verdict.path.tolist() == [[0, 1, 3, 4], [0, 1, -1, -1]]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("room", "eos", "expected"),
    [(10, 4, [2, 4]), (10, 2, [2]), (10, 6, [2, 4, 5, 6]), (3, 7, [2, 4, 5]), (1, 7, [2]), (4, 7, [2, 4, 5, 6])],
)
def test_rows_end_inside_a_draft(rule: Rule, room: int, eos: int, expected: list[int]) -> None:
    certain = Scores(100 * scores([[2, 4, 0, 5, 6], [3, 0, 0, 0, 0]]).logits)
    state = text(2, room, eos)
    verdict = verify(tree(), certain, rule, state)
    assert verdict.tokens[0, : verdict.lengths[0]].tolist() == expected
    assert state.tokens == [expected, [3]]
    assert verdict.done.tolist() == [True, room == 1]
    assert int(verdict.next[0]) == expected[-1]
    path = [node for node in verdict.path[0].tolist() if node >= 0]
    assert path == [0, 1, 3, 4][: len(path)]
    assert len(path) <= len(expected)


def test_finished_rows_are_not_touched() -> None:
    state = text(3)
    state.live = [2]
    verdict = verify(root_only(torch.tensor([1])), scores([[5]]), MatchRule(), state)
    assert state.tokens == [[], [], [5]]
    assert verdict.next.tolist() == [5]


def test_the_first_of_equal_siblings_is_taken() -> None:
    draft = trees_from_lists(torch.tensor([1]), [([3, 3, 4], [0, 0, 2])])
    verdict = verify(draft, scores([[3, 5, 4, 6]]), MatchRule(), text(1))
    assert verdict.path.tolist() == [[0, 1]]
    assert verdict.tokens.tolist() == [[3, 5]]


def test_ties_are_broken_as_in_plain_decoding() -> None:
    logits = torch.zeros(1, 2, VOCAB)
    logits[..., 3] = logits[..., 5] = 1.0
    verdict = verify(chain_drafts(torch.tensor([1]), [[5]]), Scores(logits), MatchRule(), text(1))
    assert verdict.tokens.tolist() == [[3]]


def test_a_verdict_depends_on_its_arguments_alone() -> None:
    draft, target = tree(), Scores(torch.randn(2, 5, VOCAB, generator=torch.Generator().manual_seed(0)))
    rules = (ResidualRule(SamplingState(3)), TraversalRule(SamplingState(3)), MatchRule(KeyedSample(3)))
    for rule in rules:
        one, two = (verify(draft, target, rule, text(2)) for _ in range(2))
        assert one.tokens.tolist() == two.tokens.tolist()


@pytest.mark.parametrize("rule", [ResidualRule(SamplingState(0)), TraversalRule(SamplingState(0))])
def test_forbidden_tokens_never_come(rule: Rule) -> None:
    """-inf after a processor, in the draft and in the residual; and tokens that cannot have been drawn."""

    def only_three(ids: Tensor, logits: Tensor) -> Tensor:
        return logits.masked_fill(torch.arange(VOCAB) >= 3, -torch.inf)

    rows = 200
    state = Sequences(torch.ones(rows, 1, dtype=torch.long), Stop(99), [only_three])
    probs = torch.zeros(rows, 4, VOCAB)
    probs[:, :, 4:] = 0.25
    draft = chain_drafts(torch.ones(rows, dtype=torch.long), [[4, 1, 5]] * rows)
    draft = replace(draft, probs=probs)
    verify(draft, Scores(torch.zeros(rows, 4, VOCAB)), rule, state)
    tokens = {token for row in state.tokens for token in row}
    assert tokens == {0, 1, 2}


class Diary:
    """Remembers how its calls went."""

    def __init__(self) -> None:
        self.lines: list[list[int]] = []

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        self.lines.append(ids[0].tolist())
        return logits.roll(len(self.lines), 1)


@pytest.mark.parametrize("eos", [frozenset[int](), frozenset({0})], ids=["endless", "ending"])
@pytest.mark.parametrize("name", ["sampled", "residual", "traversal", "typical", "tolerance", "draws", "groups"])
def test_processors_remember_the_text_and_nothing_else(name: str, eos: frozenset[int]) -> None:
    target = Toy(4, seed=2, scale=1.0)
    rules: dict[str, Rule] = {
        "sampled": MatchRule(KeyedSample(1)),
        "residual": ResidualRule(SamplingState(1)),
        "traversal": TraversalRule(SamplingState(1)),
        "typical": TypicalRule(KeyedSample(1)),
        "tolerance": ResidualRule(SamplingState(1), 0.2),
        "draws": DrawsRule(2, KeyedSample(1)),
        "groups": GroupRule(TokenGroups.from_labels([0, 1, 1, 2]), SamplingState(1)),
    }
    budget = RandomBudget(Random(0))
    prompts = [[1 + row % 3] * (1 + row) for row in range(6)]
    text, _ = run(
        target, prompts, Stop(30, eos), rules[name], Scripted(random_tree_drafts(target, [0])), budget, [Diary()]
    )
    assert eos or sum(map(sum, budget.seen)) > 20
    assert text.processors is not None
    for row, (diary,) in enumerate(text.processors):
        assert isinstance(diary, Diary)
        ids, start = text.ids(row)[0].tolist(), text.start
        assert diary.lines == [ids[:length] for length in range(start, len(ids))]


def test_rules_say_whether_they_are_lossless_and_how_they_draw() -> None:
    assert {name for name in get_args(BuiltInRuleName) if not RULES_BY_NAME[name].lossless} == {"typical"}
    assert not any(relaxation.entry.lossless for relaxation in (Relaxation(draws=2), Relaxation(tolerance=0.1)))
    plan, said = Plan(3, 3), text(1)
    for rule in (MatchRule(), TypicalRule(), DrawsRule(2)):
        assert rule.drafting_plan(plan, said) == plan
    for kind in (ResidualRule, TraversalRule, lambda state: ResidualRule(state, 0.1)):
        rule = kind(SamplingState(5, at_temperature(0.7)))
        drawn = rule.drafting_plan(plan, said)
        assert (drawn.nodes, drawn.depth) == (3, 3)
        assert drawn.warp is not None
        torch.testing.assert_close(drawn.warp(torch.eye(2)[None]), (torch.eye(2)[None] / 0.7).softmax(-1))
        assert drawn.generator is not None
        assert rule.drafting_plan(plan, said).generator is drawn.generator  # one stream for the run


def test_typical_takes_the_best_of_the_probable_children() -> None:
    logits = torch.full((1, 4, VOCAB), -9.0)
    logits[0, 0, :4] = torch.tensor([1.0, 0.2, 0.9, 0.8])
    logits[0, 2, 0] = 9.0
    draft = trees_from_lists(torch.tensor([1]), [([1, 2, 3], [0, 0, 0])])
    verdict = verify(draft, Scores(logits), TypicalRule(), text(1))
    assert verdict.tokens.tolist() == [[2, 0]]  # not token 0, which greedy decoding would take
    strict = verify(draft, Scores(logits), TypicalRule(epsilon=0.9, delta=9.0), text(1))
    assert strict.tokens.tolist() == [[0]]


def test_verify_asks_the_rule_whatever_its_kind() -> None:
    """Also a greedy rule with another walk: no rule is special-cased."""
    draft = chain_drafts(torch.tensor([1]), [[2, 3]])
    verdict = verify(draft, scores([[5, 5, 5]]), AlwaysAccept(), text(1))
    assert verdict.path.tolist() == [[0, 1, 2]]
    assert verify(draft, scores([[5, 5, 5]]), MatchRule(), text(1)).path.tolist() == [[0]]


def test_names_of_built_in_rules_are_not_given_away() -> None:
    with pytest.raises(InputError, match="`name` must not be that of a built-in rule, but is 'greedy'"):
        register_rule("greedy", lossless=True)


def test_a_rule_that_draws_drafts_needs_sampling() -> None:
    with pytest.raises(InputError, match="`samples` must be True for a rule that draws drafts, but is None"):
        register_rule("mine", lossless=True, draws_drafts=True)
