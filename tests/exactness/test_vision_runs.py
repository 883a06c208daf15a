"""Tests runs that share a model, a batch or a call: images, positions and features of one row or run do not affect
another."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import mmdec
from mmdec.compat import CACHE_ARGUMENT
from mmdec.errors import InputError
from mmdec.targets.media import MediaTarget, VisionReport
from mmdec.types import Needs
from tests.exactness.threads import Work, at_once
from tests.support.grid import slow_but
from tests.support.tiny_vlm import (
    AXES,
    IMAGE,
    KINDS,
    OPTIONS,
    VIDEO,
    Picture,
    Row,
    batch_of,
    row_of,
    second_turn,
    vision_model,
    words,
)
from tests.support.vision_drafters import Reader

GREEDY: dict[str, Any] = {**OPTIONS, "do_sample": False}


@pytest.fixture(autouse=True)
def fresh() -> None:
    mmdec.default_statistics().clear()


def batches(kind: str) -> list[dict[str, Tensor]]:
    """Make batches of different sizes and contents: other positions, other offsets, other rows."""
    rng = random.Random(kind)
    contents = [["three"], ["none"], ["video", "one", "none"], ["one", "three"]]
    return [batch_of(kind, [row_of(rng, content) for content in batch]) for batch in contents]


@pytest.mark.parametrize("kind", slow_but(KINDS, slice(None, None, 2)))
def test_threads_on_one_model_get_what_each_gets_alone(kind: str, switching: None) -> None:
    model = vision_model(kind)
    drafters = ["lookup", Reader(model), "recycling", None]

    def text(inputs: dict[str, Tensor], drafter: Any) -> Work:
        def work() -> Any:
            own = mmdec.DecodingStatistics()
            made = mmdec.generate(model, inputs, drafter, num_speculative_tokens=(5, 3), statistics=own, **GREEDY)
            return made.sequences.tolist()

        return work

    given = batches(kind)
    expected = [model.generate(**inputs, **GREEDY).tolist() for inputs in given]
    assert at_once([text(inputs, drafter) for inputs, drafter in zip(given, drafters, strict=True)] * 2) == expected * 2


@pytest.mark.parametrize("kind", KINDS)
def test_streams_that_take_turns_get_what_each_gets_alone(kind: str) -> None:
    model = vision_model(kind)
    given = batches(kind)
    expected = [model.generate(**inputs, **GREEDY) for inputs in given]
    streams = [
        mmdec.stream(model, inputs, "lookup", num_speculative_tokens=3, statistics=mmdec.DecodingStatistics(), **GREEDY)
        for inputs in given
    ]
    streamed = [[list[int]() for _ in inputs["input_ids"]] for inputs in given]
    going = list(range(len(streams)))
    while going:
        for index in list(going):
            round_ = next(streams[index], None)
            if round_ is None:
                going.remove(index)
                continue
            for row, tokens in zip(round_.rows, round_.tokens, strict=True):
                streamed[index][row] += tokens
    for inputs, rows, sequences in zip(given, streamed, expected, strict=True):
        for row, tokens in enumerate(rows):
            assert sequences[row, inputs["input_ids"].shape[1] :].tolist()[: len(tokens)] == tokens


@pytest.mark.parametrize("kind", AXES)
def test_no_state_is_left_on_the_model_or_read_from_it(kind: str) -> None:
    """Whatever somebody else's run left there."""
    model, rng = vision_model(kind), random.Random(1)
    rows, more = [row_of(rng, "three")], [row_of(rng, "none")]
    inputs, held = batch_of(kind, rows), DynamicCache(config=model.config)
    expected = model.generate(**inputs, **GREEDY)
    whole, _ = second_turn(kind, rows, more, expected, inputs["attention_mask"])
    text = {name: whole[name] for name in ("input_ids", "attention_mask")}
    again = model.generate(**whole, **GREEDY)
    foreign = torch.tensor([[-777]])
    model.model.rope_deltas = foreign
    before = {name: value for name, value in vars(model.model).items() if name != "_modules"}
    result = mmdec.generate(model, inputs, "lookup", **{CACHE_ARGUMENT: held}, **GREEDY).sequences
    assert torch.equal(result, expected)
    assert torch.equal(mmdec.generate(model, text, "lookup", **{CACHE_ARGUMENT: held}, **GREEDY).sequences, again)
    assert {name: value for name, value in vars(model.model).items() if name != "_modules"} == before
    assert model.model.rope_deltas is foreign
    # `generate` of transformers writes there before it hands over; what it makes of it is not used.
    held = DynamicCache(config=model.config)
    plug = mmdec.speculate("lookup")
    assert torch.equal(model.generate(**inputs, **{CACHE_ARGUMENT: held}, custom_generate=plug, **GREEDY), expected)
    model.model.rope_deltas = foreign
    assert torch.equal(model.generate(**text, **{CACHE_ARGUMENT: held}, custom_generate=plug, **GREEDY), again)


