"""Chains of the small model that are drafted themselves: the same chains, in fewer passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import mmdec
from mmdec.core.budget import FixedBudget
from mmdec.core.tree import chain_drafts
from mmdec.core.verify import ResidualRule, SamplingState
from mmdec.drafters.lookup import LookupDrafter
from mmdec.drafters.recycling import RecyclingDrafter
from mmdec.drafters.small_model.drafter import SmallModelDrafter
from mmdec.errors import InputError
from mmdec.types import Context, Draft, Needs, Plan, Round, Scores, Target, Verdict
from tests.support.blended_toy import PROMPTS, CyclingBudget, Toy, run, start
from tests.support.draft_networks import texts
from tests.support.draft_warps import at_temperature
from tests.support.trees import is_chain

INNER = ["lookup", "recycling"]


class Bigrams(Toy):
    """A target whose logits depend on the last two tokens only, so that its text soon repeats itself."""

    def logits(self, text: list[int]) -> Tensor:
        return super().logits(text[-2:])


@dataclass
class Script:
    """An inner drafter that follows a text of its own. It records its texts, which must be those of the rows."""

    answers: Sequence[int] = ()
    needs: Needs = field(default_factory=Needs)
    name: str = "script"
    texts: list[list[int]] = field(default_factory=list[list[int]])

    def check(self, target: Target) -> None: ...

    def start(self, context: Context) -> list[int]:
        self.texts.append(context.tokens[0].tolist())
        return self.texts[-1]

    def propose(self, state: list[int], roots: Tensor, plan: Plan) -> Draft:
        assert state[-1] == int(roots[0])
        return chain_drafts(roots, [list(self.answers)[: plan.nodes]])

    def update(self, state: list[int], draft: Draft, scores: Scores, verdict: Verdict) -> None:
        assert scores.logits.shape[:2] == draft.tokens.shape
        assert state[-1] == int(draft.tokens[0, 0])
        state += verdict.tokens[0].tolist()

    def rewrite(self, state: list[int], removed: Sequence[int], added: Sequence[Sequence[int]]) -> None:
        state[len(state) - removed[0] :] = added[0]

    def select(self, state: list[int], live: Tensor) -> None: ...


def proposal(drafter: SmallModelDrafter, rows: int, plan: Plan) -> Draft:
    prompts, roots = [[1, 2, 3], [4, 5, 6], [1, 1, 1]][:rows], [2, 5, 3][:rows]
    return drafter.propose(start(drafter, prompts, roots, 8), torch.tensor(roots), plan)


@pytest.mark.parametrize("threshold", [0.0, 1e-9, 0.02, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("inner", [*INNER, "script"])
@pytest.mark.parametrize("kind", [Toy, Bigrams])
def test_an_inner_drafter_does_not_change_the_chain(kind: type[Toy], inner: Any, rows: int, threshold: float) -> None:
    plan = Plan(7, 7, threshold=threshold)
    expected = proposal(SmallModelDrafter(kind()), rows, plan)
    if inner == "script":  # it is right about the first row for some tokens
        inner = Script([*expected.tokens[0, 1:4].tolist(), 0, 0])
    draft = proposal(SmallModelDrafter(kind(), inner=inner), rows, plan)
    assert draft.tokens.tolist() == expected.tokens.tolist()
    assert draft.size.tolist() == expected.size.tolist()
    assert is_chain(draft)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("kind", [Toy, Bigrams])
def test_the_text_is_plain_decodings_and_the_cache_follows(kind: type[Toy], inner: str, rows: int) -> None:
    small = kind(7, seed=1)
    target, drafter = kind(8, seed=2, blend=small, share=0.4), SmallModelDrafter(small, width=3, inner=inner)
    rounds = run(target, drafter, CyclingBudget(), PROMPTS[:rows], 40)
    plain = texts(run(target, None, FixedBudget(0), PROMPTS[:rows], 40), rows)
    assert texts(rounds, rows) == plain
    assert sum(sum(round_.accepted) for round_ in rounds) > 0
    assert any(a < d for round_ in rounds for a, d in zip(round_.accepted, round_.drafted, strict=True))
    session = small.session
    assert session is not None
    row = rounds[-1].rows[0]  # the last to leave; what its cache holds is a beginning of its text
    whole = PROMPTS[row] + plain[row]
    assert session.texts[0] == whole[: len(session.texts[0])]
    assert len(session.texts[0]) >= len(PROMPTS[row]) + 1


def passes(inner: Any, rows: int = 1, nodes: int = 5) -> tuple[list[Round], int]:
    small = Bigrams(8, seed=1)
    target = Bigrams(8, seed=2, blend=small, share=0.3)
    drafter = SmallModelDrafter(small, inner=inner)
    rounds = run(target, drafter, FixedBudget(nodes), PROMPTS[:rows], 60, eos=99)
    assert small.session is not None
    return rounds, len(small.session.passes)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("inner", INNER)
def test_the_same_rounds_take_fewer_passes(inner: str, rows: int) -> None:
    plain, many = passes(None, rows)
    staged, few = passes(inner, rows)
    assert [round_.tokens for round_ in staged] == [round_.tokens for round_ in plain]
    assert [round_.drafted for round_ in staged] == [round_.drafted for round_ in plain]
    assert few < 0.85 * many


def test_a_wrong_guess_costs_no_pass() -> None:
    _, many = passes(None)
    rounds, count = passes(Script([7, 7, 7]))
    assert texts(rounds, 1) == texts(passes(None)[0], 1)
    assert count <= many


class Switching(Toy):
    """The logits are those of one fixed text, of which another target may have single tokens changed."""

    def __init__(self, text: Sequence[int], changed: Sequence[int] = ()) -> None:
        super().__init__(40)
        self.line, self.changed = list(text), changed

    def computed(self, text: list[int]) -> Tensor:
        at = len(text)
        token = self.line[at] + 20 * (at in self.changed)
        return 9.0 * torch.nn.functional.one_hot(torch.tensor(token), 40)


def test_the_rest_of_a_rejected_chain_is_drafted_again() -> None:
    """Where the target replaces a single token, the small model soon writes what it wrote before."""
    line = torch.randperm(19, generator=torch.Generator().manual_seed(3)).tolist()
    small, target = Switching(line), Switching(line, changed=[5])
    rounds = run(target, SmallModelDrafter(small, inner=Script()), FixedBudget(8), [line[:2]], 12, eos=99)
    assert [round_.tokens[0] for round_ in rounds] == [line[2:3], [*line[3:5], line[5] + 20], line[6:14]]
    assert small.session is not None
    # The first chain takes eight passes. In the second one, the small model's first token is one of the last chain, so
    # that the four tokens after it there are drafted. All are right, and two passes give six tokens.
    assert small.session.passes == [1, 2, 3, 4, 5, 6, 7, 8, 1, 6, 7]


def test_the_inner_drafter_reads_the_accepted_text() -> None:
    inner = Script([3, 4, 5])
    rounds, _ = passes(inner, rows=3)
    written = [prompt + text for prompt, text in zip(PROMPTS, texts(rounds, 3), strict=False)]
    assert inner.texts == written


@pytest.mark.parametrize("nodes", [(3, 3), (9, 3)])
def test_sampled_drafts_and_trees_are_the_small_models_own(nodes: tuple[int, int]) -> None:
    """Drawn children come from the distributions that are returned with them, whatever the inner drafter guesses."""
    results: list[list[list[int]]] = []
    for inner in (None, "lookup"):
        small = Toy(6, seed=12)
        target, rule = Toy(6, seed=13, blend=small, share=0.5), ResidualRule(SamplingState(5, at_temperature(0.8)))
        drafter = SmallModelDrafter(small, inner=inner)
        rounds = run(target, drafter, FixedBudget(*nodes), [[1, 2], [3, 4]], 20, rule, eos=99)
        assert sum(sum(round_.accepted) for round_ in rounds)
        results.append(texts(rounds, 2))
    assert results[0] == results[1]
    trees = [proposal(SmallModelDrafter(Toy(), inner=inner), 2, Plan(9, 3)) for inner in (None, "lookup")]
    assert torch.equal(trees[0].tokens, trees[1].tokens)


def test_an_unknown_token_ends_the_guess() -> None:
    small = Toy(7)
    drafter = SmallModelDrafter(small, inner=Script([8, 8]))
    state = start(drafter, [[1, 2]], [3], 9)
    assert int(drafter.propose(state, torch.tensor([3]), Plan(4, 4)).size[0]) == 5
    assert small.session is not None
    assert small.session.passes == [1, 2, 3, 4]


def test_names_tell_settings_apart() -> None:
    options: list[dict[str, Any]] = [
        *({"inner": inner} for inner in (None, "lookup", LookupDrafter(4), "recycling")),
        *({"prompt": prompt} for prompt in (64, 65, sorted)),
    ]
    assert len({SmallModelDrafter(Toy(), **given).name for given in options}) == len(options)


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ("looku", "`inner` must be a drafter without weights, one of lookup, recycling.*'lookup'"),
        ("eagle", "`inner` must be a drafter without weights"),
        ("mtp", "`inner` must be a drafter without weights"),
        ("auto", "`inner` must be a drafter without weights"),
        ("/nowhere/at/all", "`inner` must be a drafter without weights"),
        (
            SmallModelDrafter(Toy()),
            "`inner` must be an object with .*rewrite, but .* lacks `rewrite`. Use lookup or recycling",
        ),
        (3, "`inner` must be an object with"),
        (LookupDrafter, "`inner` must be an object with .* which is a class"),
    ],
)
def test_wrong_inner_drafters_are_refused(inner: Any, message: str) -> None:
    for make in (lambda: SmallModelDrafter(Toy(), inner=inner), lambda: mmdec.small_model("anywhere", inner=inner)):
        with pytest.raises(InputError, match=message):
            make()


def test_an_inner_drafter_for_another_vocabulary_is_refused() -> None:
    drafter = SmallModelDrafter(Toy(8), inner=RecyclingDrafter(torch.full((9, 8), -1)))
    with pytest.raises(InputError, match="`initial` must have a row for each of the target's 8 tokens"):
        drafter.check(Toy(9))
