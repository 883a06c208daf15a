"""MSD's switch between visual and text columns, on a text of nine tokens whose columns are told apart by eye."""

from __future__ import annotations

import torch
from torch import Tensor

from mmdec.nn.msd import MsdConfig, MsdNetwork, next_text


def network(**changes: bool) -> MsdNetwork:
    """fc adds the embedding and ten times the feature: what a column reads can be read off its digits."""
    made = MsdNetwork(MsdConfig(2, 9, 4, 1, 1, 2, fc_bias=False, **changes))
    eye = torch.eye(2)
    with torch.no_grad():
        made.fc.weight.copy_(torch.cat([eye, 10 * eye], 1))
    return made


def numbered(length: int) -> Tensor:
    """(1, length, 2): column t holds t."""
    return torch.arange(length).float()[None, :, None].expand(-1, -1, 2)


def entered(visual: list[int], **changes: bool) -> list[int]:
    """What enters the layer: t for the embedding of column t itself, else embedding + 10 times the feature's column."""
    size = len(visual)
    states = network(**changes).inputs(numbered(size), numbered(size), torch.tensor([visual]).bool())
    assert torch.equal(states[..., 0], states[..., 1])
    return [int(value) for value in states[0, :, 0]]


def test_text_is_fused_and_an_image_is_taken_as_it_is() -> None:
    # columns 2, 3, 4 are the image: 1 reads token 5, the first after it; 2, 3, 4 are themselves; 5 reads token 6
    assert entered([0, 0, 1, 1, 1, 0, 0, 0]) == [1, 10 + 5, 2, 3, 4, 50 + 6, 60 + 7]


def test_each_image_is_followed_by_its_own_text() -> None:
    assert entered([0, 1, 0, 0, 1, 1, 0]) == [2, 1, 20 + 3, 30 + 6, 4, 5]


def test_the_next_token_may_be_the_images_own() -> None:
    assert entered([0, 0, 1, 1, 0, 0], text_after_image=False) == [1, 10 + 2, 2, 3, 40 + 5]


def test_an_image_at_the_beginning_or_the_end() -> None:
    assert entered([1, 1, 0, 0]) == [0, 1, 20 + 3]
    assert entered([0, 0, 1, 1]) == [1, 10 + 2, 2]  # nothing follows: the image's own first
    assert next_text(torch.tensor([[0, 1, 1]]).bool()).tolist() == [[0, 1, 2]]


def test_without_an_image_it_is_eagle() -> None:
    assert entered([0, 0, 0]) == [1, 10 + 2]


def test_rows_of_a_batch_have_their_own_images() -> None:
    visual = torch.tensor([[0, 1, 0, 0], [0, 0, 1, 0]]).bool()
    both = numbered(4).expand(2, -1, -1)
    states = network().inputs(both, both, visual)[..., 0]
    assert states.tolist() == [[2, 1, 23], [1, 13, 2]]


def test_the_prompt_is_the_whole_row() -> None:
    visual = torch.tensor([0, 1, 1, 0, 0]).bool()
    prompted = network().prompt(numbered(5)[0], numbered(5)[0], visual)
    assert prompted.states[:, 0].tolist() == [3, 1, 2, 34]
    assert prompted.positions.tolist() == [0, 1, 2, 3]
