"""A small vocabulary for a CTC head that drafts: the frequent tokens of the model, from which all others can be built.

A byte-level BPE builds each token from two others. A token that is too rare to be learnt is split into these again,
until all parts are frequent; single bytes always stay. The head's transcript is turned into text, split into words and
merged again by the BPE. This gives the tokens that the model itself would write.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, final

BLANK, MARK = 0, 1  # two pieces are no tokens: CTC's blank, and the end of a segment (in a text with timestamps)
FIRST = 2  # id of the first piece that stands for a token
# GPT-2's words: contractions, then letters, figures or signs, each with the space before it.
_WORD = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
_NEVER = (2**60, -1)  # the rank of a pair that is never merged
_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))  # bytes that GPT-2 writes as themselves


@final
class Merges:
    """A byte-level BPE over token ids. rows: (left, right, token) of each merge, in order of priority. alphabet: the
    token of each byte, -1 for a byte that has none."""

    def __init__(self, rows: Sequence[Sequence[int]], alphabet: Sequence[int]) -> None:
        self.rows, self.alphabet = [(int(a), int(b), int(c)) for a, b, c in rows], list(map(int, alphabet))
        self._ranks = {(left, right): (rank, token) for rank, (left, right, token) in enumerate(self.rows)}
        self.parts = {token: (left, right) for left, right, token in self.rows}
        self._bytes = {token: bytes([value]) for value, token in enumerate(self.alphabet) if token >= 0}
        for left, right, token in self.rows:
            self._bytes[token] = self._bytes[left] + self._bytes[right]
        self.words = lru_cache(2**14)(self._merged)

    @classmethod
    def of(cls, model: dict[str, Any]) -> Merges:
        """Read the merges from the entry `model` of a tokenizer's JSON."""
        numbers: dict[str, int] = model["vocab"]
        pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
        rows = [(numbers[left], numbers[right], numbers[left + right]) for left, right in pairs]
        others = iter(range(256, 512))
        signs = {value: chr(value) if value in _PRINTED else chr(next(others)) for value in range(256)}
        return cls(rows, [numbers.get(signs[value], -1) for value in range(256)])

    def __contains__(self, token: object) -> bool:
        return token in self._bytes

    def bytes(self, token: int) -> bytes:
        """Return the bytes of a token's text."""
        return self._bytes[token]

    def tokens(self, text: bytes) -> list[int]:
        """Tokenise a text as the model's tokenizer does. Returns: token ids."""
        words = _WORD.findall(text.decode("utf-8", "surrogateescape"))
        return [token for word in words for token in self.words(word.encode("utf-8", "surrogateescape"))]

    def _merged(self, word: bytes) -> tuple[int, ...]:
        parts = [self.alphabet[value] for value in word if self.alphabet[value] >= 0]
        while len(parts) > 1:
            ranked = [self._ranks.get(pair, _NEVER) for pair in itertools.pairwise(parts)]
            at = min(range(len(ranked)), key=ranked.__getitem__)
            if ranked[at] is _NEVER:
                break
            parts[at : at + 2] = [ranked[at][1]]
        return tuple(parts)


def frequent_tokens(texts: Iterable[Sequence[int]], merges: Merges, count: int, least: int = 3) -> list[int]:
    """Choose at most `count` tokens (256 if `count` is smaller): those that occur most often in the texts, at least
    `least` times, as a token or as a part of rarer ones, and the tokens of single bytes that these need. texts: token
    ids. Returns: the chosen ids, ascending."""
    seen = Counter(token for text in texts for token in text if token in merges)
    bound = least
    while len(found := _kept(Counter(seen), bound, merges)) > max(count, 256):
        bound += 1 + bound // 8
    return found


def _kept(left: Counter[int], bound: int, merges: Merges) -> list[int]:
    """Choose the tokens that occur at least `bound` times. left: token -> count. A rarer token is split, and its count
    is added to its parts. The latest merges come first, so that the count of a part is complete when its turn comes."""
    for _, _, token in reversed(merges.rows):
        times = left.get(token, 0)
        if 0 < times < bound:
            del left[token]
            for part in merges.parts[token]:
                left[part] += times
    return sorted(left)


@final
class TokenPieces:
    """Converts tokens to pieces and back. kept: ids of the tokens that are pieces; the piece ids are `FIRST`, ..., in
    that order."""

    def __init__(self, merges: Merges, kept: Sequence[int]) -> None:
        self.merges, self.kept = merges, list(kept)
        self._numbers = {token: FIRST + at for at, token in enumerate(self.kept)}
        self.of_token = lru_cache(2**14)(self._of_token)

    def __len__(self) -> int:
        return FIRST + len(self.kept)

    @property
    def names(self) -> list[str]:
        """Return the pieces as readable text, in the order of their ids."""
        texts = [self.merges.bytes(token).decode("utf-8", "backslashreplace") for token in self.kept]
        return ["<blank>", "<mark>", *texts]

    def bytes(self, piece: int) -> bytes:
        """Return the bytes of a piece's text; empty for blank and end of segment."""
        return self.merges.bytes(self.kept[piece - FIRST]) if piece >= FIRST else b""

    def _of_token(self, token: int) -> tuple[int, ...]:
        """Return the ids of a token's pieces. Special tokens, and bytes that are no pieces, are left out."""
        number = self._numbers.get(token)
        if number is not None:
            return (number,)
        return tuple(piece for part in self.merges.parts.get(token, ()) for piece in self.of_token(part))
