"""The part of a long prompt that a small model reads."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mmdec
from mmdec.core.budget import FixedBudget
from mmdec.drafters.small_model.drafter import SmallModelDrafter
from mmdec.drafters.small_model.short_prompt import MAX_FIRST_TOKENS, most_alike
from mmdec.errors import InputError
from tests.support.blended_toy import Toy, run
from tests.support.draft_networks import texts


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=400), st.integers(16, 300))
def test_the_shortened_prompt_is_in_order_fills_the_room_and_keeps_both_ends(ids: list[int], size: int) -> None:
    part = most_alike(ids, size)
    assert len(part) == min(len(ids), size)
    rest = iter(ids)
    assert all(any(token == other for other in rest) for token in part)
    first, last = min(MAX_FIRST_TOKENS, size // 4), size // 3
    assert part[:first] == ids[:first]
    assert part[-last:] == ids[-last:]


@pytest.mark.parametrize("size", [48, 64, 512])
def test_the_chunks_like_the_end_are_read(size: int) -> None:
    source = random.Random(0)
    ids = [source.randrange(1000) for _ in range(4000)]
    question = [2001, 2002, 2003, 2004]
    for place in (500, 1777, 3000):
        text = [*ids[:place], *question, 3000, 3001, *ids[place:], *question]
        part = most_alike(text, size)
        assert len(part) == size
        assert 3000 in part
        assert 3000 not in [*text[:MAX_FIRST_TOKENS], *text[-224:]]


def test_the_small_model_drafts_from_the_shortened_prompt() -> None:
    seen: list[list[int]] = []
    prompts = [[random.Random(row).randrange(7) for _ in range(60 - 25 * row)] for row in range(3)]

    def last_three(ids: list[int]) -> list[int]:
        seen.append(ids)
        return ids[-3:]

    for prompt, expected in ((16, 16), (last_three, 3)):
        small = Toy(7)
        target = Toy(7, seed=1, blend=small, share=0.4)
        drafter = SmallModelDrafter(small, prompt=prompt, inner="lookup", positions=50)
        rounds = run(target, drafter, FixedBudget(3), prompts, 12, eos=99)
        assert texts(rounds, 3) == texts(run(target, None, FixedBudget(0), prompts, 12, eos=99), 3)
        assert sum(sum(round_.drafted) for round_ in rounds)  # though the prompt is longer than its positions
        assert small.session is not None
        most = [min(len(ids), expected) for ids in prompts]
        new = texts(rounds, 3)
        for row, text in zip(rounds[-1].rows, small.session.texts, strict=False):
            part = prompts[row][-3:] if expected == 3 else most_alike(prompts[row], 16)
            assert len(part) <= most[row]
            assert text == (part + new[row])[: len(text)]
            assert len(text) > len(part)
    assert seen == prompts


@pytest.mark.parametrize("prompt", [0, -5, 15, 2.5, True, "long", [1, 2], float("nan"), 2**40])
def test_wrong_prompts_are_refused(prompt: Any) -> None:
    for make in (lambda: SmallModelDrafter(Toy(), prompt=prompt), lambda: mmdec.small_model("anywhere", prompt=prompt)):
        with pytest.raises(InputError, match="`prompt` must be a whole number from 16"):
            make()


@pytest.mark.parametrize("result", [[], [99], [-1], ["a"], None, 7, torch.zeros(0)])
def test_a_function_that_returns_no_tokens_ends_the_drafting(result: Any) -> None:
    drafter = SmallModelDrafter(Toy(7), prompt=lambda ids: result)
    with pytest.warns(RuntimeWarning, match="`prompt` must return token ids below 7, at least one, but returned"):
        rounds = run(Toy(7, seed=1), drafter, FixedBudget(3), [[1, 2]], 5, eos=99)
    assert texts(rounds, 1) == texts(run(Toy(7, seed=1), None, FixedBudget(0), [[1, 2]], 5, eos=99), 1)
