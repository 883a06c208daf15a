"""Tests transformers' logits processors that the core applies to all nodes of a draft at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, SuppressTokensAtBeginLogitsProcessor, SuppressTokensLogitsProcessor

from mmdec.core.sampling import Processor, Sequences, Stop, Suppression
from mmdec.generation.hf_bridge import OutputRecorder, keeps_state
from mmdec.targets.registry import make_target
from tests.support.tiny_text import language_model

PROMPT = torch.tensor([[1, 5, 6]])


class Half(SuppressTokensLogitsProcessor):
    """A subclass, which does something else."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores / 2


def prepared_processor(processor: Any) -> tuple[Processor, int]:
    """Return the processor as a run has it, and the model's vocabulary."""
    target = make_target(language_model())
    (only,) = OutputRecorder(target, PROMPT, [processor], GenerationConfig()).processors
    return only, target.vocab_size


@pytest.mark.parametrize(
    "processor",
    [
        SuppressTokensLogitsProcessor([2, 0, 2]),
        SuppressTokensLogitsProcessor([-1, 4, -7]),
        SuppressTokensLogitsProcessor([]),
        SuppressTokensAtBeginLogitsProcessor([3], 3),
        SuppressTokensAtBeginLogitsProcessor([3, -2], 4),
        SuppressTokensAtBeginLogitsProcessor([3], 2),
    ],
)
def test_suppression_is_transformers_own(processor: Any) -> None:
    known, vocabulary = prepared_processor(processor)
    assert isinstance(known, Suppression)
    text = Sequences(PROMPT, Stop(99), [known])
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(0))
    for token in (4, 3, 2):
        ids, stock = text.ids(0), processor(text.ids(0), logits[None].clone())
        assert torch.equal(known(ids, logits[None]), stock)
        if text.only_suppresses(0):
            assert torch.equal(text.suppress(logits[None]), stock)
        text.tokens[0].append(token)
    assert text.only_suppresses(0)


@pytest.mark.parametrize(
    "processor",
    [Half([1]), SuppressTokensLogitsProcessor([1.5]), SuppressTokensLogitsProcessor([1, 10**6])],
)
def test_other_processors_are_called_unchanged(processor: Any) -> None:
    assert prepared_processor(processor)[0] is processor


def test_a_function_of_the_allowed_tokens_may_keep_a_state() -> None:
    def allowed(row: int, ids: Tensor) -> list[int]:
        return [1, 2]

    assert not keeps_state({"prefix_allowed_tokens_fn": None, "logits_processor": None})
    assert keeps_state({"prefix_allowed_tokens_fn": allowed})
    vars(allowed)["mmdec_row_wise"] = True
    assert not keeps_state({"prefix_allowed_tokens_fn": allowed})
