"""The pronunciation lexicon (a text file with one pronunciation a line), and a search that matches its words
approximately against phones.

Costs of wrong phones are in nats, so that they can be added to log-probabilities of a language model. Replacing a phone
by one that sounds similar costs less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import final

import numpy as np

from mmdec.types import InputError

PAUSE = "pau"  # name of the phone that stands for silence, as in the speech synthesiser flite
MAX_FILE_BYTES = 16 * 2**20
SUBSTITUTION = 7.0  # cost in nats if a phone was recognised as an unrelated one
INSERTION = 6.0  # cost in nats of a recognised phone that the word does not have
DELETION = 6.0  # cost in nats of a phone of the word that was not recognised
FAR = 1e4  # a cost that stands for infinity; true infinities would give NaN when they are subtracted
STARTS = 64  # number of start positions that are matched at the same time; memory grows with this number
# Features of American English phones in ARPAbet, which decide how similar two phones are. Consonants: manner, place,
# voice. Vowels: height, backness, tenseness or roundness.
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
    """Return the slice that leaves out pauses at both ends of the phones; an empty slice if all phones are pauses."""
    kept = [index for index, phone in enumerate(phones) if phone != PAUSE]
    return slice(kept[0], kept[-1] + 1) if kept else slice(0, 0)


def read_lexicon(path: Path) -> dict[str, list[tuple[str, ...]]]:
    """Read a lexicon: word -> its pronunciations. Each line has a word, a tab and phones; a word with several
    pronunciations has several lines."""
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
    """Merge words that differ only in case: "will" gets the pronunciations of both "Will" and "will"."""
    folded: dict[str, list[tuple[str, ...]]] = {}
    for word, variants in lexicon.items():
        folded.setdefault(word.lower(), []).extend(variants)
    return folded


def pronounce(word: str, folded: Mapping[str, Sequence[tuple[str, ...]]]) -> list[tuple[str, ...]]:
    """Return a word's pronunciations, looked up without regard to case. A hyphenated word that is missing gets the
    pronunciations of its parts, joined.

    folded: the lexicon with lower-case words, from `lower_case`.
    """
    if word.casefold() in folded:
        return list(folded[word.casefold()])
    parts = [folded.get(part, ()) for part in word.casefold().split("-")]
    return [sum(choice, ()) for choice in product(*parts)] if len(parts) > 1 else []


def substitution_cost(phone: str, other: str) -> float:
    """Return the cost in nats if the phone `other` was recognised where the word has `phone`."""
    if phone == other:
        return 0.0
    for table in (CONSONANTS, VOWELS):
        if phone in table and other in table:
            differences = sum(a != b for a, b in zip(table[phone].split(), table[other].split(), strict=True))
            return SUBSTITUTION * min(1.0, 0.4 + 0.2 * differences)
    return SUBSTITUTION


@final
class ApproximateLexicon:
    """Matches all words of a lexicon approximately against phones. Holds the prefix tree of all pronunciations, as
    arrays.

    All words and all start positions are matched at the same time, one level of the tree after the other (edit
    distance). A node of the tree is dropped for a start position if all of its costs there exceed the limit.
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
        # two more columns than phones: for a recognised phone that is unknown, and for the end of the recognised phones
        extra = np.tile(np.array([SUBSTITUTION, FAR]), (len(self._phones), 1))
        self._costs = np.concatenate((np.array(costs), extra), axis=1).astype(np.float32)  # shape (P, P + 2)

    def match(
        self, phones: Sequence[str], base: float, slope: float, extra: int = 2
    ) -> list[list[tuple[int, str, float]]]:
        """Find the words that match at each start position.

        phones: the recognised phones. base, slope: a word matches if its wrong phones cost at most base + slope *
            (number of the word's phones), in nats.
        extra: a match may span this many phones more than the longest pronunciation has.
        Returns: for each start position, a list of (end position, word, cost in nats).
        """
        count = len(phones)
        width = min(count, self._depth + extra) + 1
        heard = np.array([self._index.get(phone, len(self._phones)) for phone in phones] + [-1] * width)
        insertion = np.full(count + width, FAR, dtype=np.float32)
        insertion[:count] = INSERTION
        matches: list[dict[tuple[int, str], float]] = [{} for _ in range(count)]
        for first in range(0, count, STARTS):
            starts = np.arange(first, min(first + STARTS, count))
            window = starts[:, None] + np.arange(width - 1)  # shape (S, W - 1)
            self._descend(matches, starts, heard[window], insertion[window], base, slope)
        return [[(end, word, cost) for (end, word), cost in table.items()] for table in matches]

    def _descend(
        self,
        matches: list[dict[tuple[int, str], float]],
        starts: np.ndarray,  # (S,) start positions
        heard: np.ndarray,  # (S, W - 1) indices of the recognised phones from each start position on
        insertion: np.ndarray,  # (S, W - 1) cost of leaving out each of these phones
        base: float,
        slope: float,
    ) -> None:
        running = np.concatenate((np.zeros((len(starts), 1), np.float32), np.cumsum(insertion, axis=1)), axis=1)
        # one row for each pair (start position, tree node) that is not dropped: the index of its start position
        rows = np.arange(len(starts))
        nodes = np.zeros(len(starts), dtype=np.int64)
        # (R, W): for each row, the cost of matching the node's phones with the first j recognised phones, j = 0 .. W -
        # 1
        costs = running.copy()
        depth = 0
        while len(rows):
            depth += 1
            degrees = self._degrees[nodes]
            parent = np.repeat(np.arange(len(rows)), degrees)
            rank = np.arange(len(parent)) - np.repeat(np.cumsum(degrees) - degrees, degrees)
            nodes = self._children[self._offsets[nodes[parent]] + rank]
            rows = rows[parent]
            above = costs[parent]  # shape (R, W)
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
