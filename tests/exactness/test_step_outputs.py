"""Tests that hidden states and attentions of a drafted call equal those of `generate`, by step and layer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import mmdec
from mmdec.targets.probe import small_model
from mmdec.types import InputError
from tests.support.every_class import made, prompts, windowed_config
from tests.support.recurrent import recurrent_model
from tests.support.wild import Wild

KINDS = ("hidden_states", "attentions")
FLAGS: dict[str, Any] = {"return_dict_in_generate": True, "output_hidden_states": True, "output_attentions": True}
OPTIONS: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, **FLAGS}
FAMILIES = ("LlamaForCausalLM", "GPT2LMHeadModel", "Gemma3ForCausalLM", "MistralForCausalLM", "Llama4ForCausalLM")


def check(model: Any, inputs: dict[str, Any], **more: Any) -> Any:
    options = {**OPTIONS, **more}
    wanted = model.generate(**inputs, **options)
    drafter: Any = Wild(0.5, wanted.sequences.tolist(), 0.8)
    plug = mmdec.speculate(drafter, num_speculative_tokens=(8, 4))
    found = model.generate(**inputs, **options, custom_generate=plug)
    assert torch.equal(found.sequences, wanted.sequences)
    for kind in KINDS:
        ours, theirs = getattr(found, kind), getattr(wanted, kind)
        assert [len(step) for step in ours] == [len(step) for step in theirs]
        for one, other in zip(ours, theirs, strict=True):
            for mine, stock in zip(one, other, strict=True):
                torch.testing.assert_close(mine, stock, rtol=1e-3, atol=1e-4)
    return found


@pytest.mark.parametrize("lengths", [(5,), (21,), (21, 9, 4)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_stocks(family: str, lengths: tuple[int, ...]) -> None:
    """Within a window of 8, beyond it, and in ragged rows of which some end early."""
    kind: Any = getattr(transformers, family)
    model, inputs = small_model(kind, windowed_config(family), "eager"), prompts(family, lengths)
    ends = model.generate(**inputs, max_new_tokens=9, do_sample=False, pad_token_id=0, eos_token_id=None)[0, -1]
    check(model, inputs, eos_token_id=None if len(lengths) == 1 else int(ends))


def test_layers_that_share_keys() -> None:
    model = made("Gemma4ForCausalLM")
    model.set_attn_implementation("eager")
    check(model, prompts("Gemma4", (12,)), eos_token_id=None)


@pytest.mark.filterwarnings("ignore:`output_hidden_states` of a model with recurrent layers:RuntimeWarning")
def test_a_recurrent_model_is_read_by_stocks_own_loop() -> None:
    model, inputs = recurrent_model("Lfm2"), prompts("Lfm2", (9,))
    model.set_attn_implementation("eager")
    check(model, inputs, eos_token_id=None)


def test_one_kind_alone_and_one_token() -> None:
    model, inputs = made("LlamaForCausalLM"), prompts("x", (6,))
    options = {**OPTIONS, "max_new_tokens": 1, "output_attentions": False}
    found = model.generate(**inputs, **options, custom_generate=mmdec.speculate("lookup"))
    assert len(found.hidden_states) == 1
    assert found.attentions is None


def test_the_short_call_refuses_them() -> None:
    with pytest.raises(InputError, match="`output_attentions` must be left to"):
        mmdec.generate(made("LlamaForCausalLM"), torch.tensor([[5, 6]]), output_attentions=True)
