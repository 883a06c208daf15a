"""An n-gram of six pieces, counted over a few texts."""

from __future__ import annotations

from mmdec.phonetics.ngram import NGram
from mmdec.phonetics.piece_ngram import PieceNGram

PIECES = 6
TEXTS = [[1, 2, 3], [1, 2, 3, 4], [4, 5], [1, 2, 4, 5], [5, 3], [1, 2, 3]]


def ngram(order: int = 3, entries: tuple[int, ...] | None = None) -> NGram:
    texts = [[str(piece) for piece in text] for text in TEXTS]
    return NGram.build(texts, order=order, vocabulary=map(str, range(1, PIECES)), max_entries=entries)


def stored(order: int = 3) -> PieceNGram:
    return PieceNGram.pack(ngram(order), PIECES)
