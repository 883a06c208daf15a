"""Tests the plan of the English corpus: which texts its splits hold."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "data" / "build"))
import english
import splits


@pytest.mark.slow
def test_no_measured_text_is_one_of_the_train_split() -> None:
    sentences = splits.read_sentences()
    sentences_of = english.texts_of(sentences)
    planned = list(english.chapters(sentences, 40, 0))
    texts = {
        split: [text for chapter in planned if chapter.split == split for text in chapter.texts]
        for split in ("dev", "test", "test_voices", "paragraphs")
    }
    assert [len(texts[split]) for split in texts] == [40, 40, 40, 20]
    for split in ("dev", "test", "test_voices"):
        assert not set(texts[split]) & sentences_of["train"]
    assert not set(texts["test"]) & set(texts["test_voices"])
    assert all(40 <= len(text.split()) <= 105 for text in texts["paragraphs"])
    assert [chapter.number for chapter in planned] == list(range(1, len(planned) + 1))
