"""Metrics on cases small enough to count by hand, and against enumeration."""

from __future__ import annotations

import math
import sys
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdec.errors import InputError
from mmdec.training.metrics import text as metrics
from mmdec.training.metrics.text import Rate

STATION = ["Where is the station, please?", "Where's the station, please?"]


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("It's half past two!", "its half past two"),
        ("  Twenty-one  EUROS. ", "twenty one euros"),
        ("A café, O’Clock…", "a café oclock"),
        ("", ""),
        ("?!", ""),
    ],
)
def test_normalising_twice_changes_nothing(text: str, plain: str) -> None:
    assert metrics.normalise(text) == plain
    assert metrics.normalise(plain) == plain


def test_exact_matches_ignore_punctuation_and_take_any_rendering() -> None:
    hypotheses = ["where is the station please", "Where's the station, please?", "Where is the hotel?"]
    assert metrics.exact_matches(hypotheses, [STATION] * 3) == [True, True, False]


def test_word_errors_are_counted_over_the_corpus() -> None:
    assert metrics.word_error_rate(["a b c", ""], ["A, b d.", "e"]) == pytest.approx(2 / 4)


def test_phone_errors_are_counted_over_the_corpus() -> None:
    hypotheses, references = [["w", "eh"], ["pau", "ax"]], [["w", "eh", "r"], ["ax"]]
    assert metrics.phone_error_rate(hypotheses, references) == pytest.approx(2 / 4)
    assert [metrics.phone_distance(h, r) for h, r in zip(hypotheses, references, strict=True)] == [1, 1]


LEXICON = {"the": [["dh", "ax"], ["dh", "iy"]], "end": [["eh", "n", "d"]], "a": [["ax"]], "twenty": [["t", "w"]]}


@given(
    st.lists(st.sampled_from(["dh", "ax", "iy", "eh", "n", "d", "pau"]), max_size=7),
    st.lists(st.lists(st.sampled_from(["the", "end", "a"]), min_size=1, max_size=3), min_size=1, max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_nearest_rendering_equals_enumeration(phones: list[str], renderings: list[list[str]]) -> None:
    spoken = [phone for phone in phones if phone != "pau"]
    expected = min(
        metrics.phone_distance(spoken, [phone for word in rendering for phone in word])
        for words in renderings
        for rendering in product(*(LEXICON[word] for word in words))
    )
    texts = [" ".join(words).capitalize() + "." for words in renderings]
    assert metrics.closest_phone_errors(phones, texts, LEXICON) == expected


def test_a_rendering_with_an_unknown_word_is_passed_over() -> None:
    assert metrics.closest_phone_errors(["ax"], ["Zebra!", "The end."], LEXICON) == 4
    assert metrics.closest_phone_errors(["ax"], ["Zebra!"], LEXICON) is None
    assert metrics.closest_phone_errors(["t", "w", "ax"], ["Twenty-a."], LEXICON) == 0  # by the parts of the word


@pytest.mark.parametrize(
    ("text", "spans"),
    [
        ("Ten euros at half past two.", ["ten euros", "half past two"]),
        ("At quarter to three, please.", ["quarter to three"]),
        ("It's three o'clock.", ["three oclock"]),
        ("From Lyon to Paris at noon.", ["noon"]),
        ("One hundred and five euros and fifty cents.", ["hundred and five euros and fifty cents"]),
        ("A hundred and five euros.", ["hundred and five euros"]),
        ("A table for twenty-one and a tea.", ["twenty one"]),
        ("Twenty minutes past six", ["twenty minutes past six"]),
        ("On the first of May", ["first"]),
        ("Nothing to count and to see.", []),
    ],
)
def test_numbers_are_found_in_a_text(text: str, spans: list[str]) -> None:
    assert metrics.number_spans(text) == spans


@pytest.mark.parametrize(
    ("span", "kind"),
    [("ten euros", "prices"), ("ten past two", "times"), ("midnight", "times"), ("twenty one", "numbers")],
)
def test_a_number_is_a_cardinal_time_or_price(span: str, kind: str) -> None:
    assert metrics.span_kind(span) == kind


def test_numbers_count_against_any_rendering_and_by_kind() -> None:
    noon = ["It leaves at noon.", "It leaves at twelve."]
    result = metrics.number_accuracy(
        ["It goes at twelve.", "Ten euros for two.", "A tea, please.", "Two for two euros."],
        [noon, ["Two for ten euros."], ["A tea, please."], ["One for two euros."]],
    )
    assert result["all"] == Rate(2, 3)  # the tea has no number
    assert result["times"] == Rate(1, 1)
    assert result["prices"] == Rate(1, 2)
    assert result["numbers"] == Rate(2, 3)


def test_bleu_takes_references_of_different_counts() -> None:
    hypotheses = ["Where's the station, please?", "It costs two euros, I think."]
    references = [STATION, ["It costs two euros, I think."]]
    score = metrics.bleu(hypotheses, references)
    assert score.value == pytest.approx(100.0)
    assert "nrefs:var" in score.signature
    assert "tok:13a" in score.signature
    assert metrics.bleu(hypotheses, [STATION[:1], references[1]]).value < 100
    assert metrics.chrf(hypotheses, references).value == pytest.approx(100.0)


def test_asr_bleu_ignores_case_and_marks() -> None:
    assert metrics.asr_bleu(["where's the station please"], [STATION]).value == pytest.approx(100.0)
    assert metrics.asr_bleu(["", ""], [STATION, STATION]).value == 0.0


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("At 7:30, Tom!", "at seven thirty tom"),
        ("It's the 2nd of May.", "its the second of may"),
        ("$1,200, twenty-four or 5€", "one thousand two hundred dollars twenty four or five euros"),
        ("24 degrees", "twenty four degrees"),
        ("", ""),
    ],
)
def test_texts_are_compared_by_their_sound(text: str, written: str) -> None:
    assert metrics.normalise_for_asr(text) == written


