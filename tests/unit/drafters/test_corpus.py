"""Tests the index of a corpus against a naive search, its file, and the trees that are drafted from it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from mmdec.core.tree import chain_drafts
from mmdec.drafters import corpus
from mmdec.drafters.corpus import INDEX_FORMAT, MAX_MATCH, CorpusDrafter, TokenIndex
from mmdec.errors import InputError
from mmdec.types import Context, Plan, Scores, Verdict
from tests.support.trees import is_chain

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=4)


def context(texts: Sequence[Sequence[int]]) -> Context:
    width = max(map(len, texts))
    tokens = torch.tensor([[0] * (width - len(text)) + list(text) for text in texts])
    mask = torch.tensor([[False] * (width - len(text)) + [True] * len(text) for text in texts])
    return Context(tokens, mask, mask.cumsum(1)[None], mask.sum(1))


def advance(drafter: CorpusDrafter, state: Any, tokens: list[int]) -> None:
    """Add the tokens of a round to a state of one row."""
    table = torch.tensor([tokens])
    done = torch.tensor([False])
    verdict = Verdict(torch.zeros(1, 1, dtype=torch.long), table[:, -1], done, table, torch.tensor([len(tokens)]))
    drafter.update(state, chain_drafts(table[:, -1], [[]]), Scores(torch.zeros(1, 1, 4)), verdict)


def paths(draft: Any, row: int = 0) -> list[list[int]]:
    """Return the tokens of the path to each node below the root, in the nodes' order."""
    found: list[list[int]] = [[]]
    for node in range(1, int(draft.size[row])):
        found.append([*found[int(draft.parents[row, node])], int(draft.tokens[row, node])])
    return found[1:]


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 3), min_size=1, max_size=30))
def test_matches_are_those_of_a_naive_search(texts: list[list[int]], text: list[int]) -> None:
    index = TokenIndex.from_texts(texts)
    flat = index.tokens.tolist()
    assert flat == [token for text in texts for token in (*text, -1)]
    assert sorted(index.places.tolist()) == list(range(len(flat)))
    matches = index.matches(text)
    sizes = [n for n in range(1, min(MAX_MATCH, len(text)) + 1) if _places(flat, text[-n:])]
    assert [n for n, _, _ in matches] == sorted({*sizes[-1:], *(n for n in sizes if n <= 4)}, reverse=True)
    for n, first, last in matches:
        assert sorted(index.places[first:last].tolist()) == _places(flat, text[-n:])
        for place, rest in zip(index.places[first:last], index.continuations(first, last, 5), strict=False):
            following = flat[place : flat.index(-1, place)]
            assert last - first > 48 or rest == following[:5]


def _places(flat: list[int], end: list[int]) -> list[int]:
    return [at + len(end) for at in range(len(flat) - len(end)) if flat[at : at + len(end)] == end]


def test_many_hits_are_sampled_over_all_of_them() -> None:
    index = TokenIndex.from_texts([[1, token] for token in [2] * 300 + [3] * 100])
    ((_, first, last),) = index.matches([1])
    rows = index.continuations(first, last, 3)
    assert last - first == 400
    assert len(rows) <= 48
    assert 0.15 < rows.count([3]) / len(rows) < 0.35


def test_likelier_continuations_come_first() -> None:
    drafter = CorpusDrafter(TokenIndex.from_texts([[1, 2, 3, 7], [1, 2, 3, 8], [1, 2, 3, 7], [1, 2, 4, 9]]))
    state = drafter.start(context([[5, 1, 2]]))
    root = torch.tensor([2])
    chain = drafter.propose(state, root, Plan(2, 2))
    assert is_chain(chain)
    assert paths(chain) == [[3], [3, 7]]
    tree = drafter.propose(state, root, Plan(5, 2))
    assert paths(tree) == [[3], [3, 7], [3, 8], [4], [4, 9]]
    assert paths(drafter.propose(state, root, Plan(3, 2))) == [[3], [3, 7], [4]]


def test_the_rows_own_text_is_drafted_from() -> None:
    drafter = CorpusDrafter(TokenIndex.from_texts([[9, 9]]))
    state = drafter.start(context([[1, 2, 3, 4, 1, 2], [7, 8, 9, 9, 9, 9]]))
    draft = drafter.propose(state, torch.tensor([2, 9]), Plan(3, 3))
    assert paths(draft) == [[3], [3, 4], [3, 4, 1]]
    assert all(token == 9 for path in paths(draft, 1) for token in path)  # never the end of a text


def test_rows_can_be_dropped() -> None:
    drafter = CorpusDrafter(TokenIndex.from_texts([[9, 9]]))
    state = drafter.start(context([[1, 2, 3], [7, 8, 9]]))
    drafter.select(state, torch.tensor([1]))
    assert len(state.rows) == 1
    assert state.rows[0].text[0] == 7


