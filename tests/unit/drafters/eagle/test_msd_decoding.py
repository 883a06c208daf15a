"""Tests MSD with pictures, in both layouts: rounds and turns with a cache give the same as one pass over the whole
text."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import mmdec
from mmdec.compat import CACHE_ARGUMENT
from mmdec.drafters.networks.kv_cache import DraftState
from mmdec.targets.registry import make_target
from mmdec.types import Verdict
from tests.support.compressing_drafters import ROWS, rounds_of
from tests.support.draft_networks import Checked, Watched, tree_growing
from tests.support.tiny_vlm import AXES, END, IMAGE, START, VIDEO, Picture, batch_of, second_turn, vision_model
from tests.support.toy_target import RandomBudget

LAYOUTS = ("next", "own")


def double_model() -> Any:
    model = vision_model("llava")
    with torch.no_grad():
        double = type(model)(model.config).double().eval()
        double.load_state_dict(model.state_dict())
    return double


@pytest.mark.parametrize(
    ("layout", "row", "begin"),
    [(layout, row, True) for layout in LAYOUTS for row in ROWS]
    + [(layout, [Picture.random(3), [20, 21]], False) for layout in LAYOUTS]
    + [("next", [[5, 6], Picture.random(1), Picture.random(2)], True)],  # ends with an image
)
def test_the_cache_equals_recomputing_everything(layout: str, row: list[Any], begin: bool) -> None:
    """Through rejections and plain rounds: every draft, in float64."""
    model, own = double_model(), batch_of("llava", [row], begin)
    pixels = {name: part.double() for name, part in own.items() if part.is_floating_point()}
    own |= pixels
    checked = Checked(tree_growing("msd", model, width=3, visual_token=layout), model, pixels)
    rounds = rounds_of(model, checked, RandomBudget(Random(1)), own, 12)
    plain = rounds_of(model, None, RandomBudget(Random(1), 0), own, 12)
    assert checked.compared > 3
    assert [t for round_ in rounds for t in round_.tokens[0]] == [t for round_ in plain for t in round_.tokens[0]]


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chat_with_pictures_is_one_row(layout: str, kind: str) -> None:
    """Three turns over a cached prompt, a picture in each; the last turn begins with its picture."""
    model, cache = vision_model(kind), DynamicCache(config=vision_model(kind).config)
    drafter = Watched(tree_growing("msd", model, visual_token=layout))
    network = drafter.drafter.network
    row: list[Any] = [[5, 6], Picture.random(1), [7, 8, 9]]
    turns: list[list[Any]] = [[[20], Picture.random(2), [21, 22]], [Picture.random(3), [30]]]
    inputs = batch_of(kind, [row])
    options: dict[str, Any] = {"num_speculative_tokens": (6, 3), "do_sample": False, "max_new_tokens": 8}
    options["suppress_tokens"] = [START, END, IMAGE, VIDEO]
    sequences = mmdec.generate(model, inputs, drafter, **{CACHE_ARGUMENT: cache}, **options).sequences
    for more in turns:
        state, mask = drafter.memories[-1], torch.ones_like(inputs["input_ids"])
        inputs, _ = second_turn(kind, [row], [more], sequences, mask)
        sequences = mmdec.generate(model, inputs, drafter, **{CACHE_ARGUMENT: cache}, **options).sequences
        assert drafter.memories[-1] is state  # it travels
        row = [*row, *more]
    inputs |= {"input_ids": sequences, "attention_mask": torch.ones_like(sequences)}
    if kind in AXES:
        inputs["mm_token_type_ids"] = (sequences == IMAGE).long()
    with torch.inference_mode():
        drafter.drafter.process_pending(state)
        context = make_target(model).prefill(inputs, drafter.needs).context
        assert context.embeds is not None
        states = network.prompt(context.embeds[0], context.features[-1][0], context.visual[0]).states[None]
        expected = network.layer(0).project(states, torch.arange(sequences.shape[1] - 1)[None])[1:]
    for result, whole in zip(state.cache.accepted()[:2], expected, strict=True):
        torch.testing.assert_close(result, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batched_columns_equal_single_ones(layout: str) -> None:
    model = vision_model("llava")
    drafter, given = tree_growing("msd", model, visual_token=layout), torch.tensor([6, 14, 21])
    with torch.inference_mode():
        whole = start_drafter(model, drafter, batch_of("llava", ROWS), given)
        for row in range(len(ROWS)):
            single = start_drafter(model, drafter, batch_of("llava", [ROWS[row]]), given[row : row + 1])
            for together, own in zip(whole.cache.accepted()[:2], single.cache.accepted()[:2], strict=True):
                assert own.shape[2] == whole.cache.lengths[row]
                torch.testing.assert_close(together[row, :, : own.shape[2]], own[0], atol=1e-5, rtol=1e-5)


def start_drafter(model: Any, drafter: Any, inputs: dict[str, Any], given: torch.Tensor) -> DraftState:
    """Return the memory after a batch's prompts and the tokens (B,) behind them."""
    output = make_target(model).prefill(inputs, drafter.needs)
    context, draft, scores = output.context, output.draft, output.scores
    memory, zeros = drafter.start(context), torch.zeros_like(given)
    drafter.update(memory, draft, scores, Verdict(zeros[:, None], given, zeros.bool(), given[:, None], zeros + 1))
    drafter.process_pending(memory)
    return memory
