"""Timed tokens to timed words. Pure lists: where the times come from is no matter here.

A token lasts until the next one begins. Words begin at spaces; scripts without spaces are cut at every character that
its tokens make whole. Punctuation stays with the word it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mmdec.transcript import Word

UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
OPENING = frozenset("\"'“‘«¿¡([{-")
BROKEN = "\ufffd"  # what a decoder writes for a part of a character
MOST = 4  # bytes of a character, and so tokens


@dataclass
class _Piece:
    """Tokens that make whole characters."""

    text: str
    start: float
    end: float


def words(
    tokens: Sequence[int],
    starts: Sequence[float],
    ends: Sequence[float],
    decode: Callable[[list[int]], str],
    spaced: bool = True,
) -> list[Word]:
    """tokens of the text alone, with the seconds at which each begins and ends. No word ends before it begins."""
    joined: list[_Piece] = []
    opening = False
    for piece in _pieces(tokens, starts, ends, decode):
        bare = piece.text.strip()
        mark = bool(bare) and not any(letter.isalnum() for letter in bare)
        opens = mark and piece.text.startswith(" ") and bare in OPENING
        new = not joined or (not mark if not spaced else piece.text.startswith(" ") and (opens or not mark))
        if new and not opening:
            joined.append(piece)
        else:
            joined[-1] = _Piece(joined[-1].text + piece.text, joined[-1].start, piece.end)
        opening = opens
    return [Word(one.text, one.start, max(one.start, one.end)) for one in joined if one.text.strip()]


def _pieces(
    tokens: Sequence[int], starts: Sequence[float], ends: Sequence[float], decode: Callable[[list[int]], str]
) -> list[_Piece]:
    found, group = list[_Piece](), list[int]()
    begin = 0.0
    for place, (token, start, end) in enumerate(zip(tokens, starts, ends, strict=True)):
        begin = begin if group else start
        group.append(token)
        text = decode(group)
        if BROKEN not in text or len(group) == MOST or place == len(tokens) - 1:
            found.append(_Piece(text, begin, end))
            group = []
    return found
