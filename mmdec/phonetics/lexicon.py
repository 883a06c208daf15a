"""The pronunciation lexicon (a text file with one pronunciation per line), and its approximate matching against phones:
which words may begin at which position, and the cost of their wrong phones.

Costs are in nats, so that they add to a language model's log probabilities. A substitution is cheaper between phones
that sound alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import final

import numpy as np

from mmdec.types import InputError

PAUSE = "pau"  # the phone of silence, as flite writes it
MAX_FILE_BYTES = 16 * 2**20
SUBSTITUTION = 7.0  # cost in nats of one phone for an unrelated one
INSERTION = 6.0  # cost in nats of an extra phone
DELETION = 6.0  # cost in nats of a missing phone
FAR = 1e4  # stands for infinity, whose differences would be NaN
STARTS = 64  # start positions matched at once, which bounds the memory
# manner, place, voice of consonants; height, backness, tenseness or roundness of vowels (American English, ARPAbet)
CONSONANTS = {
    "p": "stop lip -", "b": "stop lip +", "t": "stop tip -", "d": "stop tip +", "k": "stop back -", "g": "stop back +",
    "ch": "affricate palate -", "jh": "affricate palate +", "f": "fricative lip -", "v": "fricative lip +",
    "th": "fricative teeth -", "dh": "fricative teeth +", "s": "fricative tip -", "z": "fricative tip +",
    "sh": "fricative palate -", "zh": "fricative palate +", "hh": "fricative throat -", "m": "nasal lip +",
    "n": "nasal tip +", "ng": "nasal back +", "l": "liquid tip +", "r": "liquid palate +", "w": "glide lip +",
    "y": "glide palate +",
}  # fmt: skip
VOWELS = {
    "iy": "high front tense", "ih": "high front lax", "ey": "mid front tense", "eh": "mid front lax",
    "ae": "low front lax", "aa": "low back lax", "ao": "low back round", "ah": "mid central lax",
    "ax": "mid central lax", "er": "mid central rhotic", "axr": "mid central rhotic", "ow": "mid back round",
    "uh": "high back lax", "uw": "high back round", "ay": "low front glide", "aw": "low back glide",
    "oy": "mid back glide",
}  # fmt: skip


def spoken(phones: Sequence[str]) -> slice:
    """Return the slice of the phones without the pauses at both ends; empty if there are only pauses."""
    kept = [index for index, phone in enumerate(phones) if phone != PAUSE]
    return slice(kept[0], kept[-1] + 1) if kept else slice(0, 0)


def read_lexicon(path: Path) -> dict[str, list[tuple[str, ...]]]:
    """Read word -> pronunciations from lines of word, tab, phones. A word with several pronunciations has several
    lines."""
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
    """Return a word's pronunciations by its case-folded spelling, else those of its hyphenated parts."""
    if word.casefold() in folded:
        return list(folded[word.casefold()])
    parts = [folded.get(part, ()) for part in word.casefold().split("-")]
    return [sum(choice, ()) for choice in product(*parts)] if len(parts) > 1 else []


def substitution_cost(phone: str, other: str) -> float:
    """Return the cost in nats if `other` was recognised instead of `phone`."""
    if phone == other:
        return 0.0
    for table in (CONSONANTS, VOWELS):
        if phone in table and other in table:
            differences = sum(a != b for a, b in zip(table[phone].split(), table[other].split(), strict=True))
            return SUBSTITUTION * min(1.0, 0.4 + 0.2 * differences)
    return SUBSTITUTION


