"""Drafters draw from what the target's own logits processors make of their logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from mmdec.core.sampling import Sequences, Stop
from mmdec.generation.hf_bridge import draft_warp
from tests.support.tiny_text import VOCABULARY, language_model

OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7, "top_k": 0},
    "top-k": {"temperature": 0.7, "top_k": 5},
    "top-p": {"top_p": 0.8, "top_k": 0},
    "min-p": {"min_p": 0.1, "top_k": 0},
    "typical": {"typical_p": 0.7, "top_k": 0},
    "epsilon": {"epsilon_cutoff": 0.02, "top_k": 0},
    "eta": {"eta_cutoff": 0.02, "top_k": 0},
    "penalty": {"repetition_penalty": 1.7, "top_k": 0},
    "suppressed": {"suppress_tokens": [3, 5, 7], "top_k": 0},
    "all": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.1},
}


def processors(**options: Any) -> LogitsProcessorList:
    """Return the processors that `generate` would use."""
    model: Any = language_model()
    config, _ = model._prepare_generation_config(GenerationConfig(do_sample=True, **options))
    return model._get_logits_processor(config, input_ids_seq_length=4, encoder_input_ids=None, device="cpu")


def batch() -> Sequences:
    """Three rows, of which the second has ended; the others have different lengths."""
    text = Sequences(torch.randint(VOCABULARY, (3, 4)), Stop(99))
    for row, tokens in enumerate(([8, 9, 8], [1], [2])):
        for token in tokens:
            text.append(row, token)
    text.live = [0, 2]
    return text


@pytest.mark.parametrize("name", OPTIONS)
def test_a_nodes_distribution_is_the_targets_after_the_nodes_text(name: str) -> None:
    torch.manual_seed(1)
    text, logits = batch(), 3 * torch.randn(2, 2, VOCABULARY)
    own = processors(**OPTIONS[name])
    paths = [[[4, 6], [4, 8]], [[1, 1], [10, 2]]]
    probs = draft_warp(own)(text, logits, paths)
    for index, row in enumerate(text.live):
        for node in range(2):
            ids = torch.cat([text.ids(row), torch.tensor([paths[index][node]])], 1)
            expected = own(ids, logits[index, node : node + 1].clone()).softmax(-1)[0]  # type: ignore[arg-type]
            torch.testing.assert_close(probs[index, node], expected)
            assert name in ("temperature", "penalty") or bool((expected == 0).any())


def test_a_row_may_have_fewer_nodes_than_its_neighbour() -> None:
    text, logits = batch(), torch.randn(2, 2, VOCABULARY)
    warp = draft_warp(processors(**OPTIONS["all"]))
    whole = warp(text, logits, [[[4], [5]], [[6], [7]]])
    assert torch.equal(warp(text, logits, [[[4]], [[6], [7]]])[[0, 1, 1], [0, 0, 1]], whole[[0, 1, 1], [0, 0, 1]])
    assert torch.equal(warp(text, logits, [[[]], [[]]]), warp(text, logits))


def test_a_drafters_missing_tokens_are_never_drawn() -> None:
    """Also where top-k asks for more tokens than it has."""
    logits = torch.randn(2, 1, VOCABULARY)
    logits[..., 6:] = -torch.inf
    for name in ("all", "penalty", "typical", "epsilon", "eta"):
        probs = draft_warp(processors(**OPTIONS[name]))(batch(), logits)
        assert not probs[..., 6:].any()
        torch.testing.assert_close(probs.sum(-1), torch.ones(2, 1))


def test_processors_that_are_not_known_to_hold_no_state_are_left_out() -> None:
    def counts(ids: Tensor, scores: Tensor) -> Tensor:
        raise AssertionError("called for a draft")

    logits = torch.randn(2, 1, VOCABULARY)
    warp = draft_warp([counts, *processors(no_repeat_ngram_size=2, temperature=0.5, top_k=0)])
    torch.testing.assert_close(warp(batch(), logits), (logits / 0.5).softmax(-1))
