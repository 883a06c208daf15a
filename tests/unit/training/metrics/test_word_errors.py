"""Word and character errors: counts, rates, intervals, and Whisper's normaliser."""

import math

import pytest

from mmdec.evaluation.transcription import normaliser
from mmdec.training.metrics.text import Edits, character_edits, rate, ratio, word_edits
from tests.support.tiny_whisper import build_tokenizer


def test_edits_are_counted_by_kind() -> None:
    assert word_edits("a b c d", "a x c") == Edits(1, 1, 0, 4)
    assert word_edits("a  b ", "a b and c") == Edits(0, 0, 2, 2)
    assert character_edits("ab cd", "abcd") == Edits(0, 1, 0, 5)
    assert word_edits("", "a b") == Edits(0, 0, 2, 0)
    assert character_edits("", "ab") == Edits(0, 0, 2, 0)
    assert word_edits("a b", "") == Edits(0, 2, 0, 2)


def test_error_rates_are_ratios_of_sums() -> None:
    result = rate([Edits(1, 0, 0, 1), Edits(0, 0, 0, 9)])
    assert result["value"] == pytest.approx(0.1)
    assert (result["substitutions"], result["deletions"], result["insertions"], result["length"]) == (1, 0, 0, 10)
    assert rate([Edits(0, 0, 1, 0)])["value"] is None


def test_the_interval_is_1_96_standard_errors() -> None:
    """Half of 400 utterances of ten words have two errors: 0.1, give or take twice 0.1 / sqrt(400)."""
    value, low, high = ratio([2, 0] * 200, [10, 10] * 200)
    assert value == pytest.approx(0.1)
    assert low == pytest.approx(0.1 - 1.96 * 0.1 / 20, abs=0.001)
    assert high == pytest.approx(0.1 + 1.96 * 0.1 / 20, abs=0.001)
    assert ratio([3.0, 3.0], [2.0, 2.0]) == pytest.approx((1.5, 1.5, 1.5))
    assert all(map(math.isnan, ratio([], [])))


def test_whispers_normaliser_is_chosen_by_language_and_spellings() -> None:
    tokenizer = build_tokenizer(["some words"] * 3, 300)
    text = "Twenty-five colours, won't they?"
    tokenizer.english_spelling_normalizer = {"colours": "colors"}
    english, name = normaliser(tokenizer, "English")
    assert (english(text), name) == ("25 colors will not they", "english")
    tokenizer.english_spelling_normalizer = None  # as from a folder without normalizer.json
    bare, name = normaliser(tokenizer, "en")
    assert bare(text) == "25 colours will not they"
    assert "without" in name
    for language in ("de", None):
        basic, name = normaliser(tokenizer, language)
        assert (" ".join(basic(text).split()), name) == ("twenty five colours won t they", "basic")
