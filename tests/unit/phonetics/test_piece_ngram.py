"""Tests the n-gram of pieces in tensors: it scores as the n-gram that it was packed from, and refuses damage."""

from __future__ import annotations

import itertools

import pytest

from mmdec.errors import InputError
from mmdec.phonetics.ngram import END, START
from mmdec.phonetics.piece_ngram import PieceNGram
from tests.support.tiny_piece_ngram import PIECES, ngram, stored


@pytest.mark.parametrize("kind", [(1, None), (2, None), (3, None), (4, None), (5, None), (4, (9, 7, 3))])
def test_the_packed_ngram_scores_as_its_source(kind: tuple[int, tuple[int, ...] | None]) -> None:
    plain = ngram(*kind)
    model = PieceNGram.pack(plain, PIECES)
    assert model.order == kind[0]
    for text in itertools.product(range(1, PIECES), repeat=3):
        context, total, expected = plain.advance("", START), 0.0, 0.0
        for at, piece in enumerate((*text, PIECES + 1)):
            token = END if piece > PIECES else str(piece)
            expected, context = expected + plain.score(context, token), plain.advance(context, token)
            total += model.after((PIECES, *text[:at]))(piece)
        assert total == pytest.approx(expected, abs=0.06), text  # 8 bits


def test_stored_arrays_restore_the_same_ngram() -> None:
    model = stored()
    again = PieceNGram(PIECES, {name: value.clone() for name, value in model.arrays.items()})
    for context in itertools.product(range(PIECES + 1), repeat=2):
        assert [again.after(context)(piece) for piece in range(PIECES)] == [
            model.after(context)(piece) for piece in range(PIECES)
        ]


@pytest.mark.parametrize("name", ["unigrams", "counts_2", "pieces_3", "values_2", "backoff_2", "steps_3"])
def test_arrays_that_do_not_fit_are_refused(name: str) -> None:
    arrays = stored().arrays
    with pytest.raises(InputError, match="`ngram` must"):
        PieceNGram(PIECES, {**arrays, name: arrays[name][:-1]})
