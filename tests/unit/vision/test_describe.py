"""Tests `mmdec.describe`: its answers equal those of `generate`, for every type of images and prompts."""

from __future__ import annotations

import gc
import io
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import mmdec
from mmdec.compat import CACHE_ARGUMENT
from mmdec.drafters.lookup import LookupDrafter
from mmdec.errors import InputError
from mmdec.pretrained.language_model import load_language_model
from mmdec.pretrained.vlm import LoadedVlm, load_vlm
from mmdec.types import Round
from mmdec.vision import questions as module
from tests.support import tiny_text_folder
from tests.support.grid import slow_but
from tests.support.pictures import QUESTION, pixels, stock
from tests.support.tiny_text import language_model
from tests.support.tiny_vlm_folder import llava, qwen, write
from tests.support.vision_drafters import network_drafter


def png(image: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def vlm(folder: Path) -> LoadedVlm:
    return load_vlm(folder, "cpu")


@pytest.fixture(scope="module", params=["llava", "qwen"])
def loaded(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return llava() if request.param == "llava" else qwen()


def test_answers_are_those_of_generate(loaded: tuple[Any, Any]) -> None:
    model, processor = loaded
    asked = [pixels(0), (pixels(1), pixels(2, 60, 20)), (), pixels(3, 33, 31), (pixels(4),)]
    prompts = [QUESTION, "Where is the red star?", "It is 09:30.", QUESTION, "A menu?"]
    expected = [
        stock(model, processor, prompt, *(images if isinstance(images, tuple) else (images,)))
        for images, prompt in zip(asked, prompts, strict=True)
    ]
    assert len({tuple(tokens) for tokens in expected}) == len(expected)  # they depend on what is shown and asked
    assert len(set(map(len, expected))) > 1 or all(len(tokens) == 24 for tokens in expected)
    call = {"model": model, "processor": processor}
    for drafter, size in (("lookup", 8), ("recycling", 2), (None, 1), (LookupDrafter(), 3)):
        result = mmdec.describe(asked, prompts, drafter=drafter, batch_size=size, num_speculative_tokens=4, **call)
        assert [answer.tokens for answer in result] == expected
        for answer in result:
            assert answer.text == processor.tokenizer.decode(answer.tokens, skip_special_tokens=True).strip()
            assert answer.lossless
            assert answer.rounds >= 1
            assert answer.accepted <= answer.drafted
            assert len(answer.tokens) == 1 + round(answer.tokens_per_round * (answer.rounds - 1))
            parts = {name: seconds for name, seconds in answer.timings.items() if name != "total"}
            assert parts.keys() == {"read", "vision", "prompt", "decoder", "drafter", "core"}
            assert min(parts.values()) >= 0
            assert answer.timings["total"] >= sum(parts.values())
        assert result[2].timings["vision"] == 0
        assert result[0].timings["vision"] > 0
        assert (result[0].drafted == 0) == (drafter is None)


@pytest.fixture(scope="module")
def text_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small language model with a tokenizer of its own."""
    return tiny_text_folder.write(
        tmp_path_factory.mktemp("text") / "small", tiny_text_folder.OTHER, 3, num_hidden_layers=1
    )


TEXT_DRAFTERS = ("other tokens", "other tokens, loaded", "same tokens", "eagle3")


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("batch_size", slow_but((1, 4), (4,)))
@pytest.mark.parametrize("nodes", slow_but((None, 4), (4,)))
@pytest.mark.parametrize("given", slow_but(TEXT_DRAFTERS, ("other tokens", "eagle3")))
def test_a_drafter_of_text_changes_no_answer(
    loaded: tuple[Any, Any], text_models: Path, given: str, nodes: int | None, batch_size: int
) -> None:
    """A small language model and an EAGLE-3 that was trained on text do not see the pictures' columns."""
    model, processor = loaded
    drafters: dict[str, Callable[[], Any]] = {
        "other tokens": lambda: text_models,
        "other tokens, loaded": lambda: load_language_model(text_models, "cpu").model,
        "same tokens": lambda: language_model("llama", 2, vocab_size=model.config.get_text_config().vocab_size),
        "eagle3": lambda: network_drafter("eagle3", model, pictures="dropped"),
    }
    asked = [pixels(0), (pixels(1), pixels(2, 60, 20)), (), (pixels(3), pixels(4), pixels(5))]
    prompts = [QUESTION, "Where is the red star?", "It is 09:30.", "A menu?"]
    expected = [
        stock(model, processor, prompt, *(images if isinstance(images, tuple) else (images,)))
        for images, prompt in zip(asked, prompts, strict=True)
    ]
    result = mmdec.describe(
        asked,
        prompts,
        model=model,
        processor=processor,
        drafter=drafters[given](),
        num_speculative_tokens=nodes,
        batch_size=batch_size,
        statistics=mmdec.DecodingStatistics(),
    )
    assert [answer.tokens for answer in result] == expected
    assert nodes is None or sum(answer.drafted for answer in result)


def test_options_go_to_generate(vlm: LoadedVlm) -> None:
    for options in ({"max_new_tokens": 5}, {"repetition_penalty": 1.5, "max_new_tokens": 9}):
        out = mmdec.describe(pixels(0), QUESTION, model=vlm, **options)
        assert out.tokens == stock(vlm.model, vlm.processor, QUESTION, pixels(0), **options)
    torch.manual_seed(3)
    sampled = mmdec.describe(pixels(0), QUESTION, model=vlm, do_sample=True)
    torch.manual_seed(3)
    assert sampled.tokens == stock(vlm.model, vlm.processor, QUESTION, pixels(0), do_sample=True)
    ended = mmdec.describe(
        pixels(0), QUESTION, model=vlm, stop_strings=[mmdec.describe(pixels(0), QUESTION, model=vlm).text[:3]]
    )
    assert len(ended.tokens) < 24


def test_images_in_many_forms_are_read(vlm: LoadedVlm, folder: Path, tmp_path: Path) -> None:
    image = pixels(5)
    path = tmp_path / "a picture é.png"
    path.write_bytes(png(image))
    expected = stock(vlm.model, vlm.processor, QUESTION, image)
    for source in (path, str(path), png(image), bytearray(png(image)), Image.fromarray(image), image):
        assert mmdec.describe(source, QUESTION, model=vlm).tokens == expected
    assert mmdec.describe(path, QUESTION, model=str(folder), device="cpu").tokens == expected
    assert mmdec.describe([path], QUESTION, model=folder, device="cpu")[0].tokens == expected
    assert mmdec.describe([], QUESTION, model=vlm) == []
    assert mmdec.describe(path, model=vlm).tokens == stock(vlm.model, vlm.processor, "Describe this image.", image)


def test_answers_are_reported_in_order_past_refused_questions(vlm: LoadedVlm) -> None:
    reported, rounds = list[tuple[int, str]](), list[Round]()

    def report(index: int, answer: mmdec.Description) -> None:
        reported.append((index, answer.text))
        if index == 0:  # the last question has not begun
            assert 4 not in {row for round_ in rounds for row in round_.rows}

    pictures: Any = [pixels(0), pixels(1), b"no picture", pixels(3), pixels(4)]
    options: dict[str, Any] = {"model": vlm, "batch_size": 2, "max_new_tokens": 6}
    with pytest.raises(mmdec.BatchError) as refused:
        mmdec.describe(pictures, QUESTION, on_description=report, on_round=rounds.append, **options)
    answers = [result and result.text for result in refused.value.results]
    assert reported == [(index, answers[index]) for index in (0, 1, 3, 4)]


@pytest.mark.parametrize("name", ["on_round", "on_text", "on_description", "logits_processor"])
def test_a_callbacks_stop_iteration_reaches_the_caller(vlm: LoadedVlm, name: str) -> None:
    """Inside a generator Python would make a RuntimeError of it."""

    def stop(*_: object) -> Any:
        raise StopIteration("mine")

    options: dict[str, Any] = {name: [stop] if name == "logits_processor" else stop}
    with pytest.raises(StopIteration, match="mine"):
        mmdec.describe(pixels(6), QUESTION, model=vlm, **options)
    if name == "on_text":
        with pytest.raises(StopIteration, match="mine"):
            mmdec.Chat(model=vlm).ask(QUESTION, pixels(6), on_text=stop)
        return
    with pytest.raises(StopIteration, match="mine"):
        mmdec.describe([pixels(6), pixels(7)], QUESTION, model=vlm, **options)


def test_text_is_streamed_as_it_is_accepted(vlm: LoadedVlm) -> None:
    pieces: list[str] = []
    out = mmdec.describe(pixels(6), QUESTION, model=vlm, on_text=pieces.append)
    assert len(pieces) > 3
    assert "".join(pieces).rstrip() == out.text
    with pytest.raises(InputError, match="`on_text`"):
        mmdec.describe([pixels(6)], QUESTION, model=vlm, on_text=pieces.append)

    class Told(Exception):
        pass

    def broken(text: str) -> None:
        raise Told

    with pytest.raises(Told):
        mmdec.describe(pixels(6), QUESTION, model=vlm, on_text=broken)
    with mmdec.model_lock(vlm.model).write():  # the run that was broken off holds it no longer
        pass


def test_rounds_are_reported(vlm: LoadedVlm) -> None:
    rounds: list[Round] = []
    out = mmdec.describe(pixels(6), QUESTION, model=vlm, on_round=rounds.append)
    assert len(rounds) == out.rounds
    assert [token for round_ in rounds for token in round_.tokens[0]] == out.tokens
    assert "".join(text for round_ in rounds for text in round_.text).strip() == out.text


def test_rounds_of_several_questions_name_each_by_its_place(vlm: LoadedVlm) -> None:
    """Also where one was refused, and in several batches."""
    rounds: list[Round] = []
    questions = [QUESTION, "", "Where is the red star?", "A menu?"]
    with pytest.raises(mmdec.BatchError) as refused:
        mmdec.describe([pixels(6)] * 4, questions, model=vlm, batch_size=2, on_round=rounds.append)
    for index, out in enumerate(refused.value.results):
        heard = [pair for round_ in rounds for pair in zip(round_.rows, round_.tokens, round_.text, strict=True)]
        assert [token for row, tokens, _ in heard for token in tokens if row == index] == (out.tokens if out else [])
        assert "".join(text for row, _, text in heard if row == index).strip() == (out.text if out else "")


def test_seconds_of_transformers_loop_are_counted_once(vlm: LoadedVlm, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that moves in the model's passes alone."""
    now = 0.0

    def move(*_: Any) -> None:
        nonlocal now
        now += 1.0

    monkeypatch.setattr("time.perf_counter", lambda: now)
    monkeypatch.setattr("mmdec.generation.speculation.siblings_change_logits", lambda *_: True)
    hook = vlm.model.register_forward_hook(move)
    try:
        answers = mmdec.describe([pixels(6), pixels(7)], QUESTION, model=vlm, max_new_tokens=6, drafter=None)
    finally:
        hook.remove()
    assert sum(answer.timings["total"] for answer in answers) == pytest.approx(now)
    assert now == max(answer.rounds for answer in answers)


def test_stream_takes_what_the_processor_gives(vlm: LoadedVlm) -> None:
    text = vlm.processor.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}],
        add_generation_prompt=True,
    )
    inputs = vlm.processor(
        images=[Image.fromarray(pixels(0))], text=text, return_tensors="pt", add_special_tokens=False
    )
    rounds = list(mmdec.stream(vlm.model, inputs, "lookup", tokenizer=vlm.tokenizer))
    out = mmdec.describe(pixels(0), QUESTION, model=vlm)
    assert [token for round_ in rounds for token in round_.tokens[0]] == out.tokens
    assert "".join(round_.text[0] for round_ in rounds).strip() == out.text


