"""Tests vision-language models with every kind of draft, images and chats: tokens equal those of `generate`, in fp32.

A pairwise cover; all cases with MMDEC_ALL=1 (`make test-all`). A second turn continues from the first one's cache, with
new images; it is compared with the whole chat without a cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import mmdec
from mmdec.compat import CACHE_ARGUMENT
from tests.exactness.pairwise import cover, each_value
from tests.support.grid import WHOLE, slow_but
from tests.support.tiny_vlm import (
    AXES,
    KINDS,
    OPTIONS,
    PAD,
    SHIPPED,
    Row,
    batch_of,
    row_of,
    second_turn,
    vision_model,
)
from tests.support.vision_drafters import DRAFTERS

CHOICE: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 20},
}
NEAR_TIE = 1e-5  # of the largest logit: about ten times what the order of additions changes
Draw = TypeVar("Draw")
NODES = {"chain": 4, "tree": (7, 3)}
GRID = {
    "kind": [*KINDS, *["shipped"] * SHIPPED.is_dir()],
    "drafter": list(DRAFTERS),
    "content": ["none", "one", "three", "video"],
    # The second: over its cache; ids and images of the whole chat, its ids and the new images, or what is new alone.
    "turn": ["first", "whole", "images", "new"],
    "entry_point": ["generate", "stream", "custom"],
    "shape": list(NODES),
    "choice": list(CHOICE),
    "batch": [1, 4],
}


def cases() -> list[dict[str, Any]]:
    """A pairwise cover; or all, with one way of going on and one entry point for each."""
    if not WHOLE:
        return cover(GRID)
    rng, chosen = random.Random(0), list[dict[str, Any]]()
    for case in cover({**GRID, "entry_point": [""], "turn": ["first", "second"]}, True):
        turn = rng.choice(GRID["turn"][1:]) if case["turn"] == "second" else "first"
        chosen.append({**case, "turn": turn, "entry_point": rng.choice(GRID["entry_point"])})
    return chosen


@pytest.fixture(autouse=True)
def fresh() -> None:
    mmdec.default_statistics().clear()


def rows_of(rng: random.Random, content: str, batch: int) -> list[Row]:
    """The first row has the content, the others have it or something else."""
    contents = [content, *(rng.choice([content, "none", "one"]) for _ in range(batch - 1))]
    return [row_of(rng, content) for content in contents]


def options_of(model: Any, choice: str) -> dict[str, Any]:
    """Return the options of `generate`."""
    silent = [*OPTIONS["suppress_tokens"], int(model.config.image_token_id)]
    return {**OPTIONS, **CHOICE[choice], "suppress_tokens": silent}


def stock(model: Any, inputs: dict[str, Tensor], choice: str) -> Tensor | None:
    """Decode plainly. Returns None where its two best tokens are one to float32, and rounding chooses between them.

    `generate` draws a batch's tokens from one stream; the core draws each row's own.
    """
    options = options_of(model, choice)
    if choice == "sampled" and len(inputs["input_ids"]) > 1:
        return mmdec.generate(model, inputs, None, seed=5, **options).sequences
    torch.manual_seed(3)
    out = model.generate(**inputs, **options, output_scores=True, return_dict_in_generate=True)
    best = torch.stack(out.scores).topk(2).values
    tied = bool((best[..., 0] - best[..., 1] < NEAR_TIE * best.abs().amax(-1)).any())
    return None if tied and choice == "greedy" else out.sequences


def drawn_prompts(
    draw: Callable[[], Draw], model: Any, inputs: Callable[[Draw], dict[str, Tensor]], choice: str
) -> tuple[Draw, Tensor]:
    """Draw inputs until stock's answer does not depend on rounding. Returns the inputs and that answer."""
    for _ in range(20):
        given = draw()
        expected = stock(model, inputs(given), choice)
        if expected is not None:
            return given, expected
    pytest.fail("twenty draws in a row have two tokens that float32 does not tell apart")


def run_turn(case: dict[str, Any], model: Any, inputs: dict[str, Tensor], drafter: Any, held: DynamicCache) -> Tensor:
    """Return the sequences, through the case's entry point."""
    options: dict[str, Any] = {**options_of(model, case["choice"]), CACHE_ARGUMENT: held}
    seed = 5 if case["choice"] == "sampled" and case["batch"] > 1 else None
    nodes: Any = NODES[case["shape"]]
    torch.manual_seed(3)
    if case["entry_point"] == "generate":
        return mmdec.generate(model, inputs, drafter, num_speculative_tokens=nodes, seed=seed, **options).sequences
    if case["entry_point"] == "custom":
        plug = mmdec.speculate(drafter, num_speculative_tokens=nodes, seed=seed)
        return model.generate(**inputs, **options, custom_generate=plug)
    rows: list[list[int]] = [[] for _ in inputs["input_ids"]]
    for round_ in mmdec.stream(model, inputs, drafter, num_speculative_tokens=nodes, seed=seed, **options):
        for row, tokens in zip(round_.rows, round_.tokens, strict=True):
            rows[row] += tokens
    longest = max(map(len, rows))
    text = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
    return torch.cat([inputs["input_ids"], text], 1)


@pytest.mark.parametrize(
    "case", slow_but(cases(), each_value(cases())), ids=lambda case: "-".join(map(str, case.values()))
)
def test_texts_equal_plain_decoding(case: dict[str, Any]) -> None:
    kind, rng = case["kind"], random.Random(str(case))
    model, make = vision_model(kind), DRAFTERS[case["drafter"]]

    def row_list() -> list[Row]:
        return rows_of(rng, case["content"], case["batch"])

    rows, sequences = drawn_prompts(row_list, model, lambda rows: batch_of(kind, rows), case["choice"])
    inputs = batch_of(kind, rows)
    held = DynamicCache(config=model.config)
    assert torch.equal(run_turn(case, model, inputs, make(model, sequences.tolist()), held), sequences)
    if case["turn"] == "first":
        return

    def inputs_of_turn(more: list[Row]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return second_turn(kind, rows, more, sequences, inputs["attention_mask"])

    more, expected = drawn_prompts(row_list, model, lambda more: inputs_of_turn(more)[0], case["choice"])
    whole, new = inputs_of_turn(more)
    shown, past = whole, 0
    # `generate` itself knows no positions for new text without the text and the images before it, if there are images.
    names = ("input_ids", "attention_mask", "mm_token_type_ids")
    single = case["entry_point"] != "custom" or kind not in AXES or not set(whole) - set(names)
    if case["turn"] == "images" and single:
        shown = {name: whole[name] if name in names else value for name, value in new.items()}
    if case["turn"] == "new" and single:
        # What the cache lacks: the last token of the first turn comes before what is new.
        past = held.get_seq_length()
        lacking = whole["input_ids"][:, past : -new["input_ids"].shape[1]]
        shown = {**new, "input_ids": torch.cat([lacking, new["input_ids"]], 1)}
        if kind in AXES:
            shown["mm_token_type_ids"] = whole["mm_token_type_ids"][:, past:]
    expected = expected[:, past:]
    assert torch.equal(run_turn(case, model, shown, make(model, expected.tolist()), held), expected)
    assert held.get_seq_length() == past + expected.shape[1] - 1
