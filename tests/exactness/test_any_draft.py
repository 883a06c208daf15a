"""Tests greedy decoding with any draft, and with drafters that fail: the tokens equal those of plain decoding."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmdec.core.sampling import Criterion, Processor, Stop
from mmdec.core.verify import MatchRule
from mmdec.types import Context, Draft, Plan, Scores, Verdict
from tests.support.toy_target import (
    Memory,
    RandomBudget,
    Scripted,
    Toy,
    padded,
    plain,
    random_tree_drafts,
    rejected_drafts,
    run,
    target_drafts,
)

GREEDY = MatchRule()
RUNS = settings(derandomize=True, deadline=None, max_examples=250, database=None)


class Recorder:
    """Keeps what it was called with, and changes the logits by what it has seen: called once too often, it shows."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[float]]] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        assert ids.shape[0] == scores.shape[0] == 1
        assert scores.dtype == torch.float32
        self.calls.append((ids[0].tolist(), scores[0].tolist()))
        position = sum(len(ids) for ids, _ in self.calls)
        return scores.roll(position % scores.shape[1], 1)


def penalty(ids: Tensor, scores: Tensor) -> Tensor:
    """Repetition penalty, in place as some processors are; padding counts, as in the plain loop."""
    seen = scores.gather(1, ids)
    return scores.scatter_(1, ids, torch.where(seen < 0, seen * 1.5, seen / 1.5))


def ends_with_a_pair(ids: Tensor, scores: Tensor | None) -> Tensor:
    """Stops where the last two tokens are the same."""
    return ids[:, -1] == ids[:, -2]


def references(
    target: Toy,
    prompts: Sequence[Sequence[int]],
    stop: Stop,
    processors: Callable[[], list[Processor]],
    criteria: Sequence[Criterion] = (),
) -> tuple[list[list[int]], list[list[Processor]]]:
    """Decode each row alone and plainly, with processors of its own."""
    ids = padded(prompts)["input_ids"]
    texts, used = [], []
    for row, prompt in enumerate(prompts):
        used.append(processors())
        padding = ids.shape[1] - len(prompt)
        best = lambda scores, index: int(scores.argmax())  # noqa: E731
        texts.append(plain(target, ids[row : row + 1], padding, stop, best, used[-1], criteria))
    return texts, used


@st.composite
def cases(draw: st.DrawFn) -> tuple[Toy, list[list[int]], Stop, int]:
    vocab = draw(st.sampled_from([1, 2, 3, 5, 11]))
    token = st.integers(0, vocab - 1)
    prompts = draw(st.lists(st.lists(token, min_size=1, max_size=5), min_size=1, max_size=8))
    limit = max(map(len, prompts)) + draw(st.integers(1, 14))
    eos = frozenset(draw(st.sets(token, max_size=2)))
    target = Toy(vocab, draw(st.integers(0, 5)), ties=draw(st.booleans()))
    return target, prompts, Stop(limit, eos), draw(st.integers(0, 10**6))


@RUNS
@given(
    case=cases(),
    kind=st.sampled_from(["target", "rejected", "random tree", "random tree", "random tree"]),
    stopped=st.booleans(),
)
def test_any_tree_leaves_the_text_unchanged(
    case: tuple[Toy, list[list[int]], Stop, int], kind: str, stopped: bool
) -> None:
    target, prompts, stop, seed = case
    criteria = [ends_with_a_pair] if stopped else []
    if stopped:
        prompts = [[0, *prompt] for prompt in prompts]
        stop = replace(stop, max_length=stop.max_length + 1)
    tree = {
        "target": target_drafts(target),
        "rejected": rejected_drafts(target),
        "random tree": random_tree_drafts(target, sorted(stop.eos)),
    }[kind]
    expected, _ = references(target, prompts, stop, list, criteria)
    asked = replace(stop, criteria=criteria)
    text, rounds = run(target, prompts, asked, GREEDY, Scripted(tree, seed), RandomBudget(Random(seed)))
    assert text.tokens == expected
    written: list[list[int]] = [[] for _ in prompts]
    for round_ in rounds:
        for row, tokens, done in zip(round_.rows, round_.tokens, round_.done, strict=True):
            assert tokens
            written[row] += tokens
            assert done == (written[row] == expected[row])
    assert written == expected


