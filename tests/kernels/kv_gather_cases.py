"""Compares the kernel that moves cached columns with a plain loop."""

from __future__ import annotations

import random
from types import ModuleType

import torch
from torch import Tensor

from tests.kernels.interpreter import DEVICE  # before the kernels


def moved(kv: Tensor, columns: list[list[int]], begins: list[int]) -> Tensor:
    """Move columns by a plain loop: read from the original, write into a copy."""
    out = kv.clone()
    for row, (path, begin) in enumerate(zip(columns, begins, strict=True)):
        for step, column in enumerate(path):
            out[..., row, :, begin + step, :] = kv[..., row, :, column, :]
    return out


def random_moves(rows: int, width: int, seed: int, most: int = 9) -> tuple[list[list[int]], list[int]]:
    rng = random.Random(seed)
    columns = [sorted(rng.sample(range(width), rng.randint(0, most))) for _ in range(rows)]
    return columns, [rng.randint(0, path[0]) if path else width for path in columns]


def agrees(module: ModuleType, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> bool:
    """Return whether the kernel's result equals that of `moved`."""
    torch.manual_seed(seed)
    pool = torch.rand(*shape[:-2], shape[-2] + 3, shape[-1]).to(DEVICE, dtype)
    kv = pool[..., : shape[-2], :]  # a view that is not contiguous
    columns, begins = random_moves(shape[-4], shape[-2], seed)
    expected = moved(kv, columns, begins)
    module.kv_gather_triton(kv, columns, begins)
    return torch.equal(kv, expected)
