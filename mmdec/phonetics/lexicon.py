"""The pronunciation lexicon: a text file with one pronunciation per line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from mmdec.types import InputError

PAUSE = "pau"  # the phone of silence, as flite writes it
MAX_FILE_BYTES = 16 * 2**20


def spoken(phones: Sequence[str]) -> slice:
    """The phones without pauses at both ends; empty if there are only pauses."""
    kept = [index for index, phone in enumerate(phones) if phone != PAUSE]
    return slice(kept[0], kept[-1] + 1) if kept else slice(0, 0)


def read_lexicon(path: Path) -> dict[str, list[tuple[str, ...]]]:
    """word -> pronunciations, from lines of word, tab, phones; several lines for several pronunciations."""
    if not path.is_file():
        raise InputError(f"`path` must be a lexicon file, but {path} is not a file. Check the directory.")
    if path.stat().st_size > MAX_FILE_BYTES:
        raise InputError(f"`path` must be at most {MAX_FILE_BYTES} bytes, but {path} is larger. Check the file.")
    lexicon: dict[str, list[tuple[str, ...]]] = {}
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
        raise InputError(
            f"`path` must be UTF-8 text, but line {line} of {path} has the byte 0x{byte:02x}. Save it as UTF-8."
        ) from error
    for number, line in enumerate(lines, 1):
        word, tab, phones = line.partition("\t")
        if not tab or not phones.split() or word.split() != [word]:
            raise InputError(f"`path` must hold word, tab, phones, but line {number} of {path} is {line!r:.60}. Fix.")
        lexicon.setdefault(word, []).append(tuple(phones.split()))
    return lexicon


def lower_case(lexicon: Mapping[str, Sequence[tuple[str, ...]]]) -> dict[str, list[tuple[str, ...]]]:
    """Merge words that differ only in case: "Will" and "will" get the pronunciations of both."""
    folded: dict[str, list[tuple[str, ...]]] = {}
    for word, variants in lexicon.items():
        folded.setdefault(word.lower(), []).extend(variants)
    return folded


def pronounce(word: str, folded: Mapping[str, Sequence[tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """A word's pronunciations by its case-folded spelling, else those of its hyphenated parts."""
    if word.casefold() in folded:
        return list(folded[word.casefold()])
    parts = [folded.get(part, ()) for part in word.casefold().split("-")]
    return [sum(choice, ()) for choice in product(*parts)] if len(parts) > 1 else []
