"""What an answer to MMMU's questions names: the option's letter, or numbers and phrases; and whether it is right.

After the published evaluation (Yue et al. 2024, MMMU's `eval`). An answer in which no option is found counts as a
guess: published code draws one at random, here the question's own id draws it, so that a score does not change from run
to run.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

ENDS = ",.!?;:'"
KEYS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
LONG = 5  # words: a longer answer may quote an option instead of naming its letter
_NUMBERS = (
    re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b"),
    re.compile(r"-?\d+(?:\.\d+)?[eE][+-]?\d+"),
    re.compile(r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])"),
)
_SENTENCE = re.compile(r"\.\s(?=[A-Z])|\n")


def chosen_letter(answer: str, options: Mapping[str, str]) -> str | None:
    """The option that an answer chooses; None where it names none. options: letter -> text.

    "(B)" counts before a bare " B ", that before a quoted option; of several the last one counts.
    """
    for mark in ENDS:
        answer = answer.strip(mark)
    answer = f" {answer} "
    for pattern in ("({})", " {} "):
        named = {letter: answer.rfind(pattern.format(letter)) for letter in options}
        if max(named.values(), default=-1) >= 0:
            return max(named, key=lambda letter: named[letter])
    if len(answer.split()) > LONG:
        quoted = {letter: answer.lower().rfind(text.lower()) for letter, text in options.items() if text}
        if max(quoted.values(), default=-1) >= 0:
            return max(quoted, key=lambda letter: quoted[letter])
    return None


def right_choice(answer: str, options: Mapping[str, str], letter: str, name: str) -> bool:
    """Whether the answer chooses `letter`. name: the question's id, which draws a guess where it chooses nothing."""
    chosen = chosen_letter(answer, options)
    return (random.Random(name).choice(sorted(options)) if chosen is None else chosen) == letter


def right_open(answer: str, expected: Sequence[str]) -> bool:
    """Whether one of the numbers or phrases that an open answer ends in is among the expected ones."""
    expected_values = [value for reference in expected for value in _values(reference)]
    for value in _claims(answer):
        if isinstance(value, float):
            if value in expected_values:
                return True
        elif isinstance(value, str) and any(isinstance(phrase, str) and phrase in value for phrase in expected_values):
            return True
    return False


def _claims(answer: str) -> list[float | str]:
    """What an open answer may mean: the shortest end after a key word of each sentence, and its numbers."""
    sentences = _SENTENCE.split(answer.strip().strip(".").lower())
    ends = []
    for index, sentence in enumerate(sentences):
        keys = (*KEYS, "=") if index == len(sentences) - 1 else KEYS
        after = [sentence.split(key)[-1].strip() for key in keys if key in sentence]
        shortest = min(after, key=len, default="")
        if shortest and shortest not in ENDS:
            ends.append(shortest)
    claims: list[float | str] = []
    for end in ends or [answer.strip().strip(".").lower()]:
        for text in (end, *(number for pattern in _NUMBERS for number in pattern.findall(end))):
            claims += _values(text)
    return claims


def _values(text: str) -> list[float | str]:
    """A number to two digits; any other text in lower case, a single letter beside a space."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        text = text.lower()
        return [f" {text}", f"{text} "] if len(text) == 1 else [text]