def test_a_corpus_that_was_wrong_drafts_less() -> None:
    drafter = CorpusDrafter(TokenIndex.from_texts([[1, 2, 3, 4, 5, 6]] * 3))
    state, root = drafter.start(context([[9, 1, 2]])), torch.tensor([2])
    plan = Plan(4, 4, threshold=0.15)
    assert paths(drafter.propose(state, root, plan)) == [[3], [3, 4], [3, 4, 5], [3, 4, 5, 6]]
    for new in range(20, 40):
        drafter.propose(state, root, plan)
        advance(drafter, state, [new, 1, 2])
    assert paths(drafter.propose(state, root, plan)) == []
    assert paths(drafter.propose(state, root, Plan(4, 4))) != []
    assert paths(drafter.propose(state, root, Plan(4, 4, min_expected_accepted=3.0))) == []


@settings(max_examples=80, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(1, 20), st.integers(1, 6))
def test_drafts_are_trees_within_the_plan(texts: list[list[int]], text: list[int], nodes: int, depth: int) -> None:
    drafter = CorpusDrafter(TokenIndex.from_texts(texts))
    draft = drafter.propose(drafter.start(context([text])), torch.tensor(text[-1:]), Plan(nodes, depth))
    found = paths(draft)
    assert len(found) <= nodes
    assert max(map(len, found), default=0) <= depth
    assert len({tuple(path) for path in found}) == len(found)
    assert nodes > depth or is_chain(draft)


def test_the_file_is_read_in_place(tmp_path: Path) -> None:
    index = TokenIndex.from_texts([[5, 6, 7, 5, 6], [1]], "0123")
    file = index.save(tmp_path / "texts.safetensors")
    loaded = TokenIndex.load(file)
    assert loaded.tokenizer == "0123"
    assert (loaded.tokens.tolist(), loaded.places.tolist()) == (index.tokens.tolist(), index.places.tolist())
    assert loaded.name == index.name != TokenIndex.from_texts([[5, 6, 7, 5, 7], [1]]).name
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(file) in maps.read_text()
    assert not list(tmp_path.glob(".mmdec-*"))


def arrays(**changed: Any) -> dict[str, Any]:
    return {"tokens": np.array([5, 6, -1], np.int32), "places": np.array([0, 1, 2], np.int32), **changed}


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "whole index"),
        (b"not an index", "whole index"),
        (save(arrays()), "another file"),
        (save(arrays(), {"format": "mmdec-corpus-9"}), "another file"),
        (save({"tokens": arrays()["tokens"]}, {"format": INDEX_FORMAT}), "whole index"),
        (save(arrays(places=np.array([0, 1], np.int32)), {"format": INDEX_FORMAT}), "3 tokens and"),
        (save(arrays(places=np.array([0, 1, 3], np.int32)), {"format": INDEX_FORMAT}), "out of range"),
        (save(arrays(places=np.array([0, -1, 2], np.int32)), {"format": INDEX_FORMAT}), "out of range"),
        (save(arrays(tokens=np.array([-7, 1, 2], np.int32)), {"format": INDEX_FORMAT}), "out of range"),
        (save(arrays(tokens=np.zeros((1, 3), np.int32)), {"format": INDEX_FORMAT}), "of shape"),
        (save(arrays(tokens=np.zeros(3, np.float32)), {"format": INDEX_FORMAT}), "float32"),
        (save(arrays(tokens=np.zeros(0, np.int32)), {"format": INDEX_FORMAT}), "of shape"),
    ],
)
def test_a_file_that_is_no_index_is_refused(tmp_path: Path, content: bytes, match: str) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    with pytest.raises(InputError, match=match) as error:
        TokenIndex.load(file)
    assert "mmdec index" in str(error.value)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    file = TokenIndex.from_texts([list(range(50))]).save(tmp_path / "x.safetensors")
    content = file.read_bytes()
    for size in range(0, len(content), 7):
        file.write_bytes(content[:size])
        with pytest.raises(InputError, match="whole index"):
            TokenIndex.load(file)


def test_an_index_in_the_wrong_order_drafts_only_its_own_tokens() -> None:
    tokens = np.array([1, 2, 1, 2, 3, -1], np.int32)
    for seed in range(20):
        places = np.random.default_rng(seed).integers(0, 6, 6).astype(np.int32)
        drafter = CorpusDrafter(TokenIndex(tokens, places))
        draft = drafter.propose(drafter.start(context([[3, 1, 2]])), torch.tensor([2]), Plan(6, 3))
        assert set(draft.tokens[0].tolist()) <= {1, 2, 3, 0}


def test_the_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "MAX_INDEX_TOKENS", 10)
    assert len(TokenIndex.from_texts([[1] * 4, [2] * 4])) == 10
    with pytest.raises(InputError, match="from 1 to 10 tokens, but have 11"):
        TokenIndex.from_texts([[1] * 4, [2] * 5])
    with pytest.raises(InputError, match="but have 0"):
        TokenIndex.from_texts([[], []])


def test_tokens_that_the_target_lacks_are_refused() -> None:
    class Target:
        vocab_size = 6

    drafter: Any = CorpusDrafter(TokenIndex.from_texts([[5]]))
    drafter.check(Target())
    with pytest.raises(InputError, match="below 6, but this corpus has 6"):
        CorpusDrafter(TokenIndex.from_texts([[6]])).check(Target())  # type: ignore[arg-type]
    assert json.dumps(drafter.name)
