"""What drafters without weights share."""

from __future__ import annotations

import pytest
import torch

from mmdec.drafters.without_weights import HitRate, prompts_with_sources, worthwhile_prefix
from mmdec.types import Context, Plan


def test_newer_guesses_weigh_more_in_a_rate() -> None:
    improving, worsening = HitRate.assumed(0.5), HitRate.assumed(0.5)
    for is_hit in [False] * 5 + [True] * 5:
        improving.count(is_hit)
        worsening.count(not is_hit)
    assert improving.value > 0.5 > worsening.value
    assert improving.value + worsening.value == pytest.approx(1.0)


def test_a_chain_is_cut_where_it_becomes_unlikely() -> None:
    chain, probabilities = [5, 6, 7], [0.9, 0.5, 0.2]
    assert worthwhile_prefix(chain, probabilities, Plan(3, 3)) == chain
    assert worthwhile_prefix(chain, probabilities, Plan(3, 3, threshold=0.4)) == [5, 6]
    assert worthwhile_prefix(chain, probabilities, Plan(3, 3, threshold=0.4, min_expected_accepted=1.5)) == []


def test_an_encoder_input_stands_between_two_copies_of_the_prompt() -> None:
    tokens, mask = torch.tensor([[0, 3], [4, 5]]), torch.tensor([[False, True], [True, True]])
    context = Context(tokens, mask, mask.cumsum(1)[None], mask.sum(1), source=[[1, 2], [8]])
    assert prompts_with_sources(context, mask) == [[3, 1, 2, 3], [4, 5, 8, 4, 5]]
