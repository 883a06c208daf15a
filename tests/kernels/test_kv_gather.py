"""Compares the kernel that moves cached columns with a loop over the columns."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreter import DEVICE  # before the kernels

from mmdec.kernels import kv_gather_triton  # isort: skip
from mmdec.kernels.kv_gather import kernel_fits
from tests.kernels.kv_gather_cases import agrees, moved


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((4, 3, 2, 12, 5), torch.float32),
        ((2, 2, 2, 12, 4), torch.bfloat16),
        ((1, 1, 12, 3), torch.float64),
        ((4, 2, 2, 12, 8), torch.float16),
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_moves_equal_the_definition(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    assert agrees(kv_gather_triton, shape, dtype, seed)


def test_overlapping_ranges_are_read_before_they_are_written() -> None:
    kv = torch.arange(8.0).view(1, 1, 8, 1).to(DEVICE)
    kv_gather_triton.kv_gather_triton(kv, [[2, 1, 3]], [1])  # 1 and 2 change places, 3 stays
    assert kv[0, 0, :, 0].tolist() == [0, 2, 1, 3, 4, 5, 6, 7]


def test_long_moves_go_in_parts() -> None:
    """Holes of a prompt: more columns than are read at once, ascending and moving down."""
    path = [column for column in range(3, 230) if column % 3]
    assert kernel_fits([path], [1])
    kv = torch.rand(2, 1, 1, 230, 2).to(DEVICE)
    expected = moved(kv, [path], [1])
    kv_gather_triton.kv_gather_triton(kv, [path], [1])
    assert torch.equal(kv, expected)


@pytest.mark.parametrize(("path", "begin"), [([*range(70, 0, -1)], 1), ([*range(0, 70)], 5)])
def test_moves_that_parts_would_corrupt_are_refused(path: list[int], begin: int) -> None:
    assert not kernel_fits([path], [begin])


def test_columns_in_place_are_not_written() -> None:
    kv = torch.rand(2, 3, 2, 9, 4)
    version = kv._version
    kv_gather_triton.kv_gather_triton(kv, [[4, 5, 6], [], [0]], [4, 9, 0])
    assert kv._version == version