def test_a_tuple_of_texts_places_the_images(loaded: tuple[Any, Any]) -> None:
    """The tokens are those of the processor with the model's own placeholders between the texts; a placeholder in a
    text is text."""
    model, processor = loaded
    call: dict[str, Any] = {"model": model, "processor": processor}
    mark, two = processor.image_token, (pixels(0), pixels(1))
    begun = mmdec.describe(two, ("", "", "Which?"), **call)
    assert begun.tokens == mmdec.describe(two, "Which?", **call).tokens
    if mark != "<image>":  # LLaVA's templates put all pictures first
        between = mmdec.describe(two, ("Is ", " larger than ", " here?"), **call)
        assert between.tokens != mmdec.describe(two, "Is  larger than  here?", **call).tokens
    for images, prompt in (
        (pixels(0), ("", " and ", "?")),
        (two, ("", "?")),
        (two, ("", "", "", "?")),
        ((), ("", "?")),
    ):
        with pytest.raises(InputError, match="`prompt` must have the texts before, between and after"):
            mmdec.describe(images, prompt, **call)
    for wrong in (("", ""), (), ("", 3), ("", " ")):
        with pytest.raises(InputError, match="`prompt` must be text, or a tuple"):
            mmdec.describe(pixels(0), wrong, **call)  # type: ignore[arg-type]
    for text in (f"{mark} and {mark}?", getattr(processor, "video_token", mark)):
        assert mmdec.describe(pixels(0), text, **call).tokens


