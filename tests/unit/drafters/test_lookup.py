"""Prompt lookup against a naive search through the text."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdec.core.tree import chain_drafts
from mmdec.drafters.lookup import LookupDrafter
from mmdec.errors import InputError
from mmdec.types import Context, Plan, Scores, Verdict
from tests.support.trees import is_chain

TEXT = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def naive(text: Sequence[int], longest: int, shortest: int, length: int) -> list[int]:
    """Return the tokens after the most recent earlier match of the longest suffix; the copy runs on into itself."""
    for n in range(longest, shortest - 1, -1):
        for at in range(len(text) - 1, n - 1, -1):
            if list(text[at - n : at]) == list(text[len(text) - n :]):
                whole = list(text)
                for step in range(length):
                    whole.append(whole[at + step])
                return whole[len(text) :]
    return []


def context(texts: Sequence[Sequence[int]], pad: int = 0) -> Context:
    """Prompts padded on the left."""
    width = max(map(len, texts))
    tokens = torch.tensor([[pad] * (width - len(text)) + list(text) for text in texts])
    mask = torch.tensor([[False] * (width - len(text)) + [True] * len(text) for text in texts])
    return Context(tokens, mask, mask.cumsum(1)[None], mask.sum(1))


def verdict(emitted: Sequence[Sequence[int]]) -> Verdict:
    width = max(map(len, emitted))
    tokens = torch.tensor([list(row) + [-1] * (width - len(row)) for row in emitted])
    rows = len(emitted)
    return Verdict(
        torch.zeros(rows, 1, dtype=torch.long),
        torch.tensor([row[-1] for row in emitted]),
        torch.zeros(rows, dtype=torch.bool),
        tokens,
        torch.tensor([len(row) for row in emitted]),
    )


def advance(drafter: LookupDrafter, state: object, emitted: Sequence[Sequence[int]]) -> torch.Tensor:
    """Update the state by a round that emitted these. Returns the roots."""
    roots = torch.tensor([row[-1] for row in emitted])
    none = chain_drafts(roots, [[] for _ in emitted])
    drafter.update(state, none, Scores(torch.zeros(len(emitted), 1, 4)), verdict(emitted))  # type: ignore[arg-type]
    return roots


def nodes(draft: object, row: int) -> tuple[list[int], list[int]]:
    size = int(draft.size[row])  # type: ignore[attr-defined]
    return draft.tokens[row, 1:size].tolist(), draft.parents[row, 1:size].tolist()  # type: ignore[attr-defined]


@settings(max_examples=150, deadline=None)
@given(TEXT, st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=5), st.integers(1, 4), st.data())
def test_equals_naive_search(prompt: list[int], rounds: list[list[int]], longest: int, data: st.DataObject) -> None:
    shortest = data.draw(st.integers(1, longest))
    length = data.draw(st.integers(1, 6))
    drafter = LookupDrafter(longest, shortest)
    memory, text = drafter.start(context([prompt])), list(prompt)
    roots = torch.tensor(text[-1:])
    for emitted in [[], *rounds]:
        if emitted:
            text += emitted
            roots = advance(drafter, memory, [emitted])
        draft = drafter.propose(memory, roots, Plan(length, length))
        assert nodes(draft, 0)[0] == naive(text, longest, shortest, length)
        assert is_chain(draft)


@settings(max_examples=80, deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=4), st.integers(0, 9), st.integers(0, 5))
def test_trees_are_well_formed(texts: list[list[int]], count: int, depth: int) -> None:
    drafter = LookupDrafter()
    roots = torch.tensor([text[-1] for text in texts])
    draft = drafter.propose(drafter.start(context(texts)), roots, Plan(count, depth))
    for row, text in enumerate(texts):
        tokens, parents = nodes(draft, row)
        level, edges = [0], set()
        for index, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1):
            assert parent < index
            level.append(level[parent] + 1)
            edges.add((parent, token))
        assert len(edges) == len(tokens) <= count  # no two siblings alike
        assert max(level) <= depth
        best = naive(text, 3, 1, min(count, depth))
        assert tokens[: len(best)] == best  # the longest match comes first
    assert draft.tokens[:, 0].tolist() == roots.tolist()
    assert (draft.parents[:, 0] == -1).all()


def test_tree_holds_continuations_of_shorter_matches() -> None:
    drafter = LookupDrafter()
    text = [5, 6, 7, 1, 9, 7, 2, 8, 6, 7]  # "6 7" was followed by 1, "7" most recently by 2
    state = drafter.start(context([text]))
    assert nodes(drafter.propose(state, torch.tensor([7]), Plan(4, 2)), 0) == ([1, 9, 2, 8], [0, 1, 0, 3])
    assert nodes(drafter.propose(state, torch.tensor([7]), Plan(2, 2)), 0) == ([1, 9], [0, 1])


def test_padding_is_never_matched() -> None:
    drafter = LookupDrafter()
    state = drafter.start(context([[1, 2, 3, 4, 5, 0], [7, 0]]))  # the second row's padding is 0 as well
    draft = drafter.propose(state, torch.tensor([0, 0]), Plan(3, 3))
    assert draft.size.tolist() == [1, 1]


def test_dropped_rows_leave_the_others_unchanged() -> None:
    drafter = LookupDrafter()
    state = drafter.start(context([[1, 2, 1], [3, 4], [5, 6, 7, 5]]))
    drafter.select(state, torch.tensor([2, 0]))
    draft = drafter.propose(state, torch.tensor([5, 1]), Plan(2, 2))
    assert nodes(draft, 0)[0] == [6, 7]
    assert nodes(draft, 1)[0] == [2, 1]
    roots = advance(drafter, state, [[6], [9, 2]])
    draft = drafter.propose(state, roots, Plan(3, 3))
    assert nodes(draft, 0)[0] == [7, 5, 6]
    assert nodes(draft, 1)[0] == [1, 9, 2]


def test_a_hash_collision_is_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmdec.drafters.lookup.HASH_MODULUS", 1)  # every n-gram has the hash 0
    drafter = LookupDrafter()
    draft = drafter.propose(drafter.start(context([[1, 2, 3]])), torch.tensor([3]), Plan(3, 3))
    assert draft.size.tolist() == [1]


@pytest.mark.parametrize(("longest", "shortest"), [(3, 0), (1, 2), (0, 1)])
def test_refuses_impossible_lengths(longest: int, shortest: int) -> None:
    with pytest.raises(InputError, match="must be at least"):
        LookupDrafter(longest, shortest)


@settings(deadline=None, max_examples=200)
@given(TEXT, st.lists(st.tuples(st.integers(0, 8), TEXT), max_size=5), st.integers(1, 4))
def test_a_text_with_removed_tokens_is_as_if_they_had_never_been(
    text: list[int], changes: list[tuple[int, list[int]]], longest: int
) -> None:
    drafter, left = LookupDrafter(longest), list(text)
    state = drafter.start(context([text]))
    for removed, added in changes:
        removed = min(removed, len(left))
        left = [*left[: len(left) - removed], *added]
        drafter.rewrite(state, [removed], [added])
        (fresh,) = drafter.start(context([left]))
        assert state[0].text == left
        assert state[0].matches(1) == fresh.matches(1)
        state[0].remove(2 if len(left) > 2 else 0)
        for token in left[-2:] if len(left) > 2 else ():
            state[0].add(token)
        assert state[0].matches(1) == fresh.matches(1)
    assert drafter.propose(state, torch.tensor(left[-1:]), Plan(5, 5)).tokens[0, 1:].tolist() == naive(
        left, longest, 1, 5
    )