def test_asr_bleu_hears_figures_and_words_alike() -> None:
    heard, spelt = "He was born on the 21st, in 1990.", "he was born on the twenty-first in nineteen ninety"
    assert metrics.asr_bleu([heard], [[spelt]]).value == pytest.approx(100)
    assert metrics.asr_bleu([spelt], [[heard]]).value == pytest.approx(100)


def test_systems_are_tested_against_the_first_on_the_same_sentences() -> None:
    """sacrebleu's corpus scores, intervals around them, and a small p only where they differ."""
    good = [f"The cat {number} sat on the mat {number}." for number in range(30)]
    references = [[text] for text in good]
    half = [text if number % 2 else "No." for number, text in enumerate(good)]
    scores = metrics.paired_scores({"half": half, "same": list(half), "good": good}, references)
    assert scores["good"]["bleu"]["value"] == pytest.approx(metrics.bleu(good, references).value)
    assert scores["half"]["chrf"]["value"] == pytest.approx(metrics.chrf(half, references).value)
    assert scores["half"]["bleu"]["p"] is None
    assert scores["same"]["bleu"]["p"] == scores["same"]["chrf"]["p"] == 1
    assert scores["good"]["bleu"]["p"] < 0.01
    bleu = scores["half"]["bleu"]
    assert 0 <= bleu["low"] < bleu["value"] < bleu["high"] <= 100
    assert "tok:13a" in bleu["signature"]
    assert "case:mixed" in bleu["signature"]


def test_references_of_different_counts_are_bootstrapped_too() -> None:
    scores = metrics.paired_scores(
        {"a": ["One two three four.", "Five."]}, [["One two three four."], ["Six.", "Five."]]
    )
    assert scores["a"]["chrf"]["value"] == pytest.approx(100)
    with pytest.raises(InputError, match="`references` must hold at least one text"):
        metrics.paired_scores({"a": ["x"]}, [[]])


def test_a_sentence_is_scored_against_its_nearest_reference() -> None:
    assert metrics.sentence_chrf("Where is the station?", ["Hello.", "Where is the station?"]) == pytest.approx(100)
    assert metrics.sentence_chrf("Where is the station?", ["Hello."]) < 20


def test_rates_carry_their_spread() -> None:
    assert all(0.0 <= end <= 1.0 for n in range(1, 200) for right in (0, n) for end in Rate(right, n).interval)
    rate = Rate(80, 100)
    low, high = rate.interval
    assert (round(low, 3), round(high, 3)) == (0.711, 0.867)  # Wilson, by hand
    assert rate.summary() == {"value": 0.8, "low": low, "high": high, "n": 100}
    assert math.isnan(Rate(0, 0).value)
    assert Rate(5, 5).interval[1] == pytest.approx(1.0)


def test_real_time_factor_and_percentiles_equal_values_by_hand() -> None:
    assert metrics.real_time_factor([0.1, 0.3], [2.0, 2.0]) == pytest.approx(0.1)
    assert metrics.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert metrics.percentile([0.0, 10.0], 0.9) == pytest.approx(9.0)
    with pytest.raises(InputError, match="seconds_audio"):
        metrics.real_time_factor([0.1], [0.0])


def test_misaligned_and_empty_input_is_named() -> None:
    with pytest.raises(InputError, match="as many as the hypotheses, 1"):
        metrics.exact_matches(["a"], [])
    with pytest.raises(InputError, match="at least one text"):
        metrics.bleu(["a"], [[]])
    with pytest.raises(InputError, match="must all hold words"):
        metrics.word_error_rate(["a"], ["!"])


@pytest.mark.parametrize(("package", "call"), [("sacrebleu", metrics.bleu), ("jiwer", metrics.word_error_rate)])
def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch, package: str, call: object) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert callable(call)
    with pytest.raises(InputError, match=r"pip install 'mmdec\[eval\]'"):
        call(["a"], ["a"])