@final
class ApproximateLexicon:
    """The prefix tree of all pronunciations, as arrays.

    All words and all start positions are matched together, level by level down the tree. A branch is dropped at the
    positions where its cost exceeds the limit.
    """

    def __init__(self, pronunciations: Iterable[tuple[str, Sequence[str]]]) -> None:
        entries = sorted((tuple(phones), word) for word, phones in pronunciations)
        self._phones = sorted({phone for phones, _ in entries for phone in phones} | {*CONSONANTS, *VOWELS, PAUSE})
        self._index = {phone: number for number, phone in enumerate(self._phones)}
        children: list[dict[str, int]] = [{}]
        symbols = [0]
        self._words: list[list[str]] = [[]]
        for phones, word in entries:
            node = 0
            for phone in phones:
                if phone not in children[node]:
                    children[node][phone] = len(children)
                    children.append({})
                    symbols.append(self._index[phone])
                    self._words.append([])
                node = children[node][phone]
            self._words[node].append(word)
        self._symbols = np.array(symbols)
        self._degrees = np.array([len(row) for row in children])
        self._offsets = np.concatenate(([0], np.cumsum(self._degrees)[:-1]))
        self._children = np.array([child for row in children for child in row.values()], dtype=np.int64)
        self._final = np.array([bool(words) for words in self._words])
        self._depth = max((len(phones) for phones, _ in entries), default=0)
        costs = [[substitution_cost(meant, heard) for heard in self._phones] for meant in self._phones]
        # two more recognised "phones" are possible: an unknown one, and the position after the last one
        extra = np.tile(np.array([SUBSTITUTION, FAR]), (len(self._phones), 1))
        self._costs = np.concatenate((np.array(costs), extra), axis=1).astype(np.float32)  # (P, P + 2)

    def match(
        self, phones: Sequence[str], base: float, slope: float, extra: int = 2
    ) -> list[list[tuple[int, str, float]]]:
        """Find the words at each start position whose cost is at most base + slope * (number of the word's phones).

        extra: a match may be this many phones longer than the longest pronunciation. Returns: for each start position,
            (end, word, cost) of each word.
        """
        count = len(phones)
        width = min(count, self._depth + extra) + 1
        heard = np.array([self._index.get(phone, len(self._phones)) for phone in phones] + [-1] * width)
        insertion = np.full(count + width, FAR, dtype=np.float32)
        insertion[:count] = INSERTION
        matches: list[dict[tuple[int, str], float]] = [{} for _ in range(count)]
        for first in range(0, count, STARTS):
            starts = np.arange(first, min(first + STARTS, count))
            window = starts[:, None] + np.arange(width - 1)  # (S, W - 1)
            self._descend(matches, starts, heard[window], insertion[window], base, slope)
        return [[(end, word, cost) for (end, word), cost in table.items()] for table in matches]

    def _descend(
        self,
        matches: list[dict[tuple[int, str], float]],
        starts: np.ndarray,  # (S,)
        heard: np.ndarray,  # (S, W - 1) numbers of the recognised phones
        insertion: np.ndarray,  # (S, W - 1)
        base: float,
        slope: float,
    ) -> None:
        running = np.concatenate((np.zeros((len(starts), 1), np.float32), np.cumsum(insertion, axis=1)), axis=1)
        rows = np.arange(len(starts))  # one row for each (start, node) whose branch is not dropped
        nodes = np.zeros(len(starts), dtype=np.int64)
        costs = running.copy()  # (R, W): cost of the node's phones against the first j recognised phones
        depth = 0
        while len(rows):
            depth += 1
            degrees = self._degrees[nodes]
            parent = np.repeat(np.arange(len(rows)), degrees)
            rank = np.arange(len(parent)) - np.repeat(np.cumsum(degrees) - degrees, degrees)
            nodes = self._children[self._offsets[nodes[parent]] + rank]
            rows = rows[parent]
            above = costs[parent]  # (R, W)
            costs = above + np.float32(DELETION)
            substituted = above[:, :-1] + self._costs[self._symbols[nodes][:, None], heard[rows]]
            np.minimum(costs[:, 1:], substituted, out=costs[:, 1:])
            sums = running[rows]
            costs = np.minimum.accumulate(costs - sums, axis=1) + sums
            live = costs.min(axis=1) <= base + slope * depth
            rows, nodes, costs = rows[live], nodes[live], costs[live]
            where, length = np.nonzero((costs <= base + slope * depth) & self._final[nodes][:, None])
            ends = starts[rows[where]] + length
            for row, node, end, cost in zip(
                rows[where].tolist(), nodes[where].tolist(), ends.tolist(), costs[where, length].tolist(), strict=True
            ):
                table = matches[int(starts[row])]
                for word in self._words[node]:
                    if cost < table.get((end, word), FAR):
                        table[end, word] = cost
