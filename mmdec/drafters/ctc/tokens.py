"""A small vocabulary for a CTC head that drafts.

It holds the frequent tokens of the model, of which all other tokens are composed.

A byte-level BPE merges each token from two others. A token that is too rare to be learned is split into its two parts
again, until all parts are frequent; single bytes are always in the vocabulary. The head's transcript is converted to
text, split into words and merged again by the BPE. This gives the tokens that the model itself would write.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, final

# ids of two pieces that are not tokens: the CTC blank, and the end of a segment (in a text with timestamps)
BLANK, SEGMENT_END = 0, 1
FIRST_PIECE = 2  # id of the first piece that is a token of the model
# GPT-2's rule for splitting text into words: contractions, and sequences of letters, figures or signs with the space
# before
_WORD = re.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")
_NEVER = (2**60, -1)  # rank and merged token of a pair of tokens that the BPE never merges
# values of the bytes that GPT-2's vocabulary writes as the character itself
_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))


@final
class Merges:
    """A byte-level BPE tokenizer that works on token ids.

    Args:
        rows: (left, right, merged token) of each merge, in order of priority.
        alphabet: Token id of each of the 256 bytes; -1 for a byte without a token.
    """

    def __init__(self, rows: Sequence[Sequence[int]], alphabet: Sequence[int]) -> None:
        self.rows, self.alphabet = [(int(a), int(b), int(c)) for a, b, c in rows], list(map(int, alphabet))
        self._ranks = {(left, right): (rank, token) for rank, (left, right, token) in enumerate(self.rows)}
        self.parts = {token: (left, right) for left, right, token in self.rows}
        self._bytes = {token: bytes([value]) for value, token in enumerate(self.alphabet) if token >= 0}
        for left, right, token in self.rows:
            self._bytes[token] = self._bytes[left] + self._bytes[right]
        self.words = lru_cache(2**14)(self._merge)

    def __reduce__(self) -> tuple[type[Merges], tuple[Any, Any]]:
        """Pickle without the cache of words."""
        return Merges, (self.rows, self.alphabet)

    @classmethod
    def from_json(cls, model: dict[str, Any]) -> Merges:
        """Make the BPE from a tokenizer's JSON.

        Args:
            model: The tokenizer file's entry "model".
        """
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
        """Tokenise a text (UTF-8) as the model's tokenizer does.

        Returns:
            Token ids.
        """
        words = _WORD.findall(text.decode("utf-8", "surrogateescape"))
        return [token for word in words for token in self.words(word.encode("utf-8", "surrogateescape"))]

    def _merge(self, word: bytes) -> tuple[int, ...]:
        parts = [self.alphabet[value] for value in word if self.alphabet[value] >= 0]
        while len(parts) > 1:
            ranked = [self._ranks.get(pair, _NEVER) for pair in itertools.pairwise(parts)]
            at = min(range(len(ranked)), key=ranked.__getitem__)
            if ranked[at] is _NEVER:
                break
            parts[at : at + 2] = [ranked[at][1]]
        return tuple(parts)


def choose_vocabulary(texts: Iterable[Sequence[int]], merges: Merges, count: int, min_count: int = 3) -> list[int]:
    """Choose the tokens of a small vocabulary.

    Args:
        texts: Token ids of each text.
        count: Maximum number of tokens, at least 256.
        min_count: Minimum number of occurrences, alone or as a part of rarer tokens. The most frequent tokens are
            chosen, and the tokens of single bytes that are needed to compose the others.

    Returns:
        Their ids, ascending.
    """
    frequencies = Counter(token for text in texts for token in text if token in merges)
    bound = min_count
    while len(frequent := _select_frequent(Counter(frequencies), bound, merges)) > max(count, 256):
        bound += 1 + bound // 8
    return frequent


def _select_frequent(left: Counter[int], bound: int, merges: Merges) -> list[int]:
    """Choose the tokens that occur at least `bound` times.

    Tokens are visited in reverse order of their merges. If a token is too rare, the two tokens that it was merged from
    get its occurrences. So a token's number is complete when it is visited.

    Args:
        left: Token -> number of occurrences; it is changed.
    """
    for _, _, token in reversed(merges.rows):
        times = left.get(token, 0)
        if 0 < times < bound:
            del left[token]
            for part in merges.parts[token]:
                left[part] += times
    return sorted(left)


@final
class TokenPieces:
    """Converts the model's tokens to pieces of the small vocabulary and back.

    Args:
        token_ids: Ids of the tokens that are pieces; in this order their piece ids are
            `FIRST_PIECE`, `FIRST_PIECE` + 1, ...
    """

    def __init__(self, merges: Merges, token_ids: Sequence[int]) -> None:
        self.merges, self.token_ids = merges, list(token_ids)
        self._numbers = {token: FIRST_PIECE + at for at, token in enumerate(self.token_ids)}
        self.of_token = lru_cache(2**14)(self._of_token)

    def __reduce__(self) -> tuple[type[TokenPieces], tuple[Any, Any]]:
        """Pickle without the cache of tokens."""
        return TokenPieces, (self.merges, self.token_ids)

    def __len__(self) -> int:
        return FIRST_PIECE + len(self.token_ids)

    @property
    def names(self) -> list[str]:
        """The pieces as readable text, in the order of their ids."""
        texts = [self.merges.bytes(token).decode("utf-8", "backslashreplace") for token in self.token_ids]
        return ["<blank>", "<mark>", *texts]

    def bytes(self, piece: int) -> bytes:
        """Return the bytes of a piece's text; empty for the blank and the end of a segment."""
        return self.merges.bytes(self.token_ids[piece - FIRST_PIECE]) if piece >= FIRST_PIECE else b""

    def _of_token(self, token: int) -> tuple[int, ...]:
        """Split a token into pieces of the small vocabulary.

        Returns:
            Their ids; [] for special tokens and for bytes that the vocabulary lacks.
        """
        number = self._numbers.get(token)
        if number is not None:
            return (number,)
        return tuple(piece for part in self.merges.parts.get(token, ()) for piece in self.of_token(part))
