"""Tests drafts from the previous texts of a live window: they begin at the right place in it, and change no text."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmdec
from mmdec.core.tree import chain_drafts
from mmdec.drafters.previous_text import MAX_OLDER_TOKENS, PreviousTextDrafter
from mmdec.drafters.text_cursor import MAX_GUESSED_TOKENS
from mmdec.types import Context, Plan, Scores, Verdict
from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper
from tests.conftest import RATE, buzz
from tests.support.tiny_whisper import write

OLD = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]
PLAN = Plan(nodes=8, depth=8)


class Run:
    """A run of one row, fed by hand."""

    def __init__(self, tokens: list[int], *others: Any) -> None:
        self.drafter, one = PreviousTextDrafter(tokens, *others), torch.ones(1, 1, dtype=torch.long)
        self.state = self.drafter.start(Context(one, one.bool(), one[None], one[0]))

    def told(self, *tokens: int) -> Run:
        """A round that gave these tokens."""
        row = torch.tensor([tokens])
        verdict = Verdict(torch.zeros(1, 1).long(), row[:, -1], torch.zeros(1).bool(), row, torch.tensor([len(tokens)]))
        self.drafter.update(self.state, chain_drafts(row[:, -1], [[]]), Scores(torch.zeros(1, 1, 4)), verdict)
        return self

    def draft(self, plan: Plan = PLAN, chain: bool = True) -> list[int]:
        draft = self.drafter.propose(self.state, torch.zeros(1, dtype=torch.long), plan)
        size = int(draft.size[0])
        assert not chain or draft.parents[0, :size].tolist() == list(range(-1, size - 1))
        return draft.tokens[0, 1:size].tolist()


def test_the_rest_of_the_previous_text_is_drafted() -> None:
    run = Run(OLD)
    assert run.draft() == OLD[:8]
    assert run.told(5).draft() == OLD[1:9]
    assert run.told(6, 7, 8).draft() == OLD[4:]
    assert run.draft(Plan(nodes=3, depth=9)) == OLD[4:7]
    assert run.draft(Plan(nodes=9, depth=2)) == OLD[4:6]
    assert run.told(*OLD[4:]).draft() == []


def test_the_position_is_recovered_after_a_change() -> None:
    assert Run(OLD).told(5, 6, 40).draft() == OLD[3 : 3 + MAX_GUESSED_TOKENS]  # one token for another
    assert Run(OLD).told(5, 6, 40, 7).draft() == OLD[3:11]  # one more
    assert Run(OLD).told(5, 6, 9).draft() == OLD[5:]  # two fewer
    assert Run(OLD).told(5, 6, 40, 41, 9).draft() == OLD[5:]


def test_the_longest_match_decides_the_position() -> None:
    twice = [1, 2, 3, 4, 5, 9, 2, 3, 7, 8]
    assert Run(twice).told(6, 2, 3).draft()[0] == 4  # both match two tokens: the nearer
    assert Run(twice).told(6, 9, 2, 3).draft() == [7, 8]


def test_older_texts_and_the_expected_end_are_branches() -> None:
    run = Run(OLD, [[5, 6, 40, 41, 42, 43, 44]], [90, 91])
    run.told(5, 6)
    draft = run.drafter.propose(run.state, torch.zeros(1, dtype=torch.long), Plan(nodes=15, depth=15))
    size = int(draft.size[0])
    assert draft.tokens[0, 1:size].tolist() == [*OLD[2:], *[40, 41, 42, 43][:MAX_OLDER_TOKENS], 90, 91]
    assert draft.parents[0, 10:size].tolist() == [0, 10, 11, 12, 0, 14]
    assert run.told(40, 41).draft(Plan(nodes=20, depth=20), chain=False)[MAX_GUESSED_TOKENS:] == [42, 43, 44, 90, 91]
    small = run.drafter.propose(run.state, torch.zeros(1, dtype=torch.long), Plan(nodes=2, depth=1))
    assert int(small.size[0]) == 3


def test_a_branch_that_begins_as_another_shares_its_nodes() -> None:
    run = Run(OLD, [[5, 6, 9]], OLD[:1])
    assert run.draft(Plan(nodes=12, depth=3), chain=False) == [5, 6, 7, 9]


def test_finished_rows_do_not_move_the_others() -> None:
    drafter = PreviousTextDrafter(OLD)
    ones = torch.ones(2, 1, dtype=torch.long)
    state = drafter.start(Context(ones, ones.bool(), ones[None], ones[:, 0]))
    tokens = torch.tensor([[5, 6, -1], [5, 6, 7]])
    verdict = Verdict(
        torch.zeros(2, 1).long(), torch.tensor([6, 7]), torch.zeros(2).bool(), tokens, torch.tensor([2, 3])
    )
    drafter.update(state, chain_drafts(tokens[:, 0], [[], []]), Scores(torch.zeros(2, 1, 4)), verdict)
    drafter.select(state, torch.tensor([1]))
    draft = drafter.propose(state, torch.tensor([7]), PLAN)
    assert draft.tokens[0, 1 : int(draft.size[0])].tolist() == OLD[3:]


def test_an_empty_text_drafts_nothing() -> None:
    assert Run([]).draft() == []
    assert Run([]).told(3, 4).draft() == []


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> LoadedWhisper:
    return load_whisper(write(tmp_path_factory.mktemp("models") / "tiny", with_heads=False), "cpu")


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.data(), st.sampled_from([{}, {"temperature": 0.8, "do_sample": True, "seed": 1}, {"timestamps": "segment"}]))
def test_previous_texts_do_not_change_the_text(
    whisper: LoadedWhisper, data: st.DataObject, options: dict[str, Any]
) -> None:
    """Right, changed, cut, made up: alone and in a batch."""
    sounds: Any = [buzz(0.7, 0), buzz(0.9, 1)]
    wanted = [transcript.tokens for transcript in transcribe(whisper, sounds, None, **options)]
    tokens = list(data.draw(st.sampled_from(wanted)))
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(tokens)))
        tokens[at : at + data.draw(st.integers(0, 2))] = data.draw(st.lists(st.integers(0, 300), max_size=2))
    drafter = PreviousTextDrafter(tokens, wanted, wanted[0][-1:])
    found = transcribe(whisper, sounds, drafter, num_speculative_tokens=31, **options)
    assert [transcript.tokens for transcript in found] == wanted


def transcribe(whisper: LoadedWhisper, sounds: Any, drafter: Any, **options: Any) -> list[mmdec.Transcript]:
    return mmdec.transcribe(sounds, sample_rate=RATE, model=whisper, drafter=drafter, language="en", **options)


def test_an_unchanged_text_costs_a_pass_or_two(whisper: LoadedWhisper) -> None:
    (cold,) = transcribe(whisper, [buzz(0.7)], None)
    (again,) = transcribe(whisper, [buzz(0.7)], PreviousTextDrafter(cold.tokens), num_speculative_tokens=31)
    assert again.tokens == cold.tokens
    assert again.rounds <= 2 < cold.rounds