@RUNS
@given(case=cases(), kind=st.sampled_from(["target", "random tree"]))
def test_processors_see_what_plain_decoding_shows_them(case: tuple[Toy, list[list[int]], Stop, int], kind: str) -> None:
    """They are called for exactly the visited nodes, in autoregressive order, with exactly the row of the plain
    loop."""
    target, prompts, stop, seed = case
    recorder = Recorder()
    expected, used = references(target, prompts, stop, lambda: [penalty, Recorder()])
    tree = target_drafts(target) if kind == "target" else random_tree_drafts(target, sorted(stop.eos))
    text, _ = run(
        target, prompts, stop, GREEDY, Scripted(tree, seed), RandomBudget(Random(seed)), processors=[penalty, recorder]
    )
    assert text.tokens == expected
    assert text.processors is not None
    assert text.processors[0][1] is recorder  # at batch 1 the caller's own
    for processors, expected_processors in zip(text.processors, used, strict=True):
        recorder, expected_recorder = processors[1], expected_processors[1]
        assert isinstance(recorder, Recorder)
        assert isinstance(expected_recorder, Recorder)
        assert recorder.calls == expected_recorder.calls


def test_criteria_are_asked_once_for_each_token() -> None:
    """One that keeps a state counts the same as in plain decoding."""

    class Patience:
        def __init__(self) -> None:
            self.asked: list[list[int]] = []

        def __call__(self, ids: Tensor, scores: Tensor | None) -> Tensor:
            self.asked.append(ids[0].tolist())
            return torch.tensor([len(self.asked) >= 9])

    target, patience, other = Toy(5), Patience(), Patience()
    (expected,), _ = references(target, [[1, 2]], Stop(40), list, [other])
    text, rounds = run(target, [[1, 2]], Stop(40, criteria=[patience]), GREEDY, Scripted(target_drafts(target)))
    assert text.tokens == [expected]
    assert len(expected) == 9
    assert len(rounds) == 3  # the prompt's, five tokens, and three of five
    assert patience.asked == other.asked


@pytest.mark.parametrize("room", range(1, 12))
def test_drafts_reach_no_further_than_the_text_may(room: int) -> None:
    """A draft's deepest node has a place before the last: a model may have no position for more."""
    target = Toy(5)
    deepest = []

    class Watched(Toy):
        def score(self, session: Any, draft: Draft) -> Scores:
            deepest.append(len(session.rows[0]) + draft.tokens.shape[1])
            return super().score(session, draft)

    text, _ = run(Watched(5), [[1, 2]], Stop(2 + room), GREEDY, Scripted(target_drafts(target)))
    assert len(text.tokens[0]) == room
    assert all(columns <= 2 + room - 1 for columns in deepest)


