"""Everyday English beyond the phrasebook: frames filled with words (grammar/everyday), sense optional.

A recogniser that reads nothing but a phrasebook hears the phrasebook in everything. These sentences say what no phrase
book does, so that what was said has to be heard. The split belongs to the text, whatever the seed.
"""

import random
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import splits

FOLDER = Path(__file__).parent / "grammar" / "everyday"
SALT = "mmdec everyday 1"
DEEPEST = 12  # slots within slots
WORDS = 24  # of a sentence
FORMS = ("base", "s", "past", "done", "ing")

_SLOT = re.compile(r"\{(a:)?([a-z_]+)(?:\.([a-z]+))?\}")
_CHOICE = re.compile(r"\(([^()\[\]]*)\)|\[([^()\[\]]*)\]")
_AN = re.compile(r"(?!one|use|uni|euro)(?:[aeiou]|hour|honest|heir)", re.IGNORECASE)


@cache
def classes() -> dict[str, tuple[str, ...]]:
    """The words of each class; a verb is its forms, separated by commas."""
    found: dict[str, str] = {}
    name = ""
    for line in (FOLDER / "words.txt").read_text(encoding="utf-8").splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith(" "):
            found[name] += line
        else:
            name, _, items = line.partition("=")
            name = name.strip()
            found[name] = items
    return {name: tuple(item.strip() for item in items.split("|") if item.strip()) for name, items in found.items()}


@cache
def frames() -> tuple[tuple[str, ...], tuple[int, ...]]:
    """The frames and their weights."""
    lines = (FOLDER / "frames.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.partition(" ") for line in lines if line.strip() and not line.startswith("#")]
    return tuple(text for _, _, text in pairs), tuple(int(weight) for weight, _, _ in pairs)


def verb(entry: str, form: str) -> str:
    """One form of "base, third person, past, participle, ing": the last two, and a regular past, may be left out."""
    given = dict(zip(FORMS, (part.strip() for part in entry.split(",")), strict=False))
    base = given["base"]
    first, _, rest = base.partition(" ")
    regular = {
        "past": f"{first[:-1]}ied" if re.search("[^aeiou]y$", first) else f"{first}ed",
        "ing": f"{first}ing",
    }
    if form == "done" and "done" not in given:
        return verb(entry, "past")
    return given.get(form) or f"{regular[form]} {rest}".strip()


def with_article(text: str) -> str:
    return f"{'an' if _AN.match(text) else 'a'} {text}"


def sentence(draw: random.Random) -> str:
    """One sentence, as it is written."""
    known = classes()

    def slot(found: re.Match[str], depth: int) -> str:
        article, name, form = found.groups()
        entry = draw.choice(known[name])
        text = verb(entry, form) if form else fill(entry, depth + 1)
        return with_article(text) if article else text

    def choice(found: re.Match[str]) -> str:
        needed, spare = found.groups()
        if needed is not None:
            return draw.choice(needed.split("|"))
        return draw.choice(spare.split("|")) if draw.random() < 0.5 else ""

    def fill(text: str, depth: int) -> str:
        if depth > DEEPEST:
            raise ValueError(f"the classes of '{text}' hold each other")
        while (chosen := _CHOICE.sub(choice, text)) != text:
            text = chosen
        return _SLOT.sub(lambda found: slot(found, depth), text)

    while True:
        texts, weights = frames()
        text = fill(draw.choices(texts, weights)[0], 0)
        text = re.sub(r"\s+", " ", text)
        text = re.sub(r" ([,.?!])", r"\1", text).strip().replace("!.", "!")
        text = text if text[-1] in ".?!" else f"{text}."
        if len(text.split()) <= WORDS:
            return text[0].upper() + text[1:]


def split_of(text: str) -> str:
    """Of a text, by its hash alone."""
    return splits.split_of(splits.normalise(text), SALT)


def sentences(split: str, seed: int) -> Iterator[str]:
    """Without end: distinct sentences of a split."""
    draw, seen = random.Random(f"everyday {split} {seed}"), set()
    while True:
        text = sentence(draw)
        if text not in seen and split_of(text) == split:
            seen.add(text)
            yield text
