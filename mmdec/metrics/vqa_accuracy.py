"""VQA accuracy: how far an answer agrees with those of ten people, as VQAv2 and TextVQA are scored.

An answer that three of nine people gave is right, fewer count in part; the mean is over the ten ways to leave one of
them out (Antol et al. 2015; visualqa.org/evaluation). Both sides are normalised first. TextVQA's evaluation (Singh et
al. 2019) drops commas, question marks and possessives before that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

Kind = Literal["vqav2", "textvqa"]
MARKS = ';/[]"{}()=+\\_-><@`,?!'
ARTICLES = {"a", "an", "the"}
NUMBERS = {"none": "0", "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5"}
NUMBERS |= {"six": "6", "seven": "7", "eight": "8", "nine": "9", "ten": "10"}
FORMS = """
    ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've
    he's how'd how'll how's I'd've I'm I've isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't
    must've needn't not've o'clock oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've
    somebody'll somebody's someone'd someone'd've someone'll someone's something'd something'd've something'll that's
    there'd there'd've there're there's they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't
    what'll what're what's what've when's where'd where's where've who'd who'd've who'll who's who've why'll why're
    why's won't would've wouldn't wouldn't've y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""
CONTRACTIONS = {  # written without one of their apostrophes
    form[:index] + form[index + 1 :]: form for form in FORMS.split() for index in range(len(form)) if form[index] == "'"
}
_COMMA = re.compile(r"\d,\d")
_STOP = re.compile(r"\.(?!\d)")
REMOVED = 32  # full stops at most: the published code passes a flag where a count belongs


def vqa_accuracy(answer: str, answers: Sequence[str], kind: Kind = "vqav2") -> float:
    """From 0 to 1. answers: of the people, ten as published; where all ten agree they are normalised, too, which
    VQAv2's own script leaves out, as if "Yes." were another answer than "yes"."""
    prepare = _words if kind == "textvqa" else str
    answer, references = normalised(prepare(answer)), [normalised(prepare(reference)) for reference in answers]
    scores = [
        min(1.0, sum(other == answer for index, other in enumerate(references) if index != left_out) / 3)
        for left_out in range(len(references))
    ]
    return sum(scores) / len(scores) if scores else 0.0


def normalised(text: str) -> str:
    """No marks, no articles, digits for numbers up to ten, apostrophes where they belong."""
    return articles_dropped(without_marks(" ".join(text.split())))


def without_marks(text: str) -> str:
    """Marks beside a space vanish, those between words become spaces; full stops go but within numbers."""
    original = text
    numbers = _COMMA.search(original) is not None
    for mark in MARKS:
        beside = f"{mark} " in original or f" {mark}" in original
        text = text.replace(mark, "" if beside or numbers else " ")
    return _STOP.sub("", text, count=REMOVED)


def articles_dropped(text: str) -> str:
    """Lower case; numbers in digits; no articles; "dont" is "don't"."""
    words = [NUMBERS.get(word, word) for word in text.lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def _words(text: str) -> str:
    text = text.lower().replace(",", "").replace("?", "").replace("'s", " 's")
    return " ".join(text.split())
