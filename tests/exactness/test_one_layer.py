"""Models of one layer, as target and as drafter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import mmdec
from mmdec.targets.probe import tiny_config

OPTIONS: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": 12}
ONE_LAYER = ("Gemma3ForCausalLM", "Qwen3ForCausalLM", "SmolLM3ForCausalLM", "Llama4ForCausalLM", "Lfm2ForCausalLM")


@pytest.mark.parametrize("family", ONE_LAYER)
def test_a_model_of_one_layer_keeps_its_text_with_drafts(family: str) -> None:
    """Its lists with an entry for each layer have one entry."""
    kind: Any = getattr(transformers, family)
    fields = tiny_config(kind.config_class()).to_dict()
    lists = {name: value[-1:] for name, value in fields.items() if isinstance(value, list) and len(value) == 2}
    known = {name: value for name, value in fields.items() if name not in ("model_type", "transformers_version")}
    model = kind(kind.config_class(**{**known, **lists, "num_hidden_layers": 1})).eval()
    inputs = {"input_ids": torch.randint(3, 12, (1, 12), generator=torch.Generator().manual_seed(0))}
    expected = model.generate(**inputs, **OPTIONS)
    for drafter in ("lookup", model):
        result = mmdec.generate(model, inputs, drafter, num_speculative_tokens=3, **OPTIONS)
        assert torch.equal(result.sequences, expected)
