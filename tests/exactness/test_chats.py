"""Tests chats that continue from a cache: each turn's text equals that of `generate` without a cache, and the cache is
the one that `generate` leaves.

A pairwise cover of the cases; all with MMDEC_ALL=1.
"""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

import mmdec
from mmdec.compat import CACHE_ARGUMENT
from mmdec.errors import InputError
from mmdec.targets.probe import PROBE_VOCABULARY
from tests.exactness.pairwise import cover, each_value
from tests.support.families import model_of
from tests.support.grid import WHOLE, slow_but
from tests.support.random_drafter import RandomDrafter

PAD, EOS = 0, 2
OPTIONS: dict[str, Any] = {
    "max_new_tokens": 12,
    "do_sample": False,
    "pad_token_id": PAD,
    "eos_token_id": [EOS, 5, 11],
    "suppress_tokens": [PAD],  # else a mask could not be read off the text
}
GRID = {
    "family": ["LlamaForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "OPTForCausalLM", "Qwen2ForCausalLM"],
    "batch": [1, 2, 3, 4],
    "padded": [False, True],
    "entry_point": ["generate", "stream", "custom", "output"],
    "drafter": [None, "lookup", "recycling", "small", "wild"],
    "ends": ["attended", "masked"],  # what a row's padding after its end is for the next turn
    "ids": ["whole", "new"],
}
CASES = cover(GRID, WHOLE)


@cache
def model(family: str, seed: int = 0) -> Any:
    return model_of(family, seed)


@pytest.fixture(autouse=True)
def fresh() -> None:
    mmdec.default_statistics().clear()


def run_turn(
    network: PreTrainedModel, inputs: dict[str, Tensor], entry_point: str, drafter: Any, cache: DynamicCache | None
) -> tuple[Tensor, Any]:
    """Run one turn through an entry point. Returns the sequences and the cache for the next turn."""
    given: Any = {**OPTIONS, CACHE_ARGUMENT: cache}
    plug = mmdec.speculate(drafter, num_speculative_tokens=(5, 3))
    if entry_point == "generate":
        return mmdec.generate(network, inputs, drafter, num_speculative_tokens=(5, 3), **given).sequences, cache
    if entry_point == "stream":
        rows: list[list[int]] = [[] for _ in inputs["input_ids"]]
        for round_ in mmdec.stream(network, inputs, drafter, num_speculative_tokens=4, **given):
            for row, tokens in zip(round_.rows, round_.tokens, strict=True):
                rows[row] += tokens
        longest = max(map(len, rows))
        text = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
        return torch.cat([inputs["input_ids"], text], 1), cache
    if entry_point == "custom":
        return network.generate(**inputs, **given, custom_generate=plug), cache  # type: ignore[operator]
    # The first turn's cache is `generate`'s own, which comes back with the output.
    out: Any = network.generate(  # type: ignore[operator]
        **inputs, **given, custom_generate=plug, return_dict_in_generate=True
    )
    return out.sequences, out[CACHE_ARGUMENT]


@pytest.mark.parametrize("case", slow_but(CASES, each_value(CASES)), ids=lambda case: "-".join(map(str, case.values())))
def test_a_chat_goes_on_from_its_cache(case: dict[str, Any]) -> None:
    network, rng = model(case["family"]), random.Random(str(case))
    batch = case["batch"]

    def words(width: int) -> Tensor:
        return torch.tensor(
            [([rng.randrange(6, PROBE_VOCABULARY) for _ in range(4)] * 3)[:width] for _ in range(batch)]
        )

    text = words(9)
    mask = torch.ones_like(text)
    for row in range(batch) if case["padded"] else ():
        mask[row, : (3 * row + 2) % 7] = 0
    text = text * mask
    cache = None if case["entry_point"] == "output" else DynamicCache(config=network.config)
    theirs = DynamicCache(config=network.config)
    for turn in range(3):
        expected = network.generate(text, attention_mask=mask, **OPTIONS)
        again = network.generate(text, attention_mask=mask, **OPTIONS, **{CACHE_ARGUMENT: theirs})
        assert torch.equal(again, expected)  # the stock chat itself
        new = case["ids"] == "new" and turn > 0
        shown = text[:, cache.get_seq_length() :] if new and cache is not None else text
        inputs = {"input_ids": shown, "attention_mask": mask}
        if not new and bool(mask.all()) and not bool((text == PAD).any()):  # else `generate` would infer another mask
            del inputs["attention_mask"]
        drafter = {
            "small": model(case["family"], 1),
            "wild": RandomDrafter(turn, expected.tolist() if not new else ()),
        }.get(case["drafter"], case["drafter"])
        result, cache = run_turn(network, inputs, case["entry_point"], drafter, cache)
        assert torch.equal(result[:, shown.shape[1] :], expected[:, text.shape[1] :])
        after = torch.ones_like(expected)
        after[:, : mask.shape[1]] = mask
        assert_alike(cache, theirs, after[:, :-1].bool())
        if case["ends"] == "masked":
            after[:, mask.shape[1] :] = (expected[:, mask.shape[1] :] != PAD).long()
        more = words(4)
        text, mask = torch.cat([expected, more], 1), torch.cat([after, torch.ones_like(more)], 1)


def assert_alike(cache: Any, theirs: DynamicCache, seen: Tensor) -> None:
    """Return the same columns, wherever there is a token."""
    assert cache.get_seq_length() == theirs.get_seq_length() == seen.shape[1]
    for layer, expected_layer in zip(cache.layers, theirs.layers, strict=True):
        for held, expected in ((layer.keys, expected_layer.keys), (layer.values, expected_layer.values)):
            assert held.shape == expected.shape
            keep = seen[:, None, :, None]
            torch.testing.assert_close(held * keep, expected * keep, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 3])
