"""Tests `mmdec.Chat`: each turn equals `generate` on the whole chat with the same cache, also with new images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from PIL import Image
from transformers import DynamicCache

import mmdec
from mmdec.compat import CACHE_ARGUMENT
from mmdec.errors import InputError
from tests.support.grid import sample
from tests.support.pictures import pixels
from tests.support.tiny_vlm_folder import llava, qwen

TURNS = [
    ("What is this?", (pixels(0),)),
    ("And (answer) this?", (pixels(1, 60, 20), pixels(2))),
    ("So?", ()),
    ("It is 09:30.", (pixels(3),)),
]


@pytest.fixture(scope="module", params=["llava", "qwen"])
def loaded(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return llava(1) if request.param == "llava" else qwen(1)


def whole_text(chat: mmdec.Chat, processor: Any) -> str:
    return processor.tokenizer.decode(chat.tokens)


WAYS = [(drafter, length) for length in (None, 6) for drafter in ("recycling", "lookup", None)]


@pytest.mark.parametrize(("drafter", "length"), sample(WAYS, [("recycling", None), ("lookup", 6), (None, 6)]))
def test_turns_are_those_of_generate(loaded: tuple[Any, Any], drafter: str | None, length: int | None) -> None:
    """length: an answer's limit; some answers end by themselves, some are cut."""
    model, processor = loaded
    options = {} if length is None else {"max_new_tokens": length}
    chat = mmdec.Chat(model=model, processor=processor, drafter=drafter, num_speculative_tokens=3, **options)
    cache, shown = DynamicCache(config=model.config), []
    for turn, (prompt, pictures) in enumerate(TURNS):
        before = chat.tokens
        answer = chat.ask(prompt, pictures)
        shown += pictures
        ends = answer.tokens[-1] == processor.tokenizer.eos_token_id
        answer_tokens = answer.tokens[:-1] if ends else answer.tokens
        assert chat.tokens[len(chat.tokens) - len(answer_tokens) :] == answer_tokens
        asked = chat.tokens[: len(chat.tokens) - len(answer_tokens)]
        assert asked[: len(before)] == before
        ids = torch.tensor([asked])

        def make_inputs(images: Any, ids: torch.Tensor = ids) -> dict[str, Any]:
            result = (
                processor.image_processor([Image.fromarray(image) for image in images], return_tensors="pt")
                if images
                else {}
            )
            types = {}
            if processor.image_token != "<image>":
                types["mm_token_type_ids"] = (ids == processor.image_token_id).long()
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **types, **result}

        single = model.generate(**make_inputs(shown), **options)[0, ids.shape[1] :].tolist()
        assert answer.tokens == single
        if processor.image_token == "<image>":  # stock Qwen loses the positions of a second turn's images
            same = model.generate(**make_inputs(pictures), **{CACHE_ARGUMENT: cache}, **options)[
                0, ids.shape[1] :
            ].tolist()
            assert answer.tokens == same
        assert len(chat.messages) == 2 * (turn + 1)
        assert chat.messages[-1]["content"][0]["text"] == answer.text
    text = whole_text(chat, processor)
    end = processor.tokenizer.eos_token
    assert text.count(end) == (3 if processor.image_token == "<image>" else 7)  # between turns, never twice


def test_the_callers_end_token_ends_an_answer(loaded: tuple[Any, Any]) -> None:
    model, processor = loaded
    tokens = mmdec.Chat(model=model, processor=processor).ask(*TURNS[0]).tokens
    end = next(token for token in tokens[2:] if token not in tokens[:2])
    for given in (end, [end, 3]):
        chat = mmdec.Chat(model=model, processor=processor, eos_token_id=given)
        answer = chat.ask(*TURNS[0]).tokens
        assert answer == tokens[: tokens.index(end) + 1]
        assert chat.tokens[-len(answer) :][1:] == answer[:-1]  # the template writes the end


def test_a_turn_that_is_broken_off_leaves_the_dialogue_as_it_was(loaded: tuple[Any, Any]) -> None:
    model, processor = loaded
    wanted, chat = (mmdec.Chat(model=model, processor=processor, drafter="recycling") for _ in range(2))
    for dialogue in (wanted, chat):
        dialogue.ask(*TURNS[0])
    expected = wanted.ask(*TURNS[1])
    before = chat.tokens, chat.messages

    class Told(Exception):
        pass

    def broken(text: str) -> None:
        raise Told

    with pytest.raises(Told):
        chat.ask("Never mind.", TURNS[3][1], on_text=broken)
    for image, prompt in ((b"", "Broken?"), (pixels(0), ""), (pixels(0), ("", "", "?"))):
        with pytest.raises(InputError):
            chat.ask(prompt, image)
    assert (chat.tokens, chat.messages) == before
    assert chat.ask(*TURNS[1]).tokens == expected.tokens
    assert chat.tokens == wanted.tokens


def test_a_refusal_names_what_the_turn_brought(loaded: tuple[Any, Any]) -> None:
    model, processor = loaded
    chat = mmdec.Chat(model=model, processor=processor, min_confidence=1.0)
    for image, argument in ((pixels(0), "image"), ((), "prompt")):
        with pytest.raises(InputError, match=f"^`{argument}` must give an output with a confidence"):
            chat.ask("What is this?", image)
        with pytest.raises(InputError, match=f"^`{argument}` must give an output with a confidence"):
            mmdec.describe(image, "What is this?", model=model, processor=processor, min_confidence=1.0)


def test_options_that_mean_nothing_to_a_chat_are_refused(loaded: tuple[Any, Any]) -> None:
    model, processor = loaded
    for options in ({"batch_size": 2}, {"on_text": print}, {"drafter": "eagel"}, {"input_ids": 1}):
        with pytest.raises(InputError, match=next(iter(options))):
            mmdec.Chat(model=model, processor=processor, **options)
    with pytest.raises(InputError, match=r"`on_text` must be left out for a chat, but is given. .* Give it to `ask`"):
        mmdec.Chat(on_text=print)
