"""Tests the demo's error sentences, the text of tokens, and the page's samples."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from mmdec.demo import samples
from mmdec.demo.html import (
    SHARE_OF_ANSWERS,
    SHARE_OF_WORDS,
    TRANSLATION_QUALITY,
    UNEXPECTED,
    confidence_html,
    error_sentence,
    status,
)
from mmdec.demo.race import compare_with_plain, round_listener, steps_from_rounds
from mmdec.errors import InputError, MmdecError
from mmdec.types import Round


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            "`audio` must hold speech, but is silent: its peak is -inf dB, below -66 dB. Check the microphone.",
            "The recording must hold speech, but is silent: its peak is -inf dB, below -66 dB. Check the microphone.",
        ),
        (
            "`image` '/tmp/gradio/ab12/holiday.png' must be a picture, but its 7 bytes are none.",
            "The picture “holiday.png” must be a picture, but its 7 bytes are none.",
        ),
        ("`sample_rate` must be\n  a number.", "The sample rate must be a number."),
        ("`pauses` must be one of two.", "pauses must be one of two."),
    ],
)
def test_errors_become_sentences(error: str, sentence: str) -> None:
    assert error_sentence(InputError(error)) == sentence


def test_unexpected_errors_are_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        assert error_sentence(KeyError("secret")) == UNEXPECTED
    assert "secret" in caplog.text


def test_long_errors_are_cut() -> None:
    sentence = error_sentence(MmdecError("word " * 200))
    assert len(sentence) <= 400
    assert sentence.endswith("…")


def test_the_line_of_status_is_read_out() -> None:
    line = ElementTree.fromstring(status("a < b", "error"))
    assert line.get("role") == "alert"
    assert "".join(line.itertext()).endswith("a < b")
    assert ElementTree.fromstring(status("fine")).get("role") is None  # that of the element around it


def test_waiting_is_shown_and_read_out() -> None:
    line = ElementTree.fromstring(status("Looking …", "busy"))
    (wheel,) = line
    assert (wheel.get("class"), wheel.get("aria-hidden")) == ("mm-wheel", "true")
    assert "".join(line.itertext()) == "Looking …"
    assert len(ElementTree.fromstring(status("Done.", "done"))) == 0


def test_a_low_confidence_is_explained_in_a_sentence() -> None:
    assert "Confidence 93 %: of 100 words that come out like this, about 93 are right." in confidence_html(
        0.934, SHARE_OF_WORDS
    )
    assert "Confidence 99 %" in confidence_html(1.0, TRANSLATION_QUALITY)  # nothing is certain
    assert "unsure" not in confidence_html(0.5, SHARE_OF_ANSWERS)
    low = ElementTree.fromstring(confidence_html(0.31, None))
    assert "".join(low.itertext()).startswith(
        "The model is unsure of this: it may well be wrong. Confidence 31 %, as the"
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and two words; token 0 is special."""
    vocabulary = {"<end>": 0, "Ġgo": 1, "Ġup": 2, "Ã": 3, "©": 4, "!": 5}
    whole = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    whole.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<end>")


def test_pieces_join_to_the_text() -> None:
    reader = tokenizer()
    tokens = [1, 2, 3, 4, 5, 0]  # "é" is two tokens
    (step,) = steps_from_rounds(reader, [Round(0, [0], [tokens], [0], [0], [True])])
    assert "".join(step.pieces) == reader.decode(tokens, skip_special_tokens=True)
    assert step.pieces == [" go", " up", "é", "!"]


def test_rounds_become_steps_on_one_clock() -> None:
    rounds = [
        Round(0, [0], [[1]], [0], [0], [False], target_seconds=0.5, drafter_seconds=0.25),
        Round(1, [0], [[2, 3]], [4], [1], [False], target_seconds=0.25),
        Round(2, [0], [[4, 0]], [4], [1], [True], target_seconds=0.125, core_seconds=0.125),
    ]
    result = steps_from_rounds(tokenizer(), rounds)
    assert [step.seconds for step in result] == [0.75, 1.0, 1.25]
    assert [step.pieces for step in result] == [[" go"], [" up"], ["é"]]
    assert [step.count for step in result] == [1, 2, 2]  # a part of a letter and the end show nothing


def test_drafted_runs_are_compared_with_plain_decoding() -> None:
    tokens = [1, 2]
    fast, slow = ([Round(0, [0], [tokens], [1], [1], [True], target_seconds=seconds)] for seconds in (0.5, 1.45))
    same, other = SimpleNamespace(tokens=tokens, tokens_per_round=3.25), SimpleNamespace(tokens=[1], tokens_per_round=2)
    plain: Any = SimpleNamespace(tokens=tokens, tokens_per_round=1.0)
    drafted: list[Any] = [
        ("a", "x", [(same, fast)] * 3),
        ("b", "y", [(same, fast), (other, fast), (same, fast)]),  # once unequal
    ]
    lanes = compare_with_plain(tokenizer(), drafted, [(plain, slow)] * 3)
    assert [lane.name for lane in lanes] == ["a", "b", "Plain decoding"]
    assert [lane.equal for lane in lanes] == [True, False, None]
    assert [lane.verdict for lane in lanes] == [
        "2.9 times faster, same text",
        "2.9 times faster, not the same text",
        "",
    ]
    assert [lane.per_pass for lane in lanes] == [3.25, 3.25, 1.0]
    assert [lane.times for lane in lanes] == [[0.5] * 3, [0.5] * 3, [1.45] * 3]
    assert lanes[0].pieces == [" go", " up"]


@pytest.mark.parametrize("head", [None, "<p>What?</p>"])
def test_text_is_reported_as_it_is_accepted(head: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmdec.demo.race.REFRESH_SECONDS", 0.0)
    pages: list[str] = []
    rounds: list[Round] = []

    def report(*, first: bool = False, **values: str) -> None:
        pages.append(values.get("text", ""))

    hear = round_listener(report, tokenizer(), rounds, head)
    given = [Round(0, [0], [[1]], [0], [0], [False]), Round(1, [0], [[2, 5]], [4], [1], [False])]
    for round_ in given:
        hear(round_)
    assert rounds == given
    texts = ["".join(ElementTree.fromstring(text).itertext()) for text in pages if text]
    assert texts == ([] if head is None else ["What? go", "What? go up!"])


def test_sample_files_of_the_page_exist() -> None:
    assert len(samples.french()) == 8
    assert [sample.path.name for sample in samples.english()] == list(samples.ENGLISH)
    assert [sample.path.name for sample in samples.pictures()] == list(samples.PICTURES)
    every = [*samples.french(), *samples.english(), *samples.pictures()]
    assert all(sample.path.is_file() and sample.text for sample in every)
    assert samples.pictures()[0].question == "Say all that the picture shows."
    assert samples.pictures()[0].answer.startswith("This is a menu with the title BRUNCH")
    assert sum(sample.path.stat().st_size for sample in samples.pictures()) < 60_000
