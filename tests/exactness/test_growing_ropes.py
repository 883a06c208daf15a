"""Tests rotary positions that change at a text length: texts on one side of it are drafted (beyond it only if there is
one change), and a text that crosses it is decoded without drafts."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

import mmdec
from mmdec.compat import CACHE_ARGUMENT
from mmdec.targets.probe import tiny_model
from mmdec.targets.text import TextTarget
from tests.support.every_class import prompts
from tests.support.families import config_of
from tests.support.grid import sample
from tests.support.random_drafter import RandomDrafter

LENGTH = 32  # columns at which the frequencies change
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
ROPES: dict[str, dict[str, Any]] = {
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": LENGTH, **FACTORS},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}
DRAFTED = {"below": True, "across": False, "beyond": True}
PLACES = {"below": (6, 15), "across": (20, 29), "beyond": (40, 33)}  # the rows' prompts


def model_of(kind: str, family: str = "LlamaForCausalLM") -> Any:
    """Return a model of two small layers whose text may be of any length."""
    network: Any = getattr(transformers, family)
    model = tiny_model(network, config_of(family), "sdpa")
    rope = {**model.config.rope_parameters, **ROPES[kind], "rope_theta": 10000.0}
    most = LENGTH if kind == "dynamic" else 4 * LENGTH
    given = {**model.config.to_dict(), "rope_parameters": rope, "max_position_embeddings": most}
    if "original_max_position_embeddings" in given:  # Phi-3 takes it from here
        given["original_max_position_embeddings"] = LENGTH
    shape = type(model.config)(**given)
    other = network(shape)
    other.load_state_dict(model.state_dict())
    return other.eval()


def check(model: Any, inputs: dict[str, Any], drafted: bool, **options: Any) -> None:
    """Each call has a copy of its own: a "dynamic" rope keeps the frequencies of the longest text so far."""
    options = {"max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0, "do_sample": False, **options}
    expected = copy.deepcopy(model).generate(**inputs, **options)
    for drafter in ("lookup", RandomDrafter(0.4, expected.tolist(), 0.9)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = mmdec.generate(copy.deepcopy(model), inputs, drafter, num_speculative_tokens=(9, 5), **options)
        assert torch.equal(result.sequences, expected)
        assert any(sum(round_.drafted) for round_ in result.rounds) == drafted
        assert ("which the text may reach" in "".join(str(each.message) for each in caught)) is not drafted


KINDS = (("LlamaForCausalLM", "longrope"), ("LlamaForCausalLM", "dynamic"), ("Phi3ForCausalLM", "longrope"))
TEXTS = [(*kind, place, rows) for kind in KINDS for place in PLACES for rows in (1, 2)]


@pytest.mark.parametrize(("family", "kind", "place", "rows"), sample(TEXTS, TEXTS[::4] + TEXTS[3::4]))
def test_texts_equal_stock(family: str, kind: str, place: str, rows: int) -> None:
    drafted = DRAFTED[place] and not (kind == "dynamic" and place == "beyond")
    check(model_of(kind, family), prompts(kind, PLACES[place][:rows]), drafted)


def test_a_cache_from_below_is_not_drafted_beyond() -> None:
    """Its keys keep the frequencies of short texts."""
    model, texts = model_of("longrope"), list[torch.Tensor]()
    for plug in (None, mmdec.speculate("lookup")):
        cache, ids = DynamicCache(config=model.config), prompts("x", (10,))["input_ids"]
        for more in (4, 30):
            options: dict[str, Any] = {"max_new_tokens": more, "do_sample": False, "eos_token_id": None}
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ids = model.generate(ids, **{CACHE_ARGUMENT: cache}, pad_token_id=0, custom_generate=plug, **options)
        texts.append(ids)
    assert torch.equal(*texts)


def test_factors_are_cut_for_the_probe() -> None:
    """A class that is probed has as many factors as frequencies."""

    class Other(transformers.LlamaForCausalLM):
        pass

    config = model_of("longrope").config
    TextTarget(Other(config))
    made = tiny_model(Other, config, "sdpa").config
    factors = made.rope_parameters
    assert len(factors["short_factor"]) == len(factors["long_factor"]) == made.head_dim // 2
