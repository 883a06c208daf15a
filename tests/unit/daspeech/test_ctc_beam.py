"""Tests the beam search over a CTC head's frames: an n-gram of pieces guides the spelling."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from mmdec.daspeech.ctc_beam import NGRAM_WEIGHT, PIECE_BONUS, beam_search, decode_pieces
from mmdec.drafters.ctc.network import BLANK, best_pieces, collapse
from mmdec.phonetics.piece_ngram import PieceNGram
from tests.support.tiny_piece_ngram import PIECES, stored


def best_text(logprobs: np.ndarray, model: PieceNGram) -> tuple[int, ...]:
    """Find the search's optimum by all paths: ln of the sum of a text's paths, the n-gram and the bonus."""
    totals: dict[tuple[int, ...], float] = {}
    paths = torch.tensor(list(itertools.product(range(PIECES), repeat=len(logprobs))))
    costs = torch.from_numpy(logprobs)[torch.arange(len(logprobs)), paths].sum(-1).tolist()
    for text, cost in zip(collapse(paths, torch.full((len(paths),), len(logprobs))), costs, strict=True):
        totals[tuple(text)] = float(np.logaddexp(totals.get(tuple(text), -np.inf), cost))
    for text in totals:
        for at, piece in enumerate((*text, PIECES + 1)):
            totals[text] += NGRAM_WEIGHT * model.after((PIECES, *text[:at]))(piece) + PIECE_BONUS * (piece <= PIECES)
    return max(totals, key=totals.__getitem__)


@pytest.mark.parametrize("seed", range(6))
def test_the_search_finds_the_best_of_all_texts(seed: int) -> None:
    draw, model = torch.Generator().manual_seed(seed), stored(3 + seed % 2)
    logprobs = (1.5 * torch.randn(4, PIECES, generator=draw)).log_softmax(-1).numpy()
    assert tuple(beam_search(logprobs, model)[0]) == best_text(logprobs, model)


def test_sure_pieces_are_written_and_the_ngram_decides_the_others() -> None:
    sure = torch.full((1, 8, PIECES), -9.0)
    for frame, piece in enumerate([1, 0, 2, 0, 3, 0, 0, 0]):
        sure[0, frame, piece] = 3.0
    lengths = torch.tensor([8])
    heard = decode_pieces(sure, lengths, stored(), 3)
    assert heard.pieces[0, :, 0].tolist() == [1, 2, 3]
    assert heard.frames.tolist() == [[0, 2, 4]]
    unsure = sure.clone()
    unsure[0, 4, 5], unsure[0, 4, 3] = 3.0, 2.5  # 1 2 5 was never said
    assert best_pieces(unsure, lengths, 3).pieces[0, :, 0].tolist() == [1, 2, 5]
    result = decode_pieces(unsure, lengths, stored(), 3)
    assert result.pieces[0, :, 0].tolist() == [1, 2, 3]
    assert result.pieces[0, 2, 1] == 5  # the other stays beside it
    assert result.weights.sum(-1) == pytest.approx(torch.ones(1, 3))
    assert result.weights[0, 2, 0] < heard.weights[0, 2, 0]


def test_rows_alone_equal_rows_in_a_batch() -> None:
    draw, model = torch.Generator().manual_seed(3), stored()
    logits, lengths = 2 * torch.randn(3, 9, PIECES, generator=draw), torch.tensor([9, 4, 6])
    logits[2, :, BLANK] = 50.0  # nothing is heard
    together = decode_pieces(logits, lengths, model, 3)
    assert together.lengths[2] == 0
    for row, length in enumerate(lengths.tolist()):
        single = decode_pieces(logits[row : row + 1, :length], lengths[row : row + 1], model, 3)
        count = int(single.lengths[0])
        assert together.lengths[row] == count
        assert torch.equal(together.pieces[row, :count], single.pieces[0, :count])
        assert torch.equal(together.weights[row, :count], single.weights[0, :count])
