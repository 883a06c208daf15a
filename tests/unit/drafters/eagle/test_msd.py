"""Tests MSD's switch between visual and text columns, on short texts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmdec.drafters.eagle.msd import MsdConfig, MsdNetwork, VisualToken, next_text


def network(visual_token: VisualToken) -> MsdNetwork:
    """fc adds the embedding and ten times the feature: what a column reads can be read off its digits."""
    made = MsdNetwork(MsdConfig(2, 9, 4, 1, 1, 2, fc_bias=False, visual_token=visual_token))
    eye = torch.eye(2)
    with torch.no_grad():
        made.fc.weight.copy_(torch.cat([eye, 10 * eye], 1))
    return made


def numbered(length: int) -> Tensor:
    """Return (1, length, 2): column t holds t."""
    return torch.arange(length).float()[:, None].expand(-1, 2)


@pytest.mark.parametrize(
    ("visual", "following", "own"),
    [
        # columns 2, 3, 4 are the image. Published: 1, 2, 3 take them, 4 reads token 5. Ours: 1 reads token 5
        ([0, 0, 1, 1, 1, 0, 0, 0], [1, 2, 3, 4, 45, 56, 67], [1, 15, 2, 3, 4, 56, 67]),
        ([0, 1, 0, 0, 1, 1, 0], [1, 12, 23, 4, 5, 56], [2, 1, 23, 36, 4, 5]),  # each image has its own text
        ([0, 1, 1, 1, 1, 0], [1, 2, 3, 4, 45], [5, 1, 2, 3, 4]),  # images beside each other are one
        ([1, 1, 0, 0], [1, 12, 23], [0, 1, 23]),  # published: no column takes the first token
        ([0, 0, 1, 1], [1, 2, 3], [1, 12, 2]),  # ours: nothing follows, so the image's own first
        ([0, 1, 0, 0], [1, 12, 23], [2, 1, 23]),
        ([0, 0, 1, 0], [1, 2, 23], [1, 13, 2]),
        ([0, 0, 0], [1, 12], [1, 12]),  # EAGLE
    ],
)
def test_the_layers_inputs_follow_the_visual_token_option(
    visual: list[int], following: list[int], own: list[int]
) -> None:
    """t for the embedding of token t itself, else embedding + 10 times the feature's column."""
    size, marks = len(visual), torch.tensor(visual).bool()
    layouts: list[tuple[VisualToken, list[int]]] = [("next", following), ("own", own)]
    for layout, expected in layouts:
        states = network(layout).prompt(numbered(size), numbered(size), marks).states
        assert states.tolist() == [[value, value] for value in expected]


def test_an_image_at_the_end_of_a_row_is_its_own_next_text() -> None:
    assert next_text(torch.tensor([0, 1, 1]).bool()).tolist() == [0, 1, 2]


@pytest.mark.parametrize(("layout", "expected"), [("next", [1, 2, 23, 34]), ("own", [3, 1, 2, 34])])
def test_the_prompt_covers_the_whole_row(layout: Any, expected: list[int]) -> None:
    visual = torch.tensor([0, 1, 1, 0, 0]).bool()
    prompted = network(layout).prompt(numbered(5), numbered(5), visual)
    assert prompted.states[:, 0].tolist() == expected
    assert prompted.positions.tolist() == [0, 1, 2, 3]