def test_one_bad_image_does_not_lose_the_others_nor_reach_them(vlm: LoadedVlm, tmp_path: Path) -> None:
    whole = png(pixels(7))
    single = {seed: mmdec.describe(pixels(seed), QUESTION, model=vlm).tokens for seed in (0, 1, 2)}
    bad = [
        b"",
        b"not a picture",
        whole[:60],
        tmp_path / "none.png",
        "https://example.org/a.png",
        None,
        np.zeros((2, 2)),
    ]
    asked: list[Any] = [pixels(0), *bad[:3], pixels(1), *bad[3:], (pixels(2),), (pixels(1), b"")]
    for size in (1, 3, 16):
        with pytest.raises(mmdec.BatchError, match="8 of 11 images were rejected, the first at index 1") as caught:
            mmdec.describe(asked, QUESTION, model=vlm, batch_size=size)
        assert list(caught.value.errors) == [1, 2, 3, 5, 6, 7, 8, 10]
        result = {place: answer.tokens for place, answer in enumerate(caught.value.results) if answer is not None}
        assert result == {0: single[0], 4: single[1], 9: single[2]}
    prompts = [QUESTION, "", QUESTION, 7, ("a", "b", "c"), "\ud800"]
    with pytest.raises(mmdec.BatchError) as caught:
        mmdec.describe([pixels(0)] * 6, prompts, model=vlm)  # type: ignore[list-item]
    assert list(caught.value.errors) == [1, 3, 4, 5]
    with pytest.raises(InputError, match="one for each of 2 images, but has 3"):
        mmdec.describe([pixels(0)] * 2, [QUESTION] * 3, model=vlm)