def breaks(name: str) -> Callable[[Draft], Any]:
    """Make the named change that a faulty drafter would make to a sound draft (B, N)."""

    def change(part: str, value: Callable[[Tensor], Tensor]) -> Callable[[Draft], Draft]:
        return lambda draft: replace(draft, **{part: value(getattr(draft, part))})

    def poisoned(bad: float) -> Callable[[Draft], Draft]:
        return lambda draft: replace(draft, probs=torch.full((*draft.tokens.shape, 5), bad))

    return {
        "token too large": change("tokens", lambda t: torch.cat([t[:, :1], t[:, 1:] + 5], 1)),
        "token negative": change("tokens", lambda t: torch.cat([t[:, :1], t[:, 1:] - 5], 1)),
        "tokens of floats": change("tokens", lambda t: t.float()),
        "tokens NaN": change("tokens", lambda t: t.float() * torch.nan),
        "another root": change("tokens", lambda t: (t + 1) % 5),
        "parent after child": change("parents", lambda p: p.index_fill(1, torch.tensor([1]), 2)),
        "own parent": change("parents", lambda p: p.index_fill(1, torch.tensor([1]), 1)),
        "orphan": change("parents", lambda p: p.index_fill(1, torch.tensor([1]), -1)),
        "root with a parent": change("parents", lambda p: p.index_fill(1, torch.tensor([0]), 0)),
        "padding nowhere": lambda d: replace(
            d, parents=d.parents.index_fill(1, torch.tensor([4]), 99), size=d.size - 1
        ),
        "parents of other shape": change("parents", lambda p: p[:, :-1]),
        "size zero": change("size", torch.zeros_like),
        "size too large": change("size", lambda s: s + 1),
        "sizes of floats": change("size", lambda s: s.float()),
        "one size": change("size", lambda s: s[0]),
        "a row too many": lambda d: Draft(*(torch.cat([x, x[:1]]) for x in (d.tokens, d.parents, d.size))),
        "no root": lambda d: Draft(d.tokens[:, :0], d.parents[:, :0], d.size * 0),
        "flat": lambda d: replace(d, tokens=d.tokens.flatten()),
        "probabilities NaN": poisoned(torch.nan),
        "probabilities infinite": poisoned(torch.inf),
        "probabilities negative": poisoned(-0.2),
        "probabilities of other width": lambda d: replace(d, probs=torch.full((*d.tokens.shape, 4), 0.25)),
        "pending token changed": lambda d: replace(d, tokens=d.tokens.add_(1).remainder_(5)),
        "nothing": lambda d: None,
    }[name]


class Faulty(Scripted):
    """Drafts correctly until its fault, which comes in its second round."""

    def __init__(self, target: Toy, fault: str, again: bool = False) -> None:
        super().__init__(target_drafts(target))
        self.fault, self.asked = fault, 0

    def start(self, context: Context) -> Memory:
        if self.fault == "start raises":
            raise RuntimeError("no start")
        return super().start(context)

    def propose(self, state: Memory, roots: Tensor, plan: Plan) -> Draft:
        self.asked += 1
        draft = super().propose(state, roots, plan)
        if self.fault == "pending token changed" and self.asked == 2:
            roots.add_(1).remainder_(5)
        if self.asked < 2 or self.fault.endswith(("start raises", "update raises", "select raises")):
            return draft
        if self.fault == "propose raises":
            raise MemoryError("no draft")
        return breaks(self.fault)(draft)

    def update(self, state: Memory, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        super().update(state, draft, scores, verdict)
        if self.fault == "update raises" and self.asked == 2:
            raise IndexError("no update")

    def select(self, state: Memory, live: Tensor) -> None:
        super().select(state, live)
        if self.fault == "select raises":
            raise ZeroDivisionError("no selection")


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "fault",
    [
        *("start raises", "propose raises", "update raises", "select raises", "token too large", "token negative"),
        *("tokens of floats", "tokens NaN", "another root", "parent after child", "own parent", "orphan"),
        *("root with a parent", "padding nowhere", "parents of other shape", "size zero", "size too large"),
        *("sizes of floats", "one size", "a row too many", "no root", "flat", "probabilities NaN"),
        *("probabilities infinite", "probabilities negative", "probabilities of other width"),
        *("pending token changed", "nothing"),
    ],
)
def test_faulty_drafters_are_left_out_with_one_warning(fault: str, batch: int) -> None:
    target = Toy(5, seed=3)
    prompts = [[1, 2, 3], [4], [2, 2]][:batch]
    stop = Stop(30, frozenset({0}) if fault == "select raises" else frozenset())
    expected, _ = references(target, prompts, stop, list)
    drafter = Faulty(target, fault)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        text, rounds = run(target, prompts, stop, GREEDY, drafter)
    assert text.tokens == expected
    assert [warning.category for warning in caught] == [RuntimeWarning] * (batch > 1 or fault != "select raises")
    if caught:
        assert str(caught[0].message).startswith("drafter 'scripted' failed")
    if "raises" not in fault or fault == "propose raises":
        assert drafter.asked == 2  # and never again
        assert sum(map(sum, (round_.accepted for round_ in rounds))) == 4 * batch
