"""Tests everyday English sentences: frames fit their words, the split depends on the text alone, and no test sentence
is in the training data."""

import itertools
import random
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "data" / "build"))

import english
import everyday
import splits


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return list(itertools.islice(everyday.sentences("train", 0), 4000))


def test_every_slot_names_a_class() -> None:
    known = everyday.classes()
    entries = [*everyday.frames()[0], *(item for items in known.values() for item in items)]
    for entry in entries:
        for _, name, form in everyday._SLOT.findall(entry):
            assert name in known, entry
            assert not form or (form in everyday.FORMS and name in ("transitive", "intransitive")), entry
        assert "{" not in everyday._SLOT.sub("", entry), entry
        for pair in ("()", "[]"):
            assert entry.count(pair[0]) == entry.count(pair[1]), entry


def test_sentences_are_written_as_sentences(texts: list[str]) -> None:
    for text in texts:
        assert re.fullmatch(r"[A-Z][A-Za-z ,'-]*[.?!]", text), text
        assert "  " not in text
        assert " ." not in text
        assert len(text.split()) <= everyday.WORDS
        assert not re.search(r"\b[Aa] (?!one|use|uni|euro)[aeiou]|\ban [bcdfgjklmnpqrstvwxyz]", text), text
    assert len(set(texts)) == len(texts)


def test_many_words_in_many_places(texts: list[str]) -> None:
    count = Counter(word for text in texts for word in re.findall(r"[\w'-]+", text.lower()))
    assert len(count) > 1800
    assert max(number for word, number in count.items()) < 0.1 * sum(count.values())


@pytest.mark.parametrize(
    ("entry", "forms"),
    [
        ("walk, walks", ("walk", "walks", "walked", "walked", "walking")),
        ("try, tries, tried", ("try", "tries", "tried", "tried", "trying")),
        ("carry, carries", ("carry", "carries", "carried", "carried", "carrying")),
        ("see, sees, saw, seen, seeing", ("see", "sees", "saw", "seen", "seeing")),
        ("teach, teaches, taught", ("teach", "teaches", "taught", "taught", "teaching")),
        ("play, plays", ("play", "plays", "played", "played", "playing")),
    ],
)
def test_verbs(entry: str, forms: tuple[str, ...]) -> None:
    assert tuple(everyday.verb(entry, form) for form in everyday.FORMS) == forms


def test_articles() -> None:
    given = {"apple": "an apple", "honest man": "an honest man", "useful tool": "a useful tool", "boat": "a boat"}
    assert {text: everyday.with_article(text) for text in given} == given


def test_a_text_has_one_split(texts: list[str]) -> None:
    tested = list(itertools.islice(everyday.sentences("test", 0), 200))
    assert not {*tested} & {*texts}
    assert everyday.split_of("Is it far?") == everyday.split_of("is it, FAR!")
    draw = random.Random(1)
    shares = Counter(everyday.split_of(everyday.sentence(draw)) for _ in range(3000))
    assert shares["test"] / 3000 == pytest.approx(splits.TEST_SHARE, abs=0.02)


def test_a_regular_verb_needs_no_e() -> None:
    """The regular past is "ed" added: a base in e must name its own."""
    for name in ("transitive", "intransitive"):
        for entry in everyday.classes()[name]:
            regular = "," not in entry.partition(",")[2]
            assert not (regular and entry.partition(",")[0].split()[0].endswith("e")), entry


def test_no_tested_phrase_is_trained_on() -> None:
    """Everyday English happens to say some of the phrasebook's sentences, too."""
    sentences = splits.read_sentences()
    said = english.texts_of(sentences)
    tested = {splits.normalise(text) for split in ("dev", "test") for text in said[split]}
    planned = list(english.chapters(sentences, 5, 40, 0, 600))
    trained = [text for chapter in planned if chapter.split.startswith("train") for text in chapter.texts]
    assert len(trained) == (5 + 600) * english.CHAPTER
    assert not {splits.normalise(text) for text in trained} & tested
    common = [chapter for chapter in planned if chapter.split == "everyday"]
    assert len(common) == 5
    assert all(len(chapter.texts) == 4 for chapter in common)
    known = {splits.normalise(text) for text in said["train"]}
    assert not {splits.normalise(text) for chapter in common for text in chapter.texts} & known
    numbers = [chapter.number for chapter in planned]
    assert numbers == list(range(1, len(planned) + 1))
    without = list(english.chapters(sentences, 5, 40, 0, 0))
    assert planned[: len(without)] == without  # a corpus begun before goes on
