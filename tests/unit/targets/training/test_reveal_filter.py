"""The filter of Learn2PD learns which predictions of a model are final."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmdec.core.canvas import LearnedFilter, TopK, reveal_block
from mmdec.errors import InputError
from mmdec.targets.masked_diffusion import CanvasLayout, open_session
from mmdec.targets.training.reveal_filter import fit_filter
from tests.support.tiny_text import VOCABULARY, language_model

MASK = VOCABULARY - 1
LAYOUT = CanvasLayout("block", 4, MASK)


def passes_and_text(model: Any, prompt: torch.Tensor, policy: Any) -> tuple[int, list[int]]:
    session = open_session(model, LAYOUT, prompt, 1)
    return len(list(reveal_block(session, MASK, policy))), session.text[len(prompt) :].tolist()


def test_a_filter_keeps_most_tokens_in_fewer_passes() -> None:
    model = language_model("llama", 3, num_hidden_layers=1, initializer_range=0.1)
    draws = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, MASK, (5,), generator=draws) for _ in range(20)]
    policy = LearnedFilter(fit_filter(model, LAYOUT, prompts), 0.9)
    plain, filtered = ([passes_and_text(model, prompt, each) for prompt in prompts] for each in (TopK(), policy))
    assert sum(passes for passes, _ in filtered) < sum(passes for passes, _ in plain) == 80
    same = sum(
        first == second
        for (_, a), (_, b) in zip(plain, filtered, strict=True)
        for first, second in zip(a, b, strict=True)
    )
    assert same >= 60


def test_a_seed_gives_the_same_filter() -> None:
    model, prompts = language_model("llama"), [torch.arange(3, 8)]
    state = torch.random.get_rng_state()
    one, other = (fit_filter(model, LAYOUT, prompts).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_no_prompts_are_refused() -> None:
    with pytest.raises(InputError, match="`prompts` must hold at least one prompt"):
        fit_filter(language_model("llama"), LAYOUT, [])
