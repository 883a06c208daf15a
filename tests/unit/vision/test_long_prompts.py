"""Tests that a question with more positions than its model has is refused, with both numbers in the error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import mmdec
from mmdec.compat import CACHE_ARGUMENT
from mmdec.errors import BatchError, InputError
from mmdec.targets.registry import make_target
from mmdec.targets.ropes import max_positions
from tests.support.pictures import QUESTION, pixels, stock
from tests.support.tiny_vlm import IMAGE, Picture, batch_of, vision_model
from tests.support.tiny_vlm_folder import llava, qwen

OPTIONS: dict[str, Any] = {"max_new_tokens": 4, "num_speculative_tokens": 2}


@pytest.fixture(params=[llava, qwen])
def short(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return a model of 60 positions, and its processor."""
    model, processor = request.param()
    model.config.get_text_config(decoder=True).max_position_embeddings = 60
    return {"model": model, "processor": processor}


def test_a_prompt_beyond_the_positions_is_refused_with_both_numbers(short: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"the model's 60 positions, .* but takes (\d{3})\. Shorten it, or ask about"):
        mmdec.describe(pixels(0), "x " * 90, **short, **OPTIONS)


def test_neighbours_of_a_too_long_prompt_are_answered(short: dict[str, Any]) -> None:
    prompts = [QUESTION, "x " * 90, QUESTION]
    with pytest.raises(BatchError) as caught:
        mmdec.describe([pixels(0), pixels(1), pixels(2)], prompts, **short, **OPTIONS)
    assert list(caught.value.errors) == [1]
    assert "60 positions" in str(caught.value.errors[1])
    for index in (0, 2):
        answer: Any = caught.value.results[index]
        assert answer.tokens == stock(short["model"], short["processor"], QUESTION, pixels(index), max_new_tokens=4)


def test_a_prompt_that_exactly_fits_is_answered(short: dict[str, Any]) -> None:
    config = short["model"].config.get_text_config(decoder=True)
    chat = mmdec.Chat(**short, **OPTIONS)
    config.max_position_embeddings = 3
    with pytest.raises(InputError, match=r"positions, .* but takes \d+\."):
        chat.ask(QUESTION)
    with pytest.raises(InputError) as caught:
        chat.ask(QUESTION)
    config.max_position_embeddings = int(str(caught.value).split("but takes ")[1].split(".")[0])
    assert chat.ask(QUESTION).tokens


def test_a_chat_counts_all_turns_and_stays_as_it_was(short: dict[str, Any]) -> None:
    chat, config = mmdec.Chat(**short, **OPTIONS), short["model"].config.get_text_config(decoder=True)
    chat.ask(QUESTION)
    before = chat.tokens
    most = config.max_position_embeddings = len(before) + 2
    mmdec.describe((), QUESTION, **short, **OPTIONS)  # alone it fits
    with pytest.raises(InputError, match=rf"{most} positions, .* begin a new chat"):
        chat.ask(QUESTION)
    assert chat.tokens == before
    config.max_position_embeddings = 500
    assert chat.ask(QUESTION).tokens  # over the cache of before


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("llava", [1 + 2 + 4 + 2, 2]), ("qwen2_5_vl", [1 + 2 + 1 + 4 + 1 + 2, 2])],  # 4 x 1 squares: as many as the side
)
def test_an_image_takes_as_many_positions_as_the_model_gives_it(kind: str, expected: list[int]) -> None:
    size = (8, 8) if kind == "llava" else (16, 32)
    batch = batch_of(kind, [[[5, 6], Picture.random(1, size), [7, 8]], [[9]]])
    target: Any = make_target(vision_model(kind))
    assert target.prompt_positions(batch) == expected
    assert int((batch["input_ids"] == IMAGE).sum()) == (4 if kind == "llava" else 8)


def test_a_turn_over_a_cache_counts_from_the_beginning() -> None:
    model, cache = vision_model("qwen2_vl"), DynamicCache(config=vision_model("qwen2_vl").config)
    first = batch_of("qwen2_vl", [[[5, 6], Picture.random(1, (16, 32)), [7, 8]]])
    answer = mmdec.generate(model, first, None, **{CACHE_ARGUMENT: cache}, max_new_tokens=3, do_sample=False).sequences
    ids = torch.cat([answer, torch.tensor([[20, 21]])], 1)
    shown = {"input_ids": ids, "attention_mask": torch.ones_like(ids), CACHE_ARGUMENT: cache}
    target: Any = make_target(model)
    assert target.prompt_positions(shown) == [1 + 2 + 1 + 4 + 1 + 2 + 3 + 2]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_position_embeddings": 1024}, 1024),
        ({"max_position_embeddings": 1024, "rope_parameters": {"rope_type": "default"}}, 1024),
        ({"max_position_embeddings": 32768, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 131072),
        (
            {
                "max_position_embeddings": 4096,
                "rope_parameters": {"factor": 4, "original_max_position_embeddings": 512},
            },
            4096,
        ),
        ({}, None),
    ],
)
def test_stretched_rotations_reach_further(fields: dict[str, Any], expected: int | None) -> None:
    assert max_positions(SimpleNamespace(**fields)) == expected
