"""Converts English text to phones for speech synthesis.

Numbers become words, words get phones from a pronunciation lexicon, and unknown words from letter-to-sound rules.
Numbers include years, ordinals, clock times, prices, percentages and units. No text raises an error: characters without
an English sound (emoji, other scripts) are left out.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

from mmdec.phonetics.lexicon import PAUSE_PHONE, read_lexicon, spoken_slice

_UNDER_TWENTY = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_SMALL = _UNDER_TWENTY.split()
_TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
_POWERS = ("", "thousand", "million", "billion", "trillion")
_ORDINALS = {"one": "first", "two": "second", "three": "third", "five": "fifth", "eight": "eighth", "nine": "ninth"}
_ORDINALS |= {"twelve": "twelfth"}
_MONEY = {"$": ("dollar", "cent"), "£": ("pound", "penny"), "€": ("euro", "cent"), "¥": ("yen", "sen")}
_HALVES = {"a": "a.m.", "p": "p.m."}
_O_CLOCK = "o'clock"
_UNITS = {"km": "kilometers", "m": "meters", "cm": "centimeters", "mm": "millimeters", "kg": "kilograms"}
_UNITS |= {"g": "grams", "mg": "milligrams", "l": "liters", "ml": "milliliters", "h": "hours", "min": "minutes"}
_UNITS |= {"lb": "pounds", "lbs": "pounds", "ft": "feet", "mph": "miles per hour", "km/h": "kilometers per hour"}
_SIGNS = {"%": "percent", "&": "and", "+": "plus", "=": "equals", "@": "at", "°C": "degrees celsius"}
_SIGNS |= {"°F": "degrees fahrenheit", "°": "degrees"}

_OTHERS = (
    "hundred dollars cents pounds pence penny euros yen sen point minus half halves quarter quarters thirds number oh"
)
# All words that can replace numbers and signs. The lexicon should have each of them; letter-to-sound rules pronounce a
# missing word.
NUMBER_WORDS = frozenset(
    " ".join(
        [*_SMALL, *_TENS, *_POWERS, *_ORDINALS.values(), *_UNITS.values(), *_SIGNS.values(), _OTHERS, _O_CLOCK]
    ).split()
)

_NUMBER = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+"
_RULES = re.compile(
    rf"""(?P<money>[$£€¥])\s?(?P<amount>{_NUMBER})(?:\.(?P<cents>[0-9]+))?(?P<scale>\s(?:thousand|[mbtr]+illion)\b)?
    | (?P<paid>{_NUMBER})\s?(?P<currency>[£€¥])
    | (?<![0-9:])(?P<hour>[01]?[0-9]|2[0-4]):(?P<minute>[0-5][0-9])(?![0-9:])(?:\s?(?P<half>[ap]\.?m\b)\.?)?
    | (?P<rank>{_NUMBER})(?:st|nd|rd|th)\b
    | (?P<plural>{_NUMBER})'?s\b
    | (?<![0-9/])(?P<over>[0-9]{{1,2}})[/\u2044](?P<under>[2-9]|10)(?![0-9/])
    | (?P<minus>(?<![\w)])[-\u2212])?(?P<whole>{_NUMBER})(?:\.(?P<part>[0-9]+))?
      (?:\s?(?P<noon>[ap]\.?m\b)\.?|\s?(?P<unit>{"|".join(sorted(_UNITS, key=len, reverse=True))})\b)?
    | (?P<hash>\#)(?=[0-9])
    | (?P<sign>°[CF]\b|[%&+=@°])""",
    re.VERBOSE,
)


def cardinal(number: int) -> str:
    """Return a number of at most 15 digits in words: 1234 -> "one thousand two hundred thirty four"."""
    parts = []
    for name in _POWERS:
        number, rest = divmod(number, 1000)
        if rest:
            parts.append(f"{_below_thousand(rest)} {name}".strip())
    return " ".join(reversed(parts)) or _SMALL[0]


def read_figures(text: str) -> str:
    """Replace the figures and signs of a text by words: "At 3:30, $5" -> "At three thirty, five dollars"."""
    return _RULES.sub(lambda match: f" {_words(match)} ", text)


def _below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    head = f"{_SMALL[hundreds]} hundred " if hundreds else ""
    if rest < 20:
        return (head + (_SMALL[rest] if rest else "")).strip()
    ten, unit = divmod(rest, 10)
    return head + _TENS[ten - 2] + (f" {_SMALL[unit]}" if unit else "")


def _number(digits: str) -> str:
    """Write a number in words.

    A possible year (1987) is read in pairs of digits; a code such as 0042, or a number of more than 15 digits, digit by
    digit.
    """
    plain = digits.replace(",", "")
    if len(plain) > 15 or (len(plain) > 1 and plain[0] == "0"):
        return " ".join(_SMALL[int(digit)] for digit in plain)
    value = int(plain)
    if len(digits) == 4 and (1100 <= value <= 1999 or 2010 <= value <= 2099) and value % 1000:
        century, rest = divmod(value, 100)
        if rest == 0:
            return f"{_below_thousand(century)} hundred"
        return f"{_below_thousand(century)} {f'oh {_SMALL[rest]}' if rest < 10 else _below_thousand(rest)}"
    return cardinal(value)


def _ordinal(words: str) -> str:
    head, _, last = words.rpartition(" ")
    ranked = _ORDINALS.get(last) or (f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th")
    return f"{head} {ranked}".strip()


def _plural_noun(words: str) -> str:
    if words.endswith("y"):
        return f"{words[:-1]}ies"
    return f"{words}es" if words.endswith("x") else f"{words}s"


def _money(sign: str, amount: str, cents: str, scale: str) -> str:
    unit, small = _MONEY[sign]
    if scale or (cents and len(cents) != 2):  # in "$1.5 million", ".5" does not mean cents
        return f"{_decimal(amount, cents)}{scale} {_plural_noun(unit) if sign != '¥' else unit}"
    whole = f"{_number(amount)} {unit if amount == '1' or sign == '¥' else _plural_noun(unit)}"
    if not cents or cents == "00":
        return whole
    few = "pence" if small == "penny" else _plural_noun(small)
    return f"{whole} {cardinal(int(cents))} {small if cents == '01' else few}"


def _decimal(whole: str, part: str) -> str:
    return _number(whole) + (" point " + " ".join(_SMALL[int(digit)] for digit in part[:15]) if part else "")


def _words(match: re.Match[str]) -> str:
    """Spell a match of the pattern out: an amount of money, a time, a rank, a fraction, a measure or a sign."""
    groups = match.groupdict(default="")
    if groups["money"]:
        return _money(groups["money"], groups["amount"], groups["cents"], groups["scale"])
    if groups["currency"]:
        return _money(groups["currency"], groups["paid"], "", "")
    if groups["hour"]:
        hour, minute, half = int(groups["hour"]), int(groups["minute"]), _HALVES.get(groups["half"][:1], "")
        if minute == 0:
            return f"{cardinal(hour)} {half or (_O_CLOCK if 0 < hour < 13 else '')}"
        return f"{cardinal(hour)} {'oh ' if minute < 10 else ''}{cardinal(minute)} {half}"
    if groups["rank"]:
        return _ordinal(
            cardinal(int(groups["rank"].replace(",", ""))) if len(groups["rank"]) < 16 else _number(groups["rank"])
        )
    if groups["plural"]:
        return _plural_noun(_number(groups["plural"]))
    if groups["over"]:
        over, under = int(groups["over"]), int(groups["under"])
        name = {2: "half", 4: "quarter"}.get(under) or _ordinal(cardinal(under))
        return f"{cardinal(over)} {name if over == 1 else 'halves' if under == 2 else name + 's'}"
    if groups["whole"]:
        unit = _UNITS.get(groups["unit"]) or _HALVES.get(groups["noon"][:1], "")
        if groups["whole"] == "1" and groups["unit"] and not groups["part"]:
            unit = "foot" if unit == "feet" else unit.replace("miles", "mile").replace("meters", "meter").rstrip("s")
        return f"{'minus ' if groups['minus'] else ''}{_decimal(groups['whole'], groups['part'])} {unit}"
    return "number" if groups["hash"] else _SIGNS[groups["sign"]]


Phones = tuple[str, ...]
MAX_CHARACTERS = 2000  # maximum characters of a text; the rest of a longer text is ignored
CLAUSE_TOKEN = ","  # the token that marks the end of a clause
SILENT_LETTER = "-"  # in a rule: the letter has no sound
WORD_EDGE = "#"  # in the context of a rule: the beginning or the end of the word
MAX_CONTEXT_LETTERS = 4  # maximum number of letters in a rule's context on each side of the letter
# sizes of the contexts that rules may have: (letters on the left, letters on the right), the smallest first
CONTEXT_SIZES = ((0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4), (4, 4))

_VOWELS = frozenset(["aa", "ae", "ah", "ao", "aw", "ax", "ay", "eh", "er", "ey", "ih", "iy", "ow", "oy", "uh", "uw"])
_HISSING, _VOICELESS = (
    frozenset(["s", "z", "sh", "zh", "ch", "jh"]),
    frozenset(["p", "t", "k", "f", "th", "s", "sh", "ch"]),
)
_CLITICS = {"ll": ("ax", "l"), "ve": ("ax", "v"), "d": ("ax", "d"), "re": ("ax", "r"), "m": ("m",), "t": ("t",)}
ABBREVIATIONS = {"mr": "mister", "mrs": "missus", "ms": "miz", "dr": "doctor", "prof": "professor", "st": "saint"}
ABBREVIATIONS |= {"jr": "junior", "sr": "senior", "vs": "versus", "mt": "mount"}
_SAME = str.maketrans({"’": "'", "‘": "'", "ʼ": "'", "`": "'", "ß": "ss", "æ": "ae", "œ": "oe", "ø": "o", "ł": "l"})
_NAME = "\x01"  # follows a letter that is pronounced by its name, as in "TV"
_SHORT = re.compile(rf"\b({'|'.join(ABBREVIATIONS)})\.(?=\s)|\b(?-i:No)\.(?=\s?[0-9])", re.IGNORECASE)
_INITIALS = re.compile(r"\b(?:[a-zA-Z]\.){2,}|\b[A-Z]\.(?=\s[A-Z])")
_TOKEN = re.compile(rf"[a-zA-Z]{_NAME}|[a-zA-Z]+(?:'[a-zA-Z]+){{0,2}}'?|[,;:.?!()\u2013\u2014\u2026\n]|\s-+\s|--+")
# as endings of longer words these are pronounced differently from the words "able", "less" and "ward"
_ENDINGS = ("able", "less", "ward")
_VOWEL_LETTERS = frozenset("aeiouy")
_LETTERS = re.compile(r"[a-z]+")


class Speller:
    """Converts English text to phones by a lexicon and letter-to-sound rules; `read` loads both from a file.

    Args:
        lexicon: Word in lower case, or a letter with a full stop ("b." for its name) -> phones.
        rules: "left(letter)right" -> the phones of this letter between these neighbouring letters.
    """

    def __init__(self, lexicon: Mapping[str, Phones], rules: Mapping[str, Phones]) -> None:
        self.lexicon, self.rules = lexicon, rules

    @classmethod
    def read(cls, path: Path) -> Speller:
        """Load a speller from a file.

        Its lines are "word<tab>phones" (the lexicon) and "left(letter)right<tab>phones" (the rules).

        Raises:
            InputError: For a file that cannot be read.
        """
        entries = {word: variants[0] for word, variants in read_lexicon(path).items()}
        rules = {word for word in entries if "(" in word}
        lexicon = {word: phones for word, phones in entries.items() if word not in rules}
        return cls(lexicon, {word: tuple(p for p in entries[word] if p != SILENT_LETTER) for word in rules})

    def phones(self, text: str) -> list[str]:
        """Convert a text to phones, named as in flite.

        "pau" stands between clauses and sentences, but not at both ends.
        """
        words = [
            (PAUSE_PHONE,) if token == CLAUSE_TOKEN else self.word(token)
            for token in self._tokens(text[:MAX_CHARACTERS])
        ]
        phones: list[str] = []
        for word, following in pairwise([*words, (PAUSE_PHONE,)]):
            vowel = word == ("dh", "ax") and following and following[0] in _VOWELS
            phones += ("dh", "iy") if vowel else word
        squeezed = [phone for last, phone in pairwise([PAUSE_PHONE, *phones]) if not phone == last == PAUSE_PHONE]
        return squeezed[spoken_slice(squeezed)]

    def _tokens(self, text: str) -> Iterator[str]:
        """Split a text into words in lower case, names of letters ("b."), and `CLAUSE_TOKEN` where a clause ends."""
        text = unicodedata.normalize("NFKD", text.translate(_SAME))
        text = "".join(sign for sign in text if not unicodedata.combining(sign))
        text = _SHORT.sub(lambda match: ABBREVIATIONS.get((match[1] or "").lower(), "number"), text)
        text = _INITIALS.sub(lambda match: match[0].replace(".", f"{_NAME} "), read_figures(text))
        shouted = text.upper() == text
        for match in _TOKEN.finditer(text):
            token = match[0]
            word = token.lower()
            if not token[0].isalpha():
                yield CLAUSE_TOKEN
            elif (len(word) == 1 and word not in "ai") or token.endswith(_NAME):
                yield f"{word[0]}."
            elif token == "US" or (token.isupper() and 1 < len(word) < 5 and word not in self.lexicon and not shouted):
                yield from (f"{letter}." for letter in word)
            else:
                yield word

    def word(self, word: str) -> Phones:
        """Return the phones of one word in lower case, or of a letter's name ("b.").

        They come from the lexicon; else from the lexicon's entries for the word's stem or parts; else from the
        letter-to-sound rules.
        """
        phones = self.lexicon.get(word)
        if phones is None:
            phones = self._inflection(word) or self._compound(word) or self.by_rules(word)
        return phones

    def by_rules(self, word: str) -> Phones:
        """Return the phones of a word by letter-to-sound rules.

        For each letter, the rule with the largest matching context decides.
        """
        letters = "".join(_LETTERS.findall(word))
        if not _VOWEL_LETTERS & set(letters):  # no vowel, as in TV or FBI: read the letters' names
            return tuple(phone for letter in letters for phone in self.lexicon.get(f"{letter}.", ()))
        padded = WORD_EDGE * MAX_CONTEXT_LETTERS + letters + WORD_EDGE * MAX_CONTEXT_LETTERS
        phones: list[str] = []
        for position in range(MAX_CONTEXT_LETTERS, MAX_CONTEXT_LETTERS + len(letters)):
            rule = next((r for r in map(self.rules.get, reversed(contexts(padded, position))) if r is not None), ())
            phones += rule
        return tuple(phones)

    def _inflection(self, word: str) -> Phones | None:
        """Return the phones of an inflected word from its stem in the lexicon; None for other words.

        An inflection is a possessive, contraction, plural, past or -ing form.
        """
        stem, apostrophe, ending = word.rpartition("'")
        if apostrophe:
            phones = self.word(stem) if stem else ()
            added = _plural(phones) if ending == "s" else _CLITICS.get(ending) or (self.word(ending) if ending else ())
            # as in "they've": the ending's vowel "ax" is left out after a vowel
            spare = added[:1] == ("ax",) and phones and phones[-1] in _VOWELS
            return phones + (added[1:] if spare else added)
        for ending, add in (("s", _plural), ("ed", _past), ("ing", _going)):
            for stem in _stems(word, ending):
                phones = self.lexicon.get(stem)
                if phones:
                    return (*phones, *add(phones))
        return None

    def _compound(self, word: str) -> Phones | None:
        """Return the phones of a compound such as doghouse from its two parts in the lexicon; None for other words."""
        for split in range(len(word) - 4, 3, -1):
            first, second = self.lexicon.get(word[:split]), self.lexicon.get(word[split:])
            if first and second and word[split:] not in _ENDINGS:
                return first + second
        return None


def contexts(padded: str, place: int) -> list[str]:
    """Return the keys "left(letter)right" of all rules that can apply to one letter; the smallest context comes first.

    Args:
        padded: The word, with `WORD_EDGE` signs at both ends.
        place: Index of the letter in it.
    """
    letter, after = padded[place], place + 1
    return [f"{padded[place - left : place]}({letter}){padded[after : after + right]}" for left, right in CONTEXT_SIZES]


def _plural(phones: Phones) -> Phones:
    if phones and phones[-1] in _HISSING:
        return ("ax", "z")
    return ("s",) if phones and phones[-1] in _VOICELESS else ("z",)


def _past(phones: Phones) -> Phones:
    if phones[-1] in ("t", "d"):
        return ("ax", "d")
    return ("t",) if phones[-1] in _VOICELESS else ("d",)


def _going(phones: Phones) -> Phones:
    return ("ih", "ng")


def _stems(word: str, ending: str) -> list[str]:
    """Return possible stems of an inflected word: "tries" -> try; "stopped" -> stop; "making" -> make.

    Args:
        ending: "s", "ed" or "ing".
    """
    if not word.endswith(ending) or len(word) < len(ending) + 2:
        return []
    rest = word[: -len(ending)]
    stems = [rest]
    if ending == "s":
        if rest.endswith("ie"):
            stems.append(f"{rest[:-2]}y")
        if rest.endswith("e"):
            stems.append(rest[:-1])
        return stems
    if rest[-1] == rest[-2]:
        stems.append(rest[:-1])
    if rest.endswith("i") and ending == "ed":
        stems.append(f"{rest[:-1]}y")
    return [*stems, f"{rest}e"]
