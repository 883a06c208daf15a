"""Tests that special tokens in callers' texts are text, for each family's processor: placeholders of pictures are ours
alone, the text is read back whole, and texts without special tokens have the tokens that they had."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import mmdec
import mmdec.pretrained.plain_text as plain_text
from mmdec.io.images import to_pil
from mmdec.pretrained.plain_text import PRIVATE_CODE_POINTS, PlainText
from mmdec.pretrained.vlm import LoadedVlm
from mmdec.serving.dialogue import Dialogue
from mmdec.vision.questions import Question, VlmMessage, model_inputs, render_chat, user_message
from tests.support import vlm_folders as seeing_folders
from tests.support.pictures import QUESTION, pixels
from tests.support.tiny_vlm_folder import llava, qwen

pytestmark = [  # by processors of transformers
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Casting complex values:UserWarning"),
]
FAMILIES = ("llava", "qwen", *seeing_folders.FAMILIES)
ORDINARY = (
    "What is this?",
    "  <b>What</b> is <img src='a.png'> in HTML?\n\nÄ é \U000f0042 ",
    "|x| [y] {z} </p> <",
    "-",
)


@pytest.fixture(scope="module", params=FAMILIES)
def vlm(request: pytest.FixtureRequest) -> LoadedVlm:
    return loaded(request.param)


def loaded(family: str) -> LoadedVlm:
    if family in ("llava", "qwen"):
        return LoadedVlm(*(llava(1) if family == "llava" else qwen(1)))
    for package in seeing_folders.NEEDS.get(family, ()):
        pytest.importorskip(package)
    return LoadedVlm(*seeing_folders.seeing(family))


def special(vlm: LoadedVlm) -> list[str]:
    """Return all special tokens of the tokenizer, placeholders included."""
    return [token.content for token in vlm.tokenizer.added_tokens_decoder.values() if token.special]


def inputs_of_messages(vlm: LoadedVlm, *messages: VlmMessage, count: int = 1) -> dict[str, Any]:
    question = Question("", tuple(pixels(seed) for seed in range(count)))
    return model_inputs(vlm, [render_chat(vlm, messages)], [question])


def user(vlm: LoadedVlm, text: str) -> VlmMessage:
    return user_message(Question(text, (pixels(0),)))


def ids(inputs: dict[str, Any]) -> list[int]:
    return inputs["input_ids"][0].tolist()


def test_special_tokens_of_a_caller_are_text(vlm: LoadedVlm) -> None:
    """The prompt has the special tokens of one with an ordinary text in the place of the caller's, in the same order,
    and says the caller's text."""
    names = special(vlm)
    marks = {*vlm.tokenizer.convert_tokens_to_ids(names)}
    plain = ids(inputs_of_messages(vlm, user(vlm, "x")))
    for text in ("What does {} mean?", "{}{} x {}", "{}"):
        for name in names:
            question = text.replace("{}", name)
            made = ids(inputs_of_messages(vlm, user(vlm, question)))
            assert [each for each in made if each in marks] == [each for each in plain if each in marks], question
            whole = vlm.tokenizer.decode([each for each in made if each not in marks])
            assert question.replace(" ", "") in whole.replace(" ", ""), (question, whole)
            single = vlm.tokenizer(question, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            assert vlm.plain.encode(question) == single


def test_tokens_that_two_parts_spell_together_are_text(vlm: LoadedVlm) -> None:
    marks = {*vlm.tokenizer.added_tokens_decoder}
    name = vlm.image_token
    parts = [{"type": "text", "text": text} for text in (name[:3], name[3:])]
    made = ids(inputs_of_messages(vlm, {"role": "user", "content": [{"type": "image"}, *parts]}))
    plain = ids(inputs_of_messages(vlm, user(vlm, "x")))
    assert [each for each in made if each in marks] == [each for each in plain if each in marks]


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
def test_a_history_with_special_tokens_is_text(vlm: LoadedVlm, role: str) -> None:
    """A later turn of a dialogue is answered, too, and its picture stays where it is."""
    name, end = vlm.image_token, vlm.tokenizer.eos_token
    texts = [f"What is {name}{end}?", f"It is {name}."] if role != "system" else [f"You know {name}.", "Hello"]
    roles = ["user", "assistant"] if role != "system" else ["system", "user"]
    history = [
        {"role": each, "content": [{"type": "text", "text": text}]} for each, text in zip(roles, texts, strict=True)
    ]
    last = (
        [user(vlm, "And this?")]
        if roles[-1] == "assistant"
        else [{"role": "assistant", "content": []}, user(vlm, "So?")]
    )
    changed = [
        {**each, "content": [{**part, "text": "x"} for part in each["content"]]} if each in history else each
        for each in (*history, *last)
    ]
    marks = {*vlm.tokenizer.added_tokens_decoder}
    made, plain = ids(inputs_of_messages(vlm, *history, *last)), ids(inputs_of_messages(vlm, *changed))
    assert [each for each in made if each in marks] == [each for each in plain if each in marks]


def test_ordinary_texts_keep_their_tokens(vlm: LoadedVlm) -> None:
    """Compared with the processor itself, alone and with a neighbour that has a special token."""
    for text in ORDINARY:
        message = user(vlm, text)
        written = vlm.processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        assert render_chat(vlm, [message]) == written
        begin = vlm.tokenizer.bos_token
        how: dict[str, Any] = {"padding": True, "padding_side": "left", "return_tensors": "pt"}
        how["add_special_tokens"] = not (begin and written.startswith(begin))
        images = [[to_pil(pixels(0))]]
        expected = vlm.processor(images=images, text=[written], **how)
        result = model_inputs(vlm, [written], [Question("", (pixels(0),))])
        other = vlm.plain.processor(images=images, text=[written], **how)
        assert set(result) == set(expected) - {"labels"}
        for name, value in result.items():
            same = torch.equal if isinstance(value, torch.Tensor) else np.array_equal
            assert same(torch.as_tensor(expected[name]).to(value.dtype), value), name
            assert same(torch.as_tensor(other[name]).to(value.dtype), value), name
    both = model_inputs(
        vlm,
        [render_chat(vlm, [user(vlm, text)]) for text in (ORDINARY[0], vlm.image_token)],
        [Question("", (pixels(0),))] * 2,
    )
    single = ids(inputs_of_messages(vlm, user(vlm, ORDINARY[0])))
    assert both["input_ids"][0][both["attention_mask"][0] == 1].tolist() == single


@pytest.mark.parametrize("family", ["llava", "qwen"])
def test_a_question_about_html_is_answered(family: str) -> None:
    """By `describe`, in a chat's second turn, and over a picture that stays where it is."""
    vlm = loaded(family)
    call: dict[str, Any] = {"model": vlm, "max_new_tokens": 6}
    name = vlm.image_token
    question = f"What does {name} mean in HTML?"
    inputs = inputs_of_messages(vlm, user(vlm, question))
    assert int((inputs["input_ids"] == vlm.model.config.image_token_id).sum()) == int(
        (inputs_of_messages(vlm, user(vlm, QUESTION))["input_ids"] == vlm.model.config.image_token_id).sum()
    )
    made = vlm.model.generate(**inputs, max_new_tokens=6)[0, inputs["input_ids"].shape[1] :].tolist()
    assert mmdec.describe(pixels(0), question, **call).tokens == made
    assert mmdec.describe((), question, **call).tokens
    chat = mmdec.Chat(**call)
    chat.ask(question, pixels(0))
    chat.ask(f"And {name}{name}?")
    chat.ask("So?", pixels(1))
    placeholders = chat.tokens.count(vlm.model.config.image_token_id)
    one = int((inputs["input_ids"] == vlm.model.config.image_token_id).sum())
    assert one <= placeholders <= 3 * one
    dialogue = Dialogue.from_messages(vlm, [{"role": "user", "content": [{"type": "text", "text": question}]}])
    assert vlm.plain.restore(dialogue.question.text).count(name) == 1


def test_private_characters_of_a_caller_that_hide_a_token_are_read_as_written() -> None:
    vlm = loaded("qwen")
    text = "".join(map(chr, range(0xF0100, 0xF0200))) + vlm.image_token
    for _ in range(3):  # the private character that hides a token, then the one that hides that one, and so on
        (hidden,) = vlm.plain.hide([text])
        assert vlm.plain.hides([hidden])
        assert len(hidden) == len(text)
        assert vlm.plain.restore(hidden) == text
        assert vlm.tokenizer.decode(vlm.plain.encode(text)) == text
        text += "".join(each for each in hidden if each not in text)


def test_a_text_without_special_tokens_but_with_a_hiding_character_is_read_as_written() -> None:
    vlm = loaded("qwen")
    text = vlm.plain.hide([vlm.image_token])[0][0]
    assert vlm.tokenizer.decode(vlm.plain.encode(text)) == text


def test_no_character_of_an_alias_hides_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of so few private characters, aliases drawn without regard to the hiding ones would have some of them."""
    monkeypatch.setattr(plain_text, "PRIVATE_CODE_POINTS", range(0xF0100, 0xF0120))
    for _ in range(20):
        vlm = loaded("qwen")
        made, plain = (ids(inputs_of_messages(vlm, user(vlm, text))) for text in (f"{vlm.image_token} x", "x"))
        assert [each for each in made if each in vlm.tokenizer.added_tokens_decoder] == [
            each for each in plain if each in vlm.tokenizer.added_tokens_decoder
        ]


def test_a_text_of_all_private_characters_is_refused() -> None:
    plain = loaded("qwen").plain
    with pytest.raises(mmdec.InputError, match="`prompt` must not have every private character"):
        plain.hide(["".join(map(chr, PRIVATE_CODE_POINTS))])


def test_a_tokenizer_that_knows_tokens_as_words_names_them() -> None:
    backend = Tokenizer(models.WordLevel({"<image>": 0, "what": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    backend.add_special_tokens(["<image>"])
    plain = PlainText(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>"))
    assert plain.hide(["what is it"]) == ["what is it"]
    with pytest.raises(mmdec.InputError, match="must have no '<image>'"):
        plain.hide(["what is <image>"])


class CountingPattern:
    """A pattern that counts how often it goes through a text."""

    def __init__(self, pattern: Any) -> None:
        self.pattern, self.passes = pattern, 0

    def __getattr__(self, name: str) -> Any:
        self.passes += 1
        return getattr(self.pattern, name)


def test_a_text_of_many_special_tokens_is_read_a_few_times() -> None:
    plain = loaded("llava").plain
    pattern: Any = CountingPattern(plain._special)
    plain._special = pattern
    (hidden,) = plain.hide(["<image> a " * 1000])
    assert pattern.passes <= 2
    assert plain.restore(hidden) == "<image> a " * 1000
    assert not pattern.pattern.search(hidden)


def test_overlapping_tokens_are_all_hidden() -> None:
    tokenizer = Tokenizer(models.WordLevel({"?": 0, **{letter: index for index, letter in enumerate("abcd", 1)}}, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?")
    fast.add_special_tokens({"additional_special_tokens": ["ab", "bcd", "cd", "da"]})
    plain = PlainText(fast)
    hidden = plain.hide(["abc", "dabcd", "aab"])
    assert not plain._special.search("".join(hidden))
    assert [plain.restore(text) for text in hidden] == ["abc", "dabcd", "aab"]
