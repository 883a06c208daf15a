"""Tests options of `generate` that need a tokenizer, which transformers does not pass to `custom_generate`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

import mmdec
from mmdec.errors import InputError
from tests.support.tiny_llava import build_tokenizer
from tests.support.tiny_text import language_model
from tests.support.tiny_vlm_folder import TEXTS

TOKENIZER = build_tokenizer(TEXTS * 3, 320)
MODEL = language_model("llama", 1, vocab_size=len(TOKENIZER))
NEW: dict[str, Any] = {"max_new_tokens": 14, "do_sample": False}


def inputs_of(*texts: str) -> dict[str, Any]:
    given = TOKENIZER(list(texts), return_tensors="pt", padding=True, padding_side="left")
    return {name: given[name] for name in ("input_ids", "attention_mask")}


def two_letters(inputs: dict[str, Any]) -> str:
    """Return two letters of what the model says, and not at its beginning."""
    text = TOKENIZER.decode(MODEL.generate(**inputs, **NEW)[0, inputs["input_ids"].shape[1] + 3 :])
    return text[:2]


@pytest.mark.parametrize("texts", [("A red l",), ("A red Wha", "In the t")])
@pytest.mark.parametrize("strings", [False, True])
@pytest.mark.parametrize("configured", [False, True])
def test_token_healing_and_stop_strings_are_as_in_generate(
    texts: tuple[str, ...], strings: bool, configured: bool
) -> None:
    inputs = inputs_of(*texts)
    options: dict[str, Any] = {
        "token_healing": True,
        **({"stop_strings": [two_letters(inputs)]} if strings else {}),
        **NEW,
    }
    if configured:
        options = {"generation_config": GenerationConfig(**options)}
    before = copy.deepcopy(options)
    expected = MODEL.generate(**inputs, tokenizer=TOKENIZER, **options)
    assert not torch.equal(expected[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])  # it has healed something
    for drafter in ("lookup", None):
        result = mmdec.generate(MODEL, inputs, drafter, tokenizer=TOKENIZER, **options).sequences
        assert torch.equal(result, expected)
    if configured:
        assert options["generation_config"].to_dict() == before["generation_config"].to_dict()


@pytest.mark.parametrize("option", [{"token_healing": True}, {"stop_strings": ["a"]}, {"stop_strings": []}])
def test_options_without_their_tokenizer_are_named(option: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"`tokenizer` must be given with `{next(iter(option))}`"):
        mmdec.generate(MODEL, inputs_of("A red l"), **option, **NEW)
    with pytest.raises(InputError, match=f"`tokenizer` must be given with `{next(iter(option))}`"):
        mmdec.generate(MODEL, inputs_of("A red l"), generation_config=GenerationConfig(**option))


def test_stop_strings_of_a_generation_config_are_named() -> None:
    model = copy.deepcopy(MODEL)
    model.generation_config.stop_strings = ["a"]
    with pytest.raises(InputError, match=r"`model\.generation_config\.stop_strings` must be None, but is \['a'\]"):
        mmdec.generate(model, inputs_of("A red l"), tokenizer=TOKENIZER, **NEW)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [(inputs_of("A red l "), "have 4 columns for 5"), ({"input_ids": torch.tensor([[38, 299]])}, "without their mask")],
)
def test_prompts_whose_mask_would_not_fit_are_not_healed(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"`token_healing` must be .* but they (come )?{message}"):
        mmdec.generate(MODEL, inputs, tokenizer=TOKENIZER, token_healing=True, **NEW)


def test_a_paged_cache_is_refused() -> None:
    with pytest.raises(InputError, match="`cache_implementation` must be left out, but is 'paged'"):
        mmdec.generate(MODEL, inputs_of("A red l"), cache_implementation="paged", **NEW)
