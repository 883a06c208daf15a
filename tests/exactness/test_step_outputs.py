"""A call that asks for hidden states or attentions is decoded by transformers' own loop, with a warning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmdec
from mmdec.errors import InputError
from tests.support.every_class import make_network, prompts

KINDS = ("hidden_states", "attentions")


@pytest.mark.parametrize("kind", KINDS)
def test_step_outputs_equal_stock(kind: str) -> None:
    model, inputs = make_network("LlamaForCausalLM"), prompts("x", (9, 4))
    model.set_attn_implementation("eager")
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, f"output_{kind}": True}
    expected = model.generate(**inputs, **options, return_dict_in_generate=True)
    with pytest.warns(RuntimeWarning, match=f"`output_{kind}` is not given with drafts"):
        result = model.generate(
            **inputs, **options, return_dict_in_generate=True, custom_generate=mmdec.speculate("lookup")
        )
    assert torch.equal(result.sequences, expected.sequences)
    for step, expected_step in zip(getattr(result, kind), getattr(expected, kind), strict=True):
        for output, expected_output in zip(step, expected_step, strict=True):
            assert torch.equal(output, expected_output)


def test_generate_refuses_step_outputs() -> None:
    with pytest.raises(InputError, match="`output_attentions` must be left out"):
        mmdec.generate(make_network("LlamaForCausalLM"), torch.tensor([[5, 6]]), output_attentions=True)


@pytest.mark.parametrize("family", ["BloomForCausalLM", "MptForCausalLM"])
def test_alibi_is_refused_by_name(family: str) -> None:
    with pytest.raises(InputError, match=f"{family} adds ALiBi's bias"):
        mmdec.generate(make_network(family), torch.tensor([[5, 6]]), "lookup")
