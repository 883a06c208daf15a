"""Tests the measurements of drafts drawn through the target's processors, and of a small model's shorter prompt."""

from __future__ import annotations

from typing import Any

import torch

import mmdec
from mmdec.drafters.small_model.drafter import SmallModelDrafter
from mmdec.targets.text import TextTarget
from recipes.measure.drawn_drafts import AtTemperature, count, rounded
from recipes.measure.short_prompt import Passes
from tests.support.tiny_text import language_model

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 2, "max_new_tokens": 24}


def test_drafts_through_top_k_are_accepted_more_often_than_at_temperature_alone() -> None:
    model: Any = language_model(num_hidden_layers=2)
    small = SmallModelDrafter(TextTarget(rounded(model, 6)))
    prompts = [torch.randint(5, 40, (1, 6), generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    options = {**SAMPLED, "num_speculative_tokens": 3}
    rates: list[float] = []
    for drafter in (AtTemperature(small), small):
        tokens, rounds, drafted, accepted = count(model, prompts, drafter, 0, options)
        assert tokens >= rounds > 0
        rates.append(accepted / drafted)
    assert rates[1] > rates[0] + 0.1


def test_passes_of_the_small_model_are_counted_and_the_longest_is_that_over_its_prompt() -> None:
    model: Any = language_model(num_hidden_layers=2)
    small = rounded(model, 6)
    passes, longest = Passes(small), list[int]()
    prompt = torch.randint(5, 40, (1, 60), generator=torch.Generator().manual_seed(0))
    for read in (None, 16):
        passes.count = passes.longest = 0
        options = {"do_sample": False, "max_new_tokens": 8, "num_speculative_tokens": 2}
        made = mmdec.generate(model, prompt, mmdec.small_model(small, prompt=read), **options)
        assert passes.count >= len(made.rounds) > 1
        longest.append(passes.longest)
    assert longest[0] >= 60 > 20 > longest[1]
