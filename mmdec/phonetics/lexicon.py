"""The pronunciation lexicon, a text file with one pronunciation a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mmdec.errors import InputError

PAUSE_PHONE = "pau"  # name of the phone that stands for silence, as in the speech synthesiser flite
MAX_FILE_BYTES = 16 * 2**20


def spoken_slice(phones: Sequence[str]) -> slice:
    """Return the slice that leaves out pauses at both ends of the phones; an empty slice if all phones are pauses."""
    indices = [index for index, phone in enumerate(phones) if phone != PAUSE_PHONE]
    return slice(indices[0], indices[-1] + 1) if indices else slice(0, 0)


def read_lexicon(path: Path) -> dict[str, list[tuple[str, ...]]]:
    """Read a lexicon: word -> its pronunciations.

    Each line has a word, a tab and phones; a word with several pronunciations has several lines.
    """
    if not path.is_file():
        raise InputError(f"`path` must be a lexicon file, but {path} is not a file. Check the folder.")
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
            raise InputError(f"`path` must hold word, tab, phones, but line {number} of {path} is {line!r:.60}.")
        lexicon.setdefault(word, []).append(tuple(phones.split()))
    return lexicon


def lower_case(lexicon: Mapping[str, Sequence[tuple[str, ...]]]) -> dict[str, list[tuple[str, ...]]]:
    """Merge words that differ only in case: "will" gets the pronunciations of both "Will" and "will"."""
    folded: dict[str, list[tuple[str, ...]]] = {}
    for word, variants in lexicon.items():
        folded.setdefault(word.lower(), []).extend(variants)
    return folded
