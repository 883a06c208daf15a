"""Tests Jacobi and lookahead decoding: the comb that moves on, the stored n-grams, and fewer passes for models that
predict several places at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmdec
from mmdec.core.tree import trees_from_lists
from mmdec.drafters.jacobi import MAX_NGRAMS, JacobiDrafter, JacobiRow
from mmdec.types import Context, Draft, Plan, Scores, Verdict
from tests.support.tiny_text import language_model, prompts
from tests.support.trees import is_chain

VOCABULARY = 30


def context(tokens: list[list[int]]) -> Context:
    ids = torch.tensor(tokens)
    return Context(ids, torch.ones_like(ids, dtype=torch.bool), torch.arange(ids.shape[1])[None, None], ids[:, 0])


def test_nothing_is_stored_behind_a_first_token() -> None:
    row = JacobiDrafter().start(context([[1, 2, 3]]))[0]
    row.store(9, ())
    assert row.follow(9, 3) == []


def round_of(drafter: JacobiDrafter, state: list[JacobiRow], draft: Draft, best: list[int], new: list[int]) -> None:
    """Tell the drafter the likeliest token after each node, and the new tokens."""
    logits = torch.nn.functional.one_hot(torch.tensor([best]), VOCABULARY).float()
    tokens = torch.tensor([new])
    path = torch.zeros(1, 1, dtype=torch.long)
    verdict = Verdict(path, tokens[:, -1], torch.tensor([False]), tokens, torch.tensor([len(new)]))
    drafter.update(state, draft, Scores(logits), verdict)


def paths(draft: Draft) -> list[list[int]]:
    """Return the tokens of the path to each node below the root, in the nodes' order."""
    found: list[list[int]] = [[]]
    for node in range(1, int(draft.size[0])):
        found.append([*found[int(draft.parents[0, node])], int(draft.tokens[0, node])])
    return found[1:]


def test_a_chain_holds_the_predictions_behind_the_mismatch() -> None:
    drafter = JacobiDrafter()
    state = drafter.start(context([[5]]))
    draft = drafter.propose(state, torch.tensor([5]), Plan(4, 4))
    assert is_chain(draft)
    assert paths(draft)[-1] == [5, 5, 5, 5]  # guesses from the prompt
    round_of(drafter, state, draft, [10, 11, 12, 13, 14], [10])
    draft = drafter.propose(state, torch.tensor([10]), Plan(4, 4))
    assert paths(draft)[-1] == [11, 12, 13, 14]
    round_of(drafter, state, draft, [11, 12, 20, 21, 22], [11, 12, 20])  # two are right
    assert paths(drafter.propose(state, torch.tensor([20]), Plan(4, 4)))[-1] == [21, 22, 5, 5]


def test_predictions_that_were_confirmed_behind_a_mismatch_are_stored() -> None:
    drafter = JacobiDrafter()
    state = drafter.start(context([[5]]))
    draft = trees_from_lists(torch.tensor([5]), [([6, 7, 8, 9], [0, 1, 2, 3])])
    state[0].levels, state[0].capacity = [[5, 6, 7, 8, 9]], 1
    round_of(drafter, state, draft, [1, 2, 8, 9, 3], [1])
    assert state[0].stored_ngrams(7) == [[8, 9, 3]]
    assert state[0].stored_ngrams(8) == [[9, 3]]
    assert state[0].stored_ngrams(6) == []


def test_the_comb_stores_the_columns_that_it_has_grown() -> None:
    """A target whose next token is always one more: each tooth is right once it was predicted."""
    drafter, root = JacobiDrafter(), 5
    state = drafter.start(context([[5]]))
    for _ in range(8):
        draft = drafter.propose(state, torch.tensor([root]), Plan(24, 8))
        assert paths(draft)
        best = [(int(token) + 1) % VOCABULARY for token in draft.tokens[0]]
        round_of(drafter, state, draft, best, [root + 1])
        root += 1
    levels = state[0].levels
    for column in range(len(levels[-1])):  # each tooth goes on from its own first token
        tooth = [level[column] for level in levels[1:]]
        assert tooth == list(range(tooth[0], tooth[0] + 3))
    assert len(state[0].levels) == 4
    assert state[0].stored_ngrams(5)[0] == [6, 7, 8, 9]
    # the newest n-gram of the root comes first, and the teeth are branches
    tree = paths(drafter.propose(state, torch.tensor([5]), Plan(24, 8)))
    assert [6, 7, 8, 9] in tree


def test_rounds_without_a_draft_move_the_comb() -> None:
    drafter = JacobiDrafter()
    state = drafter.start(context([[5]]))
    draft = drafter.propose(state, torch.tensor([5]), Plan(4, 4))
    round_of(drafter, state, draft, [10, 11, 12, 13, 14], [10])
    drafter.propose(state, torch.tensor([10]), Plan(4, 4))
    round_of(drafter, state, trees_from_lists(torch.tensor([10]), [([], [])]), [11], [11])
    assert paths(drafter.propose(state, torch.tensor([11]), Plan(3, 3)))[-1] == [12, 13, 14]


def test_guesses_that_were_wrong_are_not_drafted() -> None:
    drafter = JacobiDrafter()
    state, plan = drafter.start(context([[5]])), Plan(4, 4, threshold=0.1)
    for new in range(6, 20):
        draft = drafter.propose(state, torch.tensor([new - 1]), plan)
        round_of(drafter, state, draft, [28] * draft.tokens.shape[1], [new])
    assert paths(drafter.propose(state, torch.tensor([19]), plan)) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8), st.integers(1, 4)), max_size=12), st.integers(0, 99))
def test_drafts_are_trees_within_any_plans(plans: list[tuple[int, int, int]], seed: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    drafter, root = JacobiDrafter(), 3
    state = drafter.start(context([[1, 2, 3, 1, 2, 3]]))
    for nodes, depth, length in plans:
        draft = drafter.propose(state, torch.tensor([root]), Plan(nodes, depth))
        found = paths(draft)
        assert len(found) <= nodes
        assert max(map(len, found), default=0) <= depth
        assert len({tuple(path) for path in found}) == len(found)
        best = torch.randint(5, (draft.tokens.shape[1],), generator=dice).tolist()
        new = torch.randint(5, (length,), generator=dice).tolist()
        round_of(drafter, state, draft, best, new)
        root = new[-1]
        assert all(len(ngrams) <= MAX_NGRAMS for ngrams in state[0].ngrams.values())


@pytest.mark.parametrize("nodes", [6, (24, 6)])
def test_repetitive_text_takes_fewer_passes(nodes: Any) -> None:
    model, inputs = language_model("llama"), prompts(1)
    options: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None}
    plain = mmdec.generate(model, inputs, None, **options)
    result = mmdec.generate(model, inputs, "jacobi", num_speculative_tokens=nodes, **options)
    assert torch.equal(result.sequences, plain.sequences)
    assert len(result.rounds) < len(plain.rounds)
