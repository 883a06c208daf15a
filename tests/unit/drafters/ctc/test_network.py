"""The CTC head: frames counted, rows independent of their batch, repeats collapsed."""

from __future__ import annotations

import pytest
import torch

from mmdec.drafters.ctc.network import BLANK, CtcHead, CtcHeadConfig, best_pieces, collapse


def head(stride: int = 2) -> CtcHead:
    torch.manual_seed(0)
    return CtcHead(CtcHeadConfig(d_states=12, pieces=7, stride=stride, d_model=8, layers=2, kernel=5)).eval()


@pytest.mark.parametrize(("stride", "frames"), [(1, [9, 4, 1]), (2, [5, 2, 1]), (4, [3, 1, 1])])
def test_a_row_alone_equals_a_row_beside_longer_ones(stride: int, frames: list[int]) -> None:
    network, states, lengths = head(stride), torch.randn(3, 9, 12), torch.tensor([9, 4, 1])
    with torch.no_grad():
        logits, counts = network(states, lengths)
        assert counts.tolist() == frames
        for row, length in enumerate(lengths.tolist()):
            single, _ = network(states[row : row + 1, :length], lengths[row : row + 1])
            torch.testing.assert_close(logits[row, : frames[row]], single[0])


def test_blanks_separate_repeated_pieces() -> None:
    best = torch.tensor([[0, 3, 3, 0, 3, 5, 5, 6], [2, 2, 2, 0, 0, 4, 4, 4]])
    assert collapse(best, torch.tensor([7, 5])) == [[3, 3, 5], [2]]


def test_the_best_pieces_of_each_place_are_those_of_the_collapsed_text() -> None:
    draw = torch.Generator().manual_seed(1)
    logits, lengths = 2 * torch.randn(4, 12, 9, generator=draw), torch.tensor([12, 7, 1, 5])
    logits[..., BLANK] += 1.5
    logits[3, :, BLANK] = 50.0  # a row in which nothing is heard
    heard = best_pieces(logits, lengths, 3)
    expected = collapse(logits.argmax(-1), lengths)
    assert heard.lengths.tolist() == [len(row) for row in expected]
    assert heard.pieces.shape == (*heard.frames.shape, 3)
    for row, pieces in enumerate(expected):
        count = len(pieces)
        assert heard.weights[row, :count].sum(-1) == pytest.approx(torch.ones(count))
        assert not heard.weights[row, count:].any()
        assert BLANK not in heard.pieces[row, :count]
        frames = heard.frames[row, :count]
        assert logits[row].argmax(-1)[frames].tolist() == pieces
        assert (frames[1:] > frames[:-1]).all()


def test_merged_frames_are_averaged_and_placed_at_the_surest() -> None:
    probabilities = torch.tensor([[[0.2, 0.6, 0.2], [0.1, 0.8, 0.1], [0.8, 0.1, 0.1], [0.3, 0.1, 0.6]]])
    heard = best_pieces(probabilities.log(), torch.tensor([4]), 2)
    assert heard.pieces.tolist() == [[[1, 2], [2, 1]]]
    assert heard.frames.tolist() == [[1, 3]]
    torch.testing.assert_close(heard.weights, torch.tensor([[[1.4 / 1.7, 0.3 / 1.7], [6 / 7, 1 / 7]]]))
