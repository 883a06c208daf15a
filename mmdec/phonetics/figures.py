"""Figures and signs of English text as words: numbers, years, ordinals, clock times, prices, percentages, units."""

from __future__ import annotations

import re

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
# All words that figures and signs are replaced by: a lexicon should have them.
WORDS = frozenset(
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
    """A number of at most 15 digits in words: 1234 -> "one thousand two hundred thirty four"."""
    parts = []
    for name in _POWERS:
        number, rest = divmod(number, 1000)
        if rest:
            parts.append(f"{_below_thousand(rest)} {name}".strip())
    return " ".join(reversed(parts)) or _SMALL[0]


def read_figures(text: str) -> str:
    """Replace the figures and signs of a text by words: "At 3:30, $5" -> "At three thirty, five dollars"."""
    return _RULES.sub(lambda found: f" {_words(found)} ", text)


def _below_thousand(number: int) -> str:
    hundreds, rest = divmod(number, 100)
    head = f"{_SMALL[hundreds]} hundred " if hundreds else ""
    if rest < 20:
        return (head + (_SMALL[rest] if rest else "")).strip()
    ten, unit = divmod(rest, 10)
    return head + _TENS[ten - 2] + (f" {_SMALL[unit]}" if unit else "")


def _number(digits: str) -> str:
    """Digits as they are spoken: a year of four digits in pairs, a code (0042, or very long) one by one."""
    plain = digits.replace(",", "")
    if len(plain) > 15 or (len(plain) > 1 and plain[0] == "0"):
        return " ".join(_SMALL[int(digit)] for digit in plain)
    value = int(plain)
    if len(digits) == 4 and (1100 <= value <= 1999 or 2010 <= value <= 2099) and value % 1000:
        century, rest = divmod(value, 100)
        after = f"oh {_SMALL[rest]}" if 0 < rest < 10 else _below_thousand(rest) if rest else "hundred"
        return f"{_below_thousand(century)} {after}"
    return cardinal(value)


def _ordinal(words: str) -> str:
    head, _, last = words.rpartition(" ")
    ranked = _ORDINALS.get(last) or (f"{last[:-1]}ieth" if last.endswith("y") else f"{last}th")
    return f"{head} {ranked}".strip()


def _plural(words: str) -> str:
    return f"{words[:-1]}ies" if words.endswith("y") else f"{words}es" if words.endswith("x") else f"{words}s"


def _money(sign: str, amount: str, cents: str, scale: str) -> str:
    unit, small = _MONEY[sign]
    if scale or (cents and len(cents) != 2):  # $1.5 million
        return f"{_decimal(amount, cents)}{scale} {_plural(unit) if sign != '¥' else unit}"
    whole = f"{_number(amount)} {unit if amount == '1' or sign == '¥' else _plural(unit)}"
    if not cents or cents == "00":
        return whole
    few = "pence" if small == "penny" else _plural(small)
    return f"{whole} {cardinal(int(cents))} {small if cents == '01' else few}"


def _decimal(whole: str, part: str) -> str:
    return _number(whole) + (" point " + " ".join(_SMALL[int(digit)] for digit in part[:15]) if part else "")


def _words(found: re.Match[str]) -> str:
    got = found.groupdict(default="")
    if got["money"]:
        return _money(got["money"], got["amount"], got["cents"], got["scale"])
    if got["currency"]:
        return _money(got["currency"], got["paid"], "", "")
    if got["hour"]:
        hour, minute, half = int(got["hour"]), int(got["minute"]), _HALVES.get(got["half"][:1], "")
        if minute == 0:
            return f"{cardinal(hour)} {half or (_O_CLOCK if 0 < hour < 13 else '')}"
        return f"{cardinal(hour)} {'oh ' if minute < 10 else ''}{cardinal(minute)} {half}"
    if got["rank"]:
        return _ordinal(cardinal(int(got["rank"].replace(",", ""))) if len(got["rank"]) < 16 else _number(got["rank"]))
    if got["plural"]:
        return _plural(_number(got["plural"]))
    if got["over"]:
        over, under = int(got["over"]), int(got["under"])
        name = {2: "half", 4: "quarter"}.get(under) or _ordinal(cardinal(under))
        return f"{cardinal(over)} {name if over == 1 else 'halves' if under == 2 else name + 's'}"
    if got["whole"]:
        unit = _UNITS.get(got["unit"]) or _HALVES.get(got["noon"][:1], "")
        if got["whole"] == "1" and got["unit"] and not got["part"]:
            unit = "foot" if unit == "feet" else unit.replace("miles", "mile").replace("meters", "meter").rstrip("s")
        return f"{'minus ' if got['minus'] else ''}{_decimal(got['whole'], got['part'])} {unit}"
    return "number" if got["hash"] else _SIGNS[got["sign"]]