@pytest.mark.parametrize("kind", KINDS)
def test_no_byte_of_an_image_reaches_another_row(kind: str) -> None:
    """One row's image changes, the other rows' texts and logits do not, to the last bit; its own does."""
    model, rng = vision_model(kind), random.Random(2)
    rows: list[Row] = [row_of(rng, content) for content in ("one", "three", "none", "video")]
    picture = lambda seed: [[8, 9], Picture.random(seed, (16, 16)), [10, 11]]  # noqa: E731

    def run(seed: int) -> tuple[list[list[int]], Tensor]:
        inputs = batch_of(kind, [rows[0], picture(seed), *rows[1:]])
        options = {**GREEDY, "eos_token_id": None}
        result = mmdec.generate(model, inputs, "lookup", num_speculative_tokens=(5, 3), **options)
        scores = MediaTarget(model).prefill(inputs, Needs()).scores
        return result.sequences.tolist(), scores.logits

    (texts, logits), (others, changed) = run(1), run(2)
    assert texts[1] != others[1]
    keep = [0, 2, 3, 4]
    assert [texts[row] for row in keep] == [others[row] for row in keep]
    assert torch.equal(logits[keep], changed[keep])
    assert not torch.equal(logits[1], changed[1])


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_drafters_read_the_language_models_inputs(kind: str) -> None:
    """Embeddings with the projected images in them, features, positions, from one run of the vision tower."""
    model, rng = vision_model(kind), random.Random(3)
    inputs = batch_of(kind, [row_of(rng, content) for content in ("three", "one", "video")])
    inner, runs = model.model, list[int]()
    tower = inner.visual if kind in AXES else inner.vision_tower
    hook = tower.register_forward_hook(lambda *_: runs.append(1))
    needs = Needs(layers=(0, 1, -1), embeds=True)
    output = MediaTarget(model).prefill(inputs, needs)
    context, scores = output.context, output.scores
    hook.remove()
    assert len(runs) == (1 if kind not in AXES else 2)  # images, videos
    assert isinstance(output.report, VisionReport)
    assert output.report.seconds > 0
    ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
    assert torch.equal(context.visual, (ids == IMAGE) | (ids == VIDEO))
    assert torch.equal(context.mask, mask)
    assert context.embeds is not None
    positions = {} if kind in AXES else {"position_ids": context.positions[0]}
    given: list[Tensor] = []  # what each layer reads
    layers = inner.language_model.layers
    hooks = [layer.register_forward_pre_hook(lambda _, args: given.append(args[0])) for layer in layers]
    stock = model(**inputs, **positions, output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    assert torch.equal(context.embeds[mask], stock.hidden_states[0][mask])
    # A layer's states are what the next layer gets, with what DeepStack adds; stock's own list lacks that.
    deep = kind == "qwen3_vl"
    for layer in (0, 1):
        assert torch.equal(given[layer + 1][mask], stock.hidden_states[layer + 1][mask]) != deep
    for layer, states in ((0, given[1]), (1, given[2]), (-1, stock.hidden_states[-1])):
        assert torch.equal(context.features[layer][mask], states[mask])
        assert torch.equal(scores.features[layer], states[:, -1:])
    if kind in AXES:
        types = inputs["mm_token_type_ids"]
        grids = {name: value for name, value in inputs.items() if "grid" in name}
        expected, deltas = inner.get_rope_index(ids, types, **grids, attention_mask=inputs["attention_mask"])
        assert torch.equal(context.positions, expected)
        assert torch.equal(context.next_position, mask.sum(1) + deltas[:, 0])
    else:
        assert context.next_position.tolist() == mask.sum(1).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_several_sequences_of_a_prompt_see_its_images(kind: str) -> None:
    model, rng = vision_model(kind), random.Random(4)
    inputs = batch_of(kind, [row_of(rng, content) for content in ("three", "none", "one")])
    expected = mmdec.generate(model, inputs, None, **GREEDY).sequences
    options = {**GREEDY, "do_sample": True, "top_k": 1}
    result = mmdec.generate(model, inputs, "lookup", num_return_sequences=2, **options).sequences
    assert torch.equal(result, expected.repeat_interleave(2, 0))
    plug = mmdec.speculate("lookup")
    custom = model.generate(**inputs, num_return_sequences=2, **options, custom_generate=plug)
    assert torch.equal(custom, expected.repeat_interleave(2, 0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_smaller_model_of_its_kind_sees_the_images(kind: str) -> None:
    """The model itself, as its own drafter, is always right; without the pixels it reads the text alone."""
    model, rng = vision_model(kind), random.Random(7)
    inputs = batch_of(kind, [row_of(rng, content) for content in ("three", "none", "video")])
    options: dict[str, Any] = {"max_new_tokens": 13, "do_sample": False, "eos_token_id": None}
    expected = model.generate(**inputs, **options)
    result = mmdec.generate(model, inputs, model, num_speculative_tokens=3, **options)
    assert torch.equal(result.sequences, expected)
    assert result.tokens_per_round == 4
    rounds: list[Any] = []
    plug = mmdec.speculate(model, num_speculative_tokens=3, on_round=rounds.append)
    assert torch.equal(model.generate(**inputs, **options, custom_generate=plug), expected)
    assert any(sum(round_.drafted) for round_ in rounds)


# --- what cannot work ------------------------------------------------------------------------------------------------


def wrong_inputs(kind: str) -> dict[str, dict[str, Any]]:
    rng = random.Random(5)
    picture = Picture.random(1, (16, 16))
    two = batch_of(kind, [[words(rng), picture, words(rng), picture]])
    one = batch_of(kind, [[words(rng), picture, words(rng)]])
    none = batch_of(kind, [[words(rng)]])
    seen = [name for name in one if name not in none]
    text = {name: value for name, value in two.items() if name not in seen}
    bad = dict(one, pixel_values=one["pixel_values"].clone())
    bad["pixel_values"].view(-1)[0] = torch.nan
    return {
        "fewer images": {**two, **{name: one[name] for name in seen}},
        "more images": {**one, **{name: two[name] for name in seen}},
        "no images": text,
        "no placeholders": {**none, **{name: one[name] for name in seen}},
        "NaN": bad,
        "bytes": {**one, "pixel_values": (one["pixel_values"] * 10).to(torch.uint8)},
        "a list": {**one, "pixel_values": one["pixel_values"].tolist()},
        "another shape": {**one, "pixel_values": one["pixel_values"][..., :-1]},
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("fewer images", "placeholder .* for each visual token"),
        ("more images", "placeholder .* for each visual token"),
        ("no images", "for 0 visual tokens of 0 images. Name as many"),
        ("no placeholders", "but holds 0 for"),
        ("NaN", "`pixel_values` must hold finite"),
        ("bytes", "but holds torch.uint8"),
        ("a list", "`pixel_values` must be a tensor"),
        ("another shape", "`pixel_values` must be as"),
    ],
)
def test_wrong_images_are_one_clear_error(kind: str, wrong: str, message: str) -> None:
    inputs = wrong_inputs(kind)[wrong]
    with pytest.raises(InputError, match=message):
        mmdec.generate(vision_model(kind), inputs, "lookup", **GREEDY)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_is_not_cut_between_rows(kind: str) -> None:
    """There are as many placeholders as visual tokens, but one is in the wrong row."""
    model, picture = vision_model(kind), Picture.random(1, (16, 16))
    inputs = batch_of(kind, [[[8], picture, [9]], [[8], picture, [9]]])
    first = (inputs["input_ids"][0] == IMAGE).nonzero()[0, 0]
    inputs["input_ids"][0, first] = 8
    inputs["input_ids"][1, 0] = IMAGE
    with pytest.raises(InputError, match=r"in its row, but holds \["):
        mmdec.generate(model, inputs, "lookup", **GREEDY)


@pytest.mark.parametrize("kind", AXES)
def test_unknown_positions_are_refused(kind: str) -> None:
    """A cache that stock code filled holds images of unknown size; new text alone does not say where it stands."""
    model, rng = vision_model(kind), random.Random(6)
    rows, more = [row_of(rng, "one")], [row_of(rng, "none")]
    inputs, held = batch_of(kind, rows), DynamicCache(config=model.config)
    sequences = model.generate(**inputs, **{CACHE_ARGUMENT: held}, **GREEDY)
    whole, _ = second_turn(kind, rows, more, sequences, inputs["attention_mask"])
    text = {name: whole[name] for name in ("input_ids", "attention_mask")}
    with pytest.raises(InputError, match="whose images are not known"):
        mmdec.generate(model, text, "lookup", **{CACHE_ARGUMENT: held}, **GREEDY)
    expected = model.generate(**whole, **GREEDY)
    assert torch.equal(mmdec.generate(model, whole, "lookup", **{CACHE_ARGUMENT: held}, **GREEDY).sequences, expected)


@pytest.mark.parametrize("kind", AXES)
def test_token_types_are_needed_beside_images(kind: str) -> None:
    inputs = batch_of(kind, [[[8, 9], Picture.random(1), [10]]])
    del inputs["mm_token_type_ids"]
    with pytest.raises(InputError, match="`mm_token_type_ids` must be"):
        mmdec.generate(vision_model(kind), inputs, "lookup", **GREEDY)


def test_a_video_for_a_model_of_images_is_refused() -> None:
    inputs = batch_of("qwen2_vl", [[[8], Picture.random(1, (8, 8), 4), [9]]])
    inputs = {name: value for name, value in inputs.items() if name not in ("mm_token_type_ids",)}
    with pytest.raises(InputError, match="Pass a video's frames as images"):
        mmdec.generate(vision_model("llava"), inputs, "lookup", **GREEDY)
