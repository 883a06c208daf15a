"""Tests the registration of targets from outside the package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import mmdec
from mmdec.errors import InputError
from mmdec.targets import registry
from mmdec.targets.decoder import DecoderTarget
from mmdec.targets.registry import make_target
from mmdec.targets.text import TextTarget
from tests.support.tiny_text import language_model


@pytest.fixture(autouse=True)
def no_registered_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", [])


class LlamaTarget(DecoderTarget):
    """Borrows the methods of the target of language models."""

    _prepare_prompt: Any = TextTarget._prepare_prompt
    _forward: Any = TextTarget._forward

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        return model.config.model_type == "llama"


class LaterTarget(LlamaTarget):
    pass


def test_a_registered_target_scores_the_models_that_it_supports() -> None:
    llama, other = language_model("llama", eos_token_id=None), language_model("gpt2")
    prompt = torch.tensor([[5, 6, 7, 5, 6]])
    expected = mmdec.generate(llama, prompt, drafter=None, max_new_tokens=8).sequences
    mmdec.register_target(LlamaTarget)
    assert type(make_target(llama)) is LlamaTarget
    assert type(make_target(other)) is TextTarget
    assert torch.equal(mmdec.generate(llama, prompt, drafter="lookup", max_new_tokens=8).sequences, expected)
    mmdec.register_target(LaterTarget)
    assert type(make_target(llama)) is LaterTarget


def test_other_classes_are_refused() -> None:
    class Unfinished(DecoderTarget):
        pass

    wrong: list[tuple[Any, str]] = [
        (Unfinished, r"`target` must define .*, but Unfinished lacks _forward, _prepare_prompt, supports"),
        (str, "`target` must be a class derived from `HfTarget`, but is"),
        (None, "`target` must be a class derived from `HfTarget`, but is None"),
    ]
    for target, message in wrong:
        with pytest.raises(InputError, match=message):
            mmdec.register_target(target)
