"""Tests pronunciation of written text: numbers and signs as words; words by lexicon, inflection, parts or rules; odd
text."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdec.errors import InputError
from mmdec.phonetics.spelling import ABBREVIATIONS, MAX_CHARACTERS, NUMBER_WORDS, Speller, cardinal, read_figures

LISTED = """
the	dh ax
apple	ae p ax l
cat	k ae t
try	t r ay
stop	s t aa p
make	m ey k
house	hh aw s
work	w er k
they	dh ey
tom	t aa m
mister	m ih s t er
five	f ay v
dollars	d aa l er z
i	ay
a	ax
ok	ow k ey
a.	ey
b.	b iy
m.	eh m
s.	eh s
t.	t iy
u.	y uw
v.	v iy
(b)	b
(a)	ae
(a)#	ax
(e)	eh
(e)#	-
r(e)#	iy
(r)	r
#(k)n	-
(k)	k
(n)	n
"""


@pytest.fixture
def speller(tmp_path: Path) -> Speller:
    path = tmp_path / "pronunciation.tsv"
    path.write_text(LISTED.lstrip(), encoding="utf-8")
    return Speller.read(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("12", "twelve"),
        ("0", "zero"),
        ("1,234,567", "one million two hundred thirty four thousand five hundred sixty seven"),
        ("1999", "nineteen ninety nine"),
        ("1905, 2000", "nineteen oh five , two thousand"),
        ("1900", "nineteen hundred"),
        ("2005 and 2024", "two thousand five and twenty twenty four"),
        ("the 1990s", "the nineteen nineties"),
        ("007", "zero zero seven"),
        ("3.14", "three point one four"),
        ("-5°C", "minus five degrees celsius"),
        ("at 3:30", "at three thirty"),
        ("at 3:05 p.m.", "at three oh five p.m."),
        ("at 7 pm, 12:00", "at seven p.m. , twelve o'clock"),
        ("20%", "twenty percent"),
        ("$5", "five dollars"),
        ("$1", "one dollar"),
        ("$5.50", "five dollars fifty cents"),
        ("£2.01 or 3 €", "two pounds one penny or three euros"),
        ("$1.5 million", "one point five million dollars"),
        ("¥500", "five hundred yen"),
        ("the 1st, 22nd and 30th", "the first , twenty second and thirtieth"),
        ("1/2 or 3/4", "one half or three quarters"),
        ("5 km, 1 kg", "five kilometers , one kilogram"),
        ("#7 & #8", "number seven and number eight"),
        ("B2", "B two"),
        ("9" * 20, " ".join(["nine"] * 20)),
    ],
)
def test_figures_are_read_as_words(text: str, words: str) -> None:
    assert " ".join(read_figures(text).split()) == words


@given(st.integers(0, 10**15 - 1))
def test_every_cardinal_is_said_in_listed_words(number: int) -> None:
    """Its words add and multiply to the number."""
    total = part = 0
    for word in cardinal(number).split():
        assert word in NUMBER_WORDS
        if word == "hundred":
            part *= 100
        elif word in ("thousand", "million", "billion", "trillion"):
            total, part = total + part * 1000 ** (["thousand", "million", "billion", "trillion"].index(word) + 1), 0
        else:
            small = [*(cardinal(n) for n in range(20)), *(cardinal(n) for n in range(20, 100, 10))].index(word)
            part += small if small < 20 else (small - 18) * 10
    assert total + part == number


@pytest.mark.parametrize(
    ("text", "phones"),
    [
        ("The cat.", "dh ax k ae t"),
        ("The apple", "dh iy ae p ax l"),  # before a vowel
        ("Tom, the cat! Try...", "t aa m pau dh ax k ae t pau t r ay"),
        ("(Tom) - the cat", "t aa m pau dh ax k ae t"),
        ("Mr. Tom", "m ih s t er t aa m"),
        ("Tom’s", "t aa m z"),
        ("cat's", "k ae t s"),
        ("houses", "hh aw s ax z"),
        ("tries", "t r ay z"),
        ("tried", "t r ay d"),
        ("stopped", "s t aa p t"),
        ("making", "m ey k ih ng"),
        ("They've", "dh ey v"),
        ("Tom'll", "t aa m ax l"),
        ("worked", "w er k t"),
        ("workhouse", "w er k hh aw s"),
        ("$5", "f ay v d aa l er z"),
        ("TV", "t iy v iy"),
        ("OK", "ow k ey"),
        ("U.S.", "y uw eh s"),
        ("A. B. Tom", "ey b iy t aa m"),
        ("knera", "n eh r ax"),  # by rules: no k, a at the end of a word
        ("Bare", "b ae r iy"),  # the longest rule wins
        ("kàt", "k ae"),  # no rule for t
    ],
)
def test_words_are_pronounced(speller: Speller, text: str, phones: str) -> None:
    assert " ".join(speller.phones(text)) == phones


@pytest.mark.parametrize("text", ["", " ", "?!", "😀", "你好", "Привет", "\x00\x01", "'''", "-", "_", "…", "٣"])
def test_characters_without_an_english_sound_are_left_out(speller: Speller, text: str) -> None:
    assert speller.phones(text) == []
    assert speller.phones(f"{text} Tom {text}") == ["t", "aa", "m"]


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=80) | st.text("aeknrt'.,$%:/-#°0123456789 \n", max_size=80))
def test_any_text_gives_phones_without_pauses_at_the_ends(text: str) -> None:
    lexicon = {line.split("\t")[0]: tuple(line.split("\t")[1].split()) for line in LISTED.strip().splitlines()}
    speller = Speller(
        {word: pronunciation for word, pronunciation in lexicon.items() if "(" not in word}, {"(a)": ("ae",)}
    )
    phones = speller.phones(text)
    assert "pau" not in phones[:1] + phones[-1:]
    assert ("pau", "pau") not in itertools.pairwise(phones)
    assert phones == speller.phones(text)


def test_a_long_text_is_read_to_its_limit(speller: Speller) -> None:
    assert len(speller.phones("cat " * MAX_CHARACTERS)) == 3 * MAX_CHARACTERS // 4
    assert len(speller.phones("a" * 10**6)) == MAX_CHARACTERS
    speller.phones("a'" * MAX_CHARACTERS)


def test_a_file_that_is_no_lexicon_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`path` must be a lexicon"):
        Speller.read(tmp_path / "none.tsv")


def test_abbreviations_stand_for_words() -> None:
    assert all(word.isalpha() for word in ABBREVIATIONS.values())
