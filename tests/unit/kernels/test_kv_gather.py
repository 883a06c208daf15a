"""Compares kv_gather, as on CPUs and as on GPUs, with a loop that moves one column after the other into a copy."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mmdec.kernels.kv_gather import copy_rows, index_rows, kv_gather

SHAPES = [(1, 2, 12, 3), (3, 2, 12, 3), (4, 1, 2, 12, 3), (4, 3, 2, 12, 3), (2, 2, 3, 2, 12, 3)]
Gather = Callable[[Tensor, list[list[int]], list[int]], None]
ways = pytest.mark.parametrize("gather", [copy_rows, index_rows])


def moved(kv: Tensor, columns: list[list[int]], begins: list[int]) -> Tensor:
    """Compute it by the definition: read from the original, write into a copy."""
    out = kv.clone()
    for row, (path, begin) in enumerate(zip(columns, begins, strict=True)):
        for step, column in enumerate(path):
            out[..., row, :, begin + step, :] = kv[..., row, :, column, :]
    return out


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(8))
@ways
def test_paths_move_to_their_rows_own_ends(gather: Gather, shape: tuple[int, ...], seed: int) -> None:
    rng = random.Random(seed)
    kv = torch.rand(shape)
    columns, begins = [], []
    for _ in range(shape[-4]):
        path = sorted(rng.sample(range(12), rng.randint(0, 5)))
        columns.append(path)
        begins.append(rng.randint(0, path[0] if path else 12))
    expected = moved(kv, columns, begins)
    gather(kv, columns, begins)
    assert torch.equal(kv, expected)


@pytest.mark.parametrize("batch", [1, 2])
@ways
def test_overlapping_ranges_are_read_before_they_are_written(gather: Gather, batch: int) -> None:
    kv = torch.arange(8.0).view(1, 1, 8, 1).repeat(batch, 1, 1, 1)
    gather(kv, [[2, 1, 3]] * batch, [1] * batch)  # 1 and 2 change places, 3 stays
    assert kv[0, 0, :, 0].tolist() == [0, 2, 1, 3, 4, 5, 6, 7]
    gather(kv, [[3, 4, 5, 6]] * batch, [2] * batch)
    assert kv[-1, 0, :, 0].tolist() == [0, 2, 3, 4, 5, 6, 6, 7]


@ways
def test_columns_between_moves_stay(gather: Gather) -> None:
    kv = torch.arange(8.0).view(1, 1, 8, 1)
    gather(kv, [[6, 2, 7]], [1])
    assert kv[0, 0, :, 0].tolist() == [0, 6, 2, 7, 4, 5, 6, 7]


@ways
def test_columns_in_place_are_not_written(gather: Gather) -> None:
    kv = torch.rand(2, 3, 2, 9, 4)
    version = kv._version
    gather(kv, [[4, 5, 6], [], [0]], [4, 9, 0])
    assert kv._version == version


def test_a_strided_view_is_changed_in_place() -> None:
    pool = torch.rand(2, 3, 10, 4)
    expected = moved(pool, [[5], [7, 8]], [2, 2])
    kv_gather(pool[:, :, :9], [[5], [7, 8]], [2, 2])
    assert torch.equal(pool, expected)
