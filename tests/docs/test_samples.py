"""Tests the sample outputs in README, pages, model cards, notebooks and demo: the shipped models give each of them, and
it equals the right answer in data/samples or in this file."""

from __future__ import annotations

import csv
import json
import re
from functools import cache
from pathlib import Path

import pytest

import mmdec
from mmdec.daspeech.options import STRATEGIES
from mmdec.demo.translate import STRATEGY_LABELS

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "data" / "samples"
IMAGES = SAMPLES / "images"
SHOWN = {  # what pages ask beside samples.tsv
    ("menu", "How much is BURGER?"): "9.75.",
    ("timetable", "At what time is DUBLIN?"): "12:45.",
    ("room", "What is this?"): "A room.",
    ("map", "What is this?"): "A map.",
}
OPEN = ("Describe this image.", "What do you see?")  # whatever is asked openly has the description as its answer
SECOND = {"What colour is the moon?": "Yellow."}  # in a dialogue, after "What is this?" about room.png
ASKED = (  # (picture, question) in a page's code
    re.compile(r'(\w+)\.png"\]?, "([^"/]+[?.])"'),
    re.compile(r"(\w+)\.png --prompt \"([^\"]+)\""),
    re.compile(r'()ask\("([^"]+)", [^\n]*?(\w+)\.png"?\)'),
)
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "models").rglob("README.md")),
    *sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")),
]


def rows(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


TABLE = {
    (name.removesuffix(".png"), question): answer for name, _, question, answer in rows(IMAGES / "samples.tsv")[1:]
}
DESCRIBED = {
    name.removesuffix(".png"): answer for name, task, _, answer in rows(IMAGES / "samples.tsv") if task == "describe"
}
PICTURES = (
    TABLE | SHOWN | {(name, questions_of_page): text for name, text in DESCRIBED.items() for questions_of_page in OPEN}
)
FRENCH = {name: renderings for name, _, *renderings in rows(SAMPLES / "samples.tsv")}
ENGLISH = {name: text for name, _, text in rows(SAMPLES / "english" / "samples.tsv")[1:]}


def text_of(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    if page.suffix == ".ipynb":
        return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return text


def questions_of_page(page: Path) -> set[tuple[str, str]]:
    """Return (picture, question) of a page, about the sample pictures. Questions to other models are theirs."""
    text = re.sub(r"\\\n *", "", "\n".join(line for line in text_of(page).splitlines() if "model=llava" not in line))
    result = set()
    for pattern in ASKED:
        for groups in pattern.findall(text):
            picture, question = groups[-1:] + groups[1:2] if len(groups) == 3 else groups
            if picture in DESCRIBED:
                result.add((picture, question))
    return result


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, str], str]:
    descriptions = mmdec.describe(
        [IMAGES / f"{picture}.png" for picture, _ in PICTURES], [question for _, question in PICTURES]
    )
    return {key: out.text for key, out in zip(PICTURES, descriptions, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("sample", PICTURES, ids=lambda key: f"{key[0]}: {key[1]}")
def test_a_picture_is_answered_rightly(sample: tuple[str, str], answers: dict[tuple[str, str], str]) -> None:
    assert answers[sample] == PICTURES[sample]


@pytest.mark.parametrize("question", SECOND)
def test_a_second_question_is_answered_rightly(question: str) -> None:
    chat = mmdec.Chat()
    assert chat.ask("What is this?", IMAGES / "room.png").text == SHOWN["room", "What is this?"]
    assert chat.ask(question).text == SECOND[question]


@cache
def translated(strategy: str) -> dict[str, str]:
    """Return all recordings by one call."""
    translations = mmdec.translate_speech([SAMPLES / name for name in FRENCH], strategy=strategy)
    return {name: out.text for name, out in zip(FRENCH, translations, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", FRENCH)
def test_a_recording_is_translated_rightly(name: str, strategy: str) -> None:
    assert translated(strategy)[name] in FRENCH[name]


def test_the_page_offers_every_strategy() -> None:
    assert sorted(STRATEGY_LABELS.values()) == sorted(STRATEGIES)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGLISH)
def test_a_recording_is_transcribed_rightly(name: str) -> None:
    assert mmdec.transcribe(SAMPLES / "english" / name).text == ENGLISH[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_questions_of_pages_have_a_true_answer_here(page: Path) -> None:
    assert questions_of_page(page) <= set(PICTURES)
    if "ask(" in text_of(page):
        assert set(re.findall(r'ask\("([^"]+)"\)', text_of(page))) <= set(SECOND)


def test_questions_of_pages_are_found() -> None:
    result = set().union(*(questions_of_page(page) for page in PAGES))
    assert {
        ("menu", "How much is BURGER?"),
        ("timetable", "At what time is DUBLIN?"),
        ("room", "What is this?"),
    } <= result
    assert {("street", "What do you see?"), ("map", "What is this?")} <= result
