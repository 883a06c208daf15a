"""Converts English text to the phones of a voice: figures to words, words by a lexicon, other words by letter rules.

No text raises an error: characters without an English sound (emoji, other scripts) are left out.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from mmdec.phonetics.figures import read_figures
from mmdec.phonetics.lexicon import PAUSE, read_lexicon, spoken

Phones = tuple[str, ...]
MAX_CHARACTERS = 2000  # maximum characters of a text; the rest is ignored
CLAUSE = ","  # the token at the end of a clause
SILENT = "-"  # in a rule: the letter has no sound
EDGE = "#"  # in a rule's context: the beginning or end of the word
REACH = 4  # maximum letters of a rule's context on each side
CONTEXTS = ((0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4), (4, 4))  # letters left and right, growing

_VOWELS = frozenset(["aa", "ae", "ah", "ao", "aw", "ax", "ay", "eh", "er", "ey", "ih", "iy", "ow", "oy", "uh", "uw"])
_HISSING, _VOICELESS = (
    frozenset(["s", "z", "sh", "zh", "ch", "jh"]),
    frozenset(["p", "t", "k", "f", "th", "s", "sh", "ch"]),
)
_CLITICS = {"ll": ("ax", "l"), "ve": ("ax", "v"), "d": ("ax", "d"), "re": ("ax", "r"), "m": ("m",), "t": ("t",)}
ABBREVIATIONS = {"mr": "mister", "mrs": "missus", "ms": "miz", "dr": "doctor", "prof": "professor", "st": "saint"}
ABBREVIATIONS |= {"jr": "junior", "sr": "senior", "vs": "versus", "mt": "mount"}
_SAME = str.maketrans({"’": "'", "‘": "'", "ʼ": "'", "`": "'", "ß": "ss", "æ": "ae", "œ": "oe", "ø": "o", "ł": "l"})
_NAME = "\x01"  # this sign after a letter means: read the letter's name
_SHORT = re.compile(rf"\b({'|'.join(ABBREVIATIONS)})\.(?=\s)|\b(?-i:No)\.(?=\s?[0-9])", re.IGNORECASE)
_INITIALS = re.compile(r"\b(?:[a-zA-Z]\.){2,}|\b[A-Z]\.(?=\s[A-Z])")
_TOKEN = re.compile(rf"[a-zA-Z]{_NAME}|[a-zA-Z]+(?:'[a-zA-Z]+){{0,2}}'?|[,;:.?!()\u2013\u2014\u2026\n]|\s-+\s|--+")
_ENDINGS = ("able", "less", "ward")  # endings that are pronounced differently from the words of the same spelling
_VOWEL_LETTERS = frozenset("aeiouy")
_LETTERS = re.compile(r"[a-z]+")


class Speller:
    """Converts English text to phones. `read` loads one from a file."""

    def __init__(self, lexicon: Mapping[str, Phones], rules: Mapping[str, Phones]) -> None:
        """lexicon: word in lower case, or letter's name ("b.") -> phones. rules: "left(letter)right" -> the phones of
        the letter between these neighbours."""
        self.lexicon, self.rules = lexicon, rules

    @classmethod
    def read(cls, path: Path) -> Speller:
        """Read lines of word, tab, phones, and of "left(letter)right", tab, phones. Raises InputError for a file that
        cannot be read."""
        entries = {word: variants[0] for word, variants in read_lexicon(path).items()}
        rules = {word for word in entries if "(" in word}
        lexicon = {word: said for word, said in entries.items() if word not in rules}
        return cls(lexicon, {word: tuple(p for p in entries[word] if p != SILENT) for word in rules})

    def phones(self, text: str) -> list[str]:
        """Return the phones of `text` by flite's names, with "pau" between clauses and sentences, but not at the
        ends."""
        said = [(PAUSE,) if token == CLAUSE else self.word(token) for token in self._tokens(text[:MAX_CHARACTERS])]
        phones: list[str] = []
        for word, following in pairwise([*said, (PAUSE,)]):
            vowel = word == ("dh", "ax") and following and following[0] in _VOWELS
            phones += ("dh", "iy") if vowel else word
        kept = [phone for last, phone in pairwise([PAUSE, *phones]) if not phone == last == PAUSE]
        return kept[spoken(kept)]

    def _tokens(self, text: str) -> Iterator[str]:
        """Words in lower case, names of letters ("b."), and `CLAUSE` where a clause ends."""
        text = unicodedata.normalize("NFKD", text.translate(_SAME))
        text = "".join(sign for sign in text if not unicodedata.combining(sign))
        text = _SHORT.sub(lambda found: ABBREVIATIONS.get((found[1] or "").lower(), "number"), text)
        text = _INITIALS.sub(lambda found: found[0].replace(".", f"{_NAME} "), read_figures(text))
        shouted = text.upper() == text
        for found in _TOKEN.finditer(text):
            token = found[0]
            word = token.lower()
            if not token[0].isalpha():
                yield CLAUSE
            elif (len(word) == 1 and word not in "ai") or token.endswith(_NAME):
                yield f"{word[0]}."
            elif token == "US" or (token.isupper() and 1 < len(word) < 5 and word not in self.lexicon and not shouted):
                yield from (f"{letter}." for letter in word)
            else:
                yield word

    def word(self, word: str) -> Phones:
        """The phones of one word in lower case, or of a letter's name ("b."): from the lexicon, else from its parts,
        else by rules."""
        listed = self.lexicon.get(word)
        if listed is None:
            listed = self._inflected(word) or self._compound(word) or self.by_rules(word)
        return listed

    def by_rules(self, word: str) -> Phones:
        """The phones of a word from its letters alone. For each letter, the rule with the largest context is used."""
        letters = "".join(_LETTERS.findall(word))
        if not _VOWEL_LETTERS & set(letters):  # TV, FBI
            return tuple(phone for letter in letters for phone in self.lexicon.get(f"{letter}.", ()))
        padded = EDGE * REACH + letters + EDGE * REACH
        phones: list[str] = []
        for place in range(REACH, REACH + len(letters)):
            rule = next((r for r in map(self.rules.get, reversed(contexts(padded, place))) if r is not None), ())
            phones += rule
        return tuple(phones)

    def _inflected(self, word: str) -> Phones | None:
        """The phones of a possessive, contraction, plural, past or -ing form of a word in the lexicon; None for other
        words."""
        stem, apostrophe, ending = word.rpartition("'")
        if apostrophe:
            said = self.word(stem) if stem else ()
            added = _plural(said) if ending == "s" else _CLITICS.get(ending) or (self.word(ending) if ending else ())
            spare = added[:1] == ("ax",) and said and said[-1] in _VOWELS  # they've
            return said + (added[1:] if spare else added)
        for ending, add in (("s", _plural), ("ed", _past), ("ing", _going)):
            for stem in _stems(word, ending):
                said = self.lexicon.get(stem)
                if said:
                    return (*said, *add(said))
        return None

    def _compound(self, word: str) -> Phones | None:
        """The phones of two words in the lexicon written as one (doghouse); None for other words."""
        for place in range(len(word) - 4, 3, -1):
            first, second = self.lexicon.get(word[:place]), self.lexicon.get(word[place:])
            if first and second and word[place:] not in _ENDINGS:
                return first + second
        return None


def contexts(padded: str, place: int) -> list[str]:
    """The rules "left(letter)right" for the letter at `place` of a word with `EDGE` signs at both ends; the smallest
    context comes first."""
    letter, after = padded[place], place + 1
    return [f"{padded[place - left : place]}({letter}){padded[after : after + right]}" for left, right in CONTEXTS]


def _plural(said: Phones) -> Phones:
    return ("ax", "z") if said and said[-1] in _HISSING else ("s",) if said and said[-1] in _VOICELESS else ("z",)


def _past(said: Phones) -> Phones:
    return ("ax", "d") if said[-1] in ("t", "d") else ("t",) if said[-1] in _VOICELESS else ("d",)


def _going(said: Phones) -> Phones:
    return ("ih", "ng")


def _stems(word: str, ending: str) -> list[str]:
    """The words whose plural, past or -ing form a word may be: "tries" -> try; "stopped" -> stop; "making" -> make."""
    if not word.endswith(ending) or len(word) < len(ending) + 2:
        return []
    rest = word[: -len(ending)]
    stems = [rest]
    if ending == "s":
        return [rest, *([f"{rest[:-2]}y"] if rest.endswith("ie") else []), *([rest[:-1]] if rest.endswith("e") else [])]
    if rest[-1] == rest[-2]:
        stems.append(rest[:-1])
    if rest.endswith("i") and ending == "ed":
        stems.append(f"{rest[:-1]}y")
    return [*stems, f"{rest}e"]
