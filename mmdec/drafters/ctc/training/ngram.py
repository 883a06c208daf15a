"""The n-gram of a CTC head that drafts: counted over text in the language that the head hears."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mmdec.drafters.ctc.tokens import TokenPieces
from mmdec.phonetics.ngram import NGram
from mmdec.phonetics.piece_ngram import PieceNGram

NGRAM_ENTRIES = 60_000, 120_000  # n-grams of 2 and of 3 pieces that are kept: 0.7 MB


def count_ngram(texts: Iterable[str], pieces: TokenPieces, entries: Sequence[int] = NGRAM_ENTRIES) -> PieceNGram:
    """Count an n-gram of pieces.

    Args:
        texts: Sentences as the model would write them, with capital letters and punctuation.
        pieces: The head's vocabulary.
        entries: The number of n-grams that are kept, for each order from 2.
    """
    sentences = (
        [str(piece) for token in pieces.merges.tokens(f" {text}".encode()) for piece in pieces.of_token(token)]
        for text in texts
    )
    known = map(str, range(len(pieces)))
    model = NGram.build(
        (sentence for sentence in sentences if sentence),
        order=len(entries) + 1,
        vocabulary=known,
        max_entries=entries,
    )
    return PieceNGram.pack(model, len(pieces))
