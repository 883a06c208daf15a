"""The CTC head: frames counted, rows independent of their batch, repeats collapsed."""

from __future__ import annotations

import pytest
import torch

from mmdec.nn.ctc_head import CtcHead, CtcHeadConfig, collapse


def head(stride: int = 2) -> CtcHead:
    torch.manual_seed(0)
    return CtcHead(CtcHeadConfig(d_states=12, pieces=7, stride=stride, d_model=8, layers=2, kernel=5)).eval()


@pytest.mark.parametrize(("stride", "frames"), [(1, [9, 4, 1]), (2, [5, 2, 1]), (4, [3, 1, 1])])
def test_a_row_is_the_same_alone_and_beside_longer_ones(stride: int, frames: list[int]) -> None:
    network, states, lengths = head(stride), torch.randn(3, 9, 12), torch.tensor([9, 4, 1])
    with torch.no_grad():
        logits, counts = network(states, lengths)
        assert counts.tolist() == frames
        for row, length in enumerate(lengths.tolist()):
            alone, _ = network(states[row : row + 1, :length], lengths[row : row + 1])
            torch.testing.assert_close(logits[row, : frames[row]], alone[0])


def test_blanks_part_what_is_said_twice() -> None:
    best = torch.tensor([[0, 3, 3, 0, 3, 5, 5, 6], [2, 2, 2, 0, 0, 4, 4, 4]])
    assert collapse(best, torch.tensor([7, 5])) == [[3, 3, 5], [2]]