@pytest.mark.parametrize("size", [(1, 1), (1, 3), (3, 1), (3, 3), (10, 10000), (10000, 10), (2, 500)])
def test_odd_sizes_are_answered_or_named(loaded: tuple[Any, Any], size: tuple[int, int]) -> None:
    """Qwen's processor refuses sides of more than 1 to 200; a neighbour is answered all the same."""
    model, processor = loaded
    odd, neighbour = pixels(8, *size), pixels(0)
    expected = mmdec.describe(neighbour, QUESTION, model=model, processor=processor).tokens
    call = {"model": model, "processor": processor}
    if processor.image_token != "<image>" and max(size) > 200 * min(size):
        with pytest.raises(mmdec.BatchError, match=f"refuses {size[1]} x {size[0]} pixels") as caught:
            mmdec.describe([odd, neighbour], QUESTION, **call)
        assert list(caught.value.errors) == [0]
        assert caught.value.results[1].tokens == expected
    else:
        result = mmdec.describe([odd, neighbour], QUESTION, **call)
        assert result[1].tokens == expected
        assert result[0].tokens == stock(model, processor, QUESTION, odd)


def test_a_rotated_photo_is_turned_upright(vlm: LoadedVlm) -> None:
    image = pixels(9)
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.fromarray(image).transpose(Image.Transpose.ROTATE_90).save(buffer, "PNG", exif=exif)
    assert mmdec.describe(buffer.getvalue(), QUESTION, model=vlm).tokens == stock(
        vlm.model, vlm.processor, QUESTION, image
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "eagel"}, "`drafter`"),
        ({"drafter": 7}, "`drafter`"),
        ({"model": "no-such-model"}, "`model`"),
        ({"model": 7}, "`model`"),
        ({"batch_size": 0}, "`batch_size`"),
        ({"threads": 10**9}, "`threads`"),
        ({"num_beams": 4}, "`num_beams`"),
        ({"pixel_values": torch.zeros(1)}, "`pixel_values` must be left out"),
        ({CACHE_ARGUMENT: None}, f"`{CACHE_ARGUMENT}` must be left out"),
        ({"device": "tpu"}, "`device`"),
        ({"dtype": "bfloat16"}, "`dtype`"),
        ({"dtype": torch.bfloat16}, "`dtype` must be that of"),
        ({"rule": "sampled", "do_sample": False}, "`rule` must fit"),
        ({"no_such_option": 1}, "no_such_option"),
    ],
)
def test_wrong_arguments_are_one_error(vlm: LoadedVlm, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        mmdec.describe(pixels(0), QUESTION, **{"model": vlm, **options})


@pytest.mark.parametrize(("given", "meant"), [("max_new_token", "max_new_tokens"), ("on_txt", "on_text")])
def test_a_misspelt_option_is_refused_in_one_sentence(vlm: LoadedVlm, given: str, meant: str) -> None:
    options: dict[str, Any] = {given: 5}
    message = (
        f"`{given}` must be an option of this call or of `model.generate`, but it is not one. Did you mean '{meant}'?"
    )
    with pytest.raises(InputError, match=re.escape(message)):
        mmdec.describe(pixels(0), model=vlm, drafter=None, **options)
    if meant != "on_text":  # which a chat takes with a question
        with pytest.raises(InputError, match=re.escape(message)):
            mmdec.Chat(model=vlm, drafter=None, **options).ask("What is this?", pixels(0))


def test_too_many_images_are_refused(vlm: LoadedVlm) -> None:
    with pytest.raises(InputError, match="at most 256 images"):
        mmdec.describe(tuple([pixels(0)] * 257), QUESTION, model=vlm)


def test_pictures_of_a_list_are_dropped_although_some_are_refused(
    vlm: LoadedVlm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stored error of a refused picture keeps no frame, whose values are its neighbours' pictures."""
    reads, read = list[weakref.ref[np.ndarray]](), module.read_image

    def read_and_watch(source: Any) -> np.ndarray:
        image = read(source).copy()
        reads.append(weakref.ref(image))
        return image

    monkeypatch.setattr(module, "read_image", read_and_watch)
    pictures: list[Any] = [b"no picture" if index % 4 == 1 else pixels(index) for index in range(16)]
    with pytest.raises(mmdec.BatchError) as caught:
        mmdec.describe(pictures, QUESTION, model=vlm, batch_size=4, max_new_tokens=4)
    gc.collect()
    assert len(reads) == 12
    assert [index for index, each in enumerate(reads) if each() is not None] == []
    assert len(caught.value.errors) == 4