def test_stock_code_goes_on_from_the_cache(batch: int) -> None:
    network, ids = model("LlamaForCausalLM"), torch.arange(6, 6 + 8 * batch).view(batch, 8)
    cache = DynamicCache(config=network.config)
    text = mmdec.generate(network, ids, "lookup", **{CACHE_ARGUMENT: cache}, **OPTIONS).sequences
    text = torch.cat([text, ids[:, :3]], 1)
    mask = torch.ones_like(text)
    before = copy.deepcopy(cache)
    expected = network.generate(text, attention_mask=mask, **OPTIONS)
    for held in (cache, before):
        assert torch.equal(network.generate(text, attention_mask=mask, **{CACHE_ARGUMENT: held}, **OPTIONS), expected)


def test_a_refused_call_leaves_the_cache_as_it_was() -> None:
    network, ids = model("LlamaForCausalLM"), torch.arange(6, 14)[None]
    held = DynamicCache(config=network.config)
    text = mmdec.generate(network, ids, "lookup", **{CACHE_ARGUMENT: held}, **OPTIONS).sequences
    length, keys = held.get_seq_length(), held.layers[0].keys
    assert keys is not None
    keys_before = keys.clone()
    refused: list[tuple[Tensor, dict[str, Any], str]] = [
        (text, {"num_beams": 2}, "num_beams"),
        (text[:, :3], {}, "attention_mask"),  # neither the whole text nor a mask for it
        (torch.cat([text, text]), {}, "batch's 2 rows, but has 1"),
    ]
    for given, options, match in refused:
        with pytest.raises(InputError, match=match):
            mmdec.generate(network, given, "lookup", **{CACHE_ARGUMENT: held}, **{**OPTIONS, **options})
        assert held.get_seq_length() == length
        assert torch.equal(held.layers[0].keys, keys_before)  # type: ignore[arg-type]


def test_a_cache_of_another_model_is_refused() -> None:
    network, ids = model("LlamaForCausalLM"), torch.arange(6, 14)[None]

    def filled_cache() -> DynamicCache:
        filled = DynamicCache(config=network.config)
        network(ids[:, :4], **{CACHE_ARGUMENT: filled}, use_cache=True)
        return filled

    shallow, uneven = filled_cache(), filled_cache()
    shallow.layers.pop()
    uneven.layers[1].keys = uneven.layers[1].keys[:, :, :2]  # type: ignore[index]
    uneven.layers[1].values = uneven.layers[1].values[:, :, :2]  # type: ignore[index]
    for odd in (shallow, uneven, EncoderDecoderCache(filled_cache(), DynamicCache())):
        with pytest.raises(InputError, match=f"`{CACHE_ARGUMENT}` must (be|have been filled by this model)"):
            mmdec.generate(network, ids, "lookup", **{CACHE_ARGUMENT: odd}, **OPTIONS)


def test_a_stream_that_is_left_keeps_the_text_so_far() -> None:
    network, ids = model("LlamaForCausalLM"), torch.arange(6, 14)[None]
    held = DynamicCache(config=network.config)
    text = ids
    for round_ in mmdec.stream(network, ids, "lookup", **{CACHE_ARGUMENT: held}, **OPTIONS | {"eos_token_id": None}):
        text = torch.cat([text, torch.tensor(round_.tokens)], 1)
        if round_.index == 2:
            break
    mask = torch.ones_like(text)
    expected = network.generate(text, attention_mask=mask, **OPTIONS)
    assert torch.equal(mmdec.generate(network, text, None, **{CACHE_ARGUMENT: held}, **OPTIONS).sequences, expected)
