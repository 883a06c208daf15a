"""Tests torchao's quantised layers. With quantised weights alone (8 and 4 bits), drafts do not change the model's text;
models with quantised activations, where a tree's nodes change each other's scores, are decoded without drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmdec
from tests.support.every_class import make_network, prompts
from tests.support.random_drafter import RandomDrafter

ao: Any = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # its own
FAMILIES = ("LlamaForCausalLM", "Gemma3ForCausalLM", "Lfm2ForCausalLM")
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def quantised(family: str, kind: str) -> Any:
    """Return a small model with torchao's weights."""
    configs = {
        "int8": ao.Int8WeightOnlyConfig,
        "int4": lambda: ao.IntxWeightOnlyConfig(weight_dtype=vars(torch)["int4"], granularity=ao.PerGroup(16)),
        "activations": ao.Int8DynamicActivationInt8WeightConfig,
    }
    model = make_network(family)
    ao.quantize_(model, configs[kind]())
    return model


@pytest.mark.parametrize("lengths", [(21,), (21, 9, 4)], ids=str)
@pytest.mark.parametrize("kind", ["int8", "int4", "activations"])
@pytest.mark.parametrize("family", FAMILIES)
def test_texts_equal_the_quantised_models_own(family: str, kind: str, lengths: tuple[int, ...]) -> None:
    model, inputs = quantised(family, kind), prompts("x", lengths)
    expected = model.generate(**inputs, **OPTIONS)
    for drafter in ("lookup", "recycling", RandomDrafter(0.5, expected.tolist(), 0.8)):
        result = mmdec.generate(model, inputs, drafter, num_speculative_tokens=(9, 5), **OPTIONS)
        assert torch.equal(result.sequences, expected)
        assert any(sum(round_.drafted) for round_ in result.rounds) == (kind != "activations")
