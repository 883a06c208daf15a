"""Compressors of visual tokens against hand-computed examples and naive loops."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mmdec.drafters.networks.compressors import (
    Convolution,
    LatentAttention,
    Pool,
    Prune,
    Resampler,
    TextOnly,
    image_spans,
    last_positions,
    separate_positions,
)
from mmdec.errors import InputError


def states(length: int, size: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(length, size, generator=torch.Generator().manual_seed(seed))


def test_pooling_averages_neighbours() -> None:
    result = Pool(2)(torch.tensor([[1.0], [3.0], [10.0], [20.0]]))
    assert result.states.tolist() == [[2.0], [15.0]]
    assert result.visual_weights.tolist() == [0.5] * 4
    assert result.positions.tolist() == [1, 3]  # the middle, 0.5, counts as the later one


def test_pooling_on_a_grid_takes_squares() -> None:
    grid = torch.arange(16.0)[:, None]  # 4 x 4
    result = Pool(4, (4, 4))(grid)
    assert result.states[:, 0].tolist() == [2.5, 4.5, 10.5, 12.5]
    assert Pool(4, (4, 4))(grid[:15]).states.shape == (4, 1)  # not of that grid: along the sequence


@pytest.mark.parametrize(("length", "ratio"), [(64, 20), (7, 3), (1, 20), (5, 1), (576, 3)])
def test_pooling_is_adaptive_pooling(length: int, ratio: int) -> None:
    image = states(length)
    count = -(-length // ratio)
    torch.testing.assert_close(Pool(ratio)(image).states, nn.functional.adaptive_avg_pool1d(image.T, count).T)


@pytest.mark.parametrize(("grid", "ratio"), [((8, 8), 20), ((8, 8), 3), ((24, 24), 20), ((3, 7), 5)])
def test_grid_pooling_is_adaptive_pooling_in_two_dimensions(grid: tuple[int, int], ratio: int) -> None:
    rows, columns = grid
    image, pool = states(rows * columns), Pool(ratio, grid)
    result = pool(image)
    down = max(1, round(rows / ratio**0.5))
    across = len(result.states) // down
    plain = nn.functional.adaptive_avg_pool2d(image.T.view(-1, rows, columns), (down, across)).flatten(1).T
    torch.testing.assert_close(result.states, plain)
    assert abs(len(result.states) - len(image) / ratio) <= 0.3 * len(image) / ratio + 1
    assert len(set(result.positions.tolist())) == len(result.positions)  # a column holds one state
    assert result.positions.tolist() == sorted(result.positions.tolist())


def test_pruning_keeps_the_same_tokens_in_each_call() -> None:
    prune, image = Prune(4).eval(), states(40)
    before = torch.random.get_rng_state()
    result = prune(image)
    assert torch.equal(torch.random.get_rng_state(), before)  # a sampled text must not change
    assert torch.equal(result.positions, prune(states(40, seed=1)).positions)
    assert len(result.positions) == 10
    assert torch.equal(result.states, image[result.positions])
    assert result.visual_weights.tolist() == [float(place in result.positions.tolist()) for place in range(40)]


def test_pruning_draws_other_tokens_in_training() -> None:
    prune = Prune(4).train()
    assert len({tuple(prune.indices(40).tolist()) for _ in range(10)}) > 1


def test_strided_pruning_keeps_each_nth_token() -> None:
    assert Prune(4, "strided")(states(10)).positions.tolist() == [0, 4, 8]


def test_a_new_convolution_averages_each_window() -> None:
    image = states(7, 2)
    result = Convolution(2, 3)(image)
    filled = torch.cat([image, image[-1:], image[-1:]]).view(3, 3, 2)
    torch.testing.assert_close(result.states, filled.mean(1))
    assert result.positions.tolist() == [1, 4, 6]


def test_convolution_equals_a_hand_computation() -> None:
    conv, image = Convolution(2, 3), states(7, 2)
    filled = torch.cat([image, image[-1:], image[-1:]]).view(3, 3, 2)
    nn.init.normal_(conv.conv.weight)
    weight = conv.conv.weight  # (out, in, 3)
    plain = [sum(weight[:, :, k] @ window[k] for k in range(3)) for window in filled]
    torch.testing.assert_close(conv(image).states, torch.stack(plain))  # type: ignore[arg-type] # sums of tensors
    depthwise = Convolution(2, 3, depthwise=True)
    assert depthwise.conv.weight.numel() == 6
    nn.init.normal_(depthwise.conv.weight)
    torch.testing.assert_close(depthwise(image).states, depthwise.conv(filled.flatten(0, 1).T[None])[0].T)
    assert Convolution(1, 3, depthwise=True)(image[:, :1]).states.shape == (3, 1)


def test_latent_attention_is_the_papers_formula() -> None:
    latent, image = LatentAttention(4, 3), states(9)
    result = latent(image)
    torch.testing.assert_close(result.states, torch.softmax(latent.latents @ image.T, -1) @ image)
    assert result.positions.tolist() == [1, 4, 7]
    with torch.no_grad():
        latent.latents.copy_(torch.tensor([[0.0] * 4, [0.0] * 4, [0.0] * 4]))
    torch.testing.assert_close(latent(image).states, image.mean(0).expand(3, -1))  # no preference: the mean
    assert latent(image[:2]).states.shape == (2, 4)


def test_latent_attention_equals_a_hand_computation() -> None:
    latent = LatentAttention(1, 1)
    with torch.no_grad():
        latent.latents.fill_(1.0)
    image = torch.tensor([[0.0], [2.0]]).log1p()  # exponentials 1 and 3: shares 1/4 and 3/4
    assert float(latent(image).states.detach()) == pytest.approx(0.75 * float(image[1]))


def test_the_resampler_equals_a_loop() -> None:
    resampler, image = Resampler(8, 3, 2, bias=True), states(5, 8)
    keys, values = resampler.k_proj(image).view(5, 2, 4), resampler.v_proj(image).view(5, 2, 4)
    rows = []
    for query in resampler.q:
        heads = []
        for head in range(2):
            weights = torch.softmax(torch.stack([query[head] @ key for key in keys[:, head]]) / 2.0, 0)
            heads.append(sum(w * value for w, value in zip(weights, values[:, head], strict=True)))
        rows.append(resampler.o_proj(torch.cat(heads)))  # type: ignore[arg-type] # sums of tensors
    result = resampler(image)
    torch.testing.assert_close(result.states, torch.stack(rows))
    assert result.positions.tolist() == [2, 3, 4]
    with pytest.raises(InputError, match="`heads` must divide 8"):
        Resampler(8, 2, 3)


def test_text_only_returns_no_columns() -> None:
    result = TextOnly()(states(6))
    assert result.states.shape == (0, 4)
    assert result.visual_weights.tolist() == [0.0] * 6


def test_adjacent_images_are_separated_by_length() -> None:
    visual = torch.tensor([0, 1, 1, 0, 1, 1, 1, 1], dtype=torch.bool)
    assert image_spans(visual) == [(1, 3), (4, 8)]
    assert image_spans(visual, (1, 2)) == [(1, 3), (4, 6), (6, 8)]
    assert image_spans(visual, (3, 1)) == [(1, 3), (4, 8)]  # lengths that are no whole images stay together
    assert image_spans(visual[:1]) == []


def test_duplicate_positions_become_distinct() -> None:
    assert separate_positions(torch.tensor([2, 2, 2, 5]), 8).tolist() == [2, 3, 4, 5]
    assert separate_positions(torch.tensor([7, 7, 7]), 8).tolist() == [5, 6, 7]
    assert last_positions(5, 2, torch.device("cpu")).tolist() == [3, 4]


def test_a_ratio_must_be_positive() -> None:
    with pytest.raises(InputError, match="`ratio` must be at least 1, but is 0"):
        Pool(0)
