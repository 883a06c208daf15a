"""Tests the measurement of drafts drawn through the target's processors."""

from __future__ import annotations

from typing import Any

import torch

from mmdec.drafters.small_model.drafter import SmallModel
from mmdec.targets.text import TextTarget
from recipes.measure.drawn_drafts import AtTemperature, count, rounded
from tests.support.tiny_text import language_model

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 2, "max_new_tokens": 24}


def test_drafts_through_top_k_are_accepted_more_often_than_at_temperature_alone() -> None:
    model: Any = language_model(num_hidden_layers=2)
    small = SmallModel(TextTarget(rounded(model, 6)))
    prompts = [torch.randint(5, 40, (1, 6), generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
    options = {**SAMPLED, "num_speculative_tokens": 3}
    rates: list[float] = []
    for drafter in (AtTemperature(small), small):
        tokens, rounds, drafted, accepted = count(model, prompts, drafter, 0, options)
        assert tokens >= rounds > 0
        rates.append(accepted / drafted)
    assert rates[1] > rates[0] + 0.1
