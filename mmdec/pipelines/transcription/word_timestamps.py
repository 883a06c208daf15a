"""Turns timed tokens into timed words, on plain lists.

A token lasts until the next one begins. Words begin at spaces; scripts without spaces are cut at every complete
character. Punctuation stays with its word. `agree` makes segments and their words consistent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mmdec.pipelines.transcription.transcript import Segment, Word

UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
OPENING = frozenset("\"'“‘«¿¡([{-")
BROKEN = "\ufffd"  # decoded from an incomplete character
MOST = 4  # maximum bytes of a character, and so tokens


@dataclass
class _Piece:
    """Consecutive tokens that form complete characters."""

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
    """Words with their times. No word ends before it begins.

    tokens: of the text alone. starts, ends: seconds of each token. decode: tokens -> text. spaced: whether the script
        uses spaces.
    """
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
    return [Word(piece.text, piece.start, max(piece.start, piece.end)) for piece in joined if piece.text.strip()]


def agree(segments: Sequence[Segment]) -> list[Segment]:
    """Segments that begin with their first word, and whose last word ends with them; nothing overlaps.

    The two come from different sources: a segment's times are tokens that the model writes, a word's are where its
    cross-attention looks. At a beginning the segment gives way, at an end the word. Measured with the shipped Whisper
    on 200 sentences joined by pauses, in recordings of several windows, mean distance from the truth: beginnings 0.10 s
    by the word and 0.24 s by the segment; ends 0.57 s by the word, which lasts through the pause after it, and 0.29 s
    by the segment. An end that the model puts before its last word begins is the word's. A segment without words keeps
    its times as far as its neighbours leave room.
    """
    begins, floors, at = list[list[float]](), list[float](), 0.0
    for segment in segments:
        floors.append(at)
        begins.append([at := max(at, word.start) for word in segment.words or ()])
    agreed, after = list[Segment](), float("inf")
    for segment, starts, floor in zip(reversed(segments), reversed(begins), reversed(floors), strict=True):
        if segment.words:
            last = segment.words[-1]
            end = segment.end if segment.end > starts[-1] else last.end
            ends = [
                *(min(word.end, begin) for word, begin in zip(segment.words, starts[1:], strict=False)),
                min(end, after),
            ]
            spoken = [
                Word(word.text, start, max(start, stop))
                for word, start, stop in zip(segment.words, starts, ends, strict=True)
            ]
            agreed.append(replace(segment, start=starts[0], end=spoken[-1].end, words=spoken))
        else:
            start = min(max(segment.start, floor), after)
            agreed.append(replace(segment, start=start, end=min(max(segment.end, start), after)))
        after = agreed[-1].start
    return agreed[::-1]


def _pieces(
    tokens: Sequence[int], starts: Sequence[float], ends: Sequence[float], decode: Callable[[list[int]], str]
) -> list[_Piece]:
    pieces, group = list[_Piece](), list[int]()
    begin = 0.0
    for index, (token, start, end) in enumerate(zip(tokens, starts, ends, strict=True)):
        begin = begin if group else start
        group.append(token)
        text = decode(group)
        if BROKEN not in text or len(group) == MOST or index == len(tokens) - 1:
            pieces.append(_Piece(text, begin, end))
            group = []
    return pieces
