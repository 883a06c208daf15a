"""Answers about pictures, scored as the benchmarks publish it."""

from __future__ import annotations

import itertools

import pytest

from mmdec.metrics.mmmu_answers import chosen_letter, right_choice, right_open
from mmdec.metrics.vqa_accuracy import CONTRACTIONS, normalised, vqa_accuracy


@pytest.mark.parametrize(
    ("said", "normal"),
    [
        ("The Red Bus.", "red bus"),
        ("two", "2"),
        ("None", "0"),
        ("dont", "don't"),
        ("couldnt've", "couldn't've"),
        ("yes, it is", "yes it is"),
        ("black/white", "black white"),
        ("1,000 people", "1000 people"),
        ("3.50", "3.50"),
        ("U.S.A.", "usa"),
        ("t-shirt", "t shirt"),
        ("  a\nman \t here ", "man here"),
        ("what?", "what"),
        ("", ""),
    ],
)
def test_vqa_normalisation(said: str, normal: str) -> None:
    assert normalised(said) == normal


def test_contractions_are_words_that_lost_an_apostrophe() -> None:
    assert CONTRACTIONS["yall'd've"] == CONTRACTIONS["y'alld've"] == CONTRACTIONS["y'all'dve"] == "y'all'd've"
    assert CONTRACTIONS["Im"] == "I'm"
    for bare, form in CONTRACTIONS.items():
        assert len(bare) == len(form) - 1
        assert bare.replace("'", "") == form.replace("'", "")


def test_vqa_accuracy_is_the_mean_over_nine_of_ten() -> None:
    for right, other in ((0, 10), (1, 9), (2, 8), (3, 7), (4, 6), (10, 0)):
        answers = ["red"] * right + [f"x{n}" for n in range(other)]
        naive = [
            min(1.0, sum(a == "red" for a in nine) / 3) for nine in itertools.combinations(answers, 9)
        ]  # ten choices of nine
        assert vqa_accuracy("Red.", answers) == pytest.approx(sum(naive) / 10)
    assert vqa_accuracy("red", ["red"] * 3 + ["x"] * 7) == pytest.approx(0.9)
    assert vqa_accuracy("Yes.", ["yes"] * 10) == 1.0
    assert vqa_accuracy("red", []) == 0.0


def test_textvqa_drops_possessives_and_commas_first() -> None:
    answers = ["mcdonald's"] * 10
    assert vqa_accuracy("McDonald's", answers, "textvqa") == 1.0
    assert vqa_accuracy("McDonald 's,", answers, "textvqa") == 1.0
    assert vqa_accuracy("McDonald 's,", answers, "vqav2") == 0.0


OPTIONS = {"A": "a red bus", "B": "a blue house", "C": "nothing at all"}


@pytest.mark.parametrize(
    ("said", "letter"),
    [
        ("B", "B"),
        ("B.", "B"),
        ("(C)", "C"),
        ("The answer is (A).", "A"),
        ("A or B? I say B", "B"),
        ("(A) is wrong, (B) is right, not C", "B"),
        ("I see a blue house in this picture", "B"),
        ("a blue house", None),  # short, and no letter
        ("It is neither of these two things here", None),
        ("Because", None),
        ("", None),
    ],
)
def test_choices(said: str, letter: str | None) -> None:
    assert chosen_letter(said, OPTIONS) == letter


def test_a_guess_is_the_question_s_own() -> None:
    guesses = {name: [right_choice("?", OPTIONS, letter, name) for letter in OPTIONS] for name in map(str, range(60))}
    assert all(sum(row) == 1 for row in guesses.values())  # one option each
    assert {row.index(True) for row in guesses.values()} == {0, 1, 2}
    assert guesses == {name: [right_choice("?", OPTIONS, letter, name) for letter in OPTIONS] for name in guesses}


@pytest.mark.parametrize(
    ("said", "expected", "right"),
    [
        ("6", ("6",), True),
        ("The answer is 6.", ("6", "6.0"), True),
        ("So it is $1,234", ("1234",), True),
        ("x = 3.141", ("3.14",), True),
        ("It is 7.", ("6",), False),
        ("First 6. Then the result is 7", ("6",), False),
        ("It is a Fugue.", ("fugue",), True),
        ("x", ("y",), False),
        ("1e3", ("1000",), True),
        ("", ("6",), False),
    ],
)
def test_open_answers(said: str, expected: tuple[str, ...], right: bool) -> None:
    assert right_open(said, expected) is right
