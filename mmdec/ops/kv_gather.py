"""Keeps the accepted path's columns of a key-value cache, in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mmdec.ops.kernels import runs_on

PATH = 64  # maximum columns of a row that the kernel reads before it writes, so that they may move anywhere


def kv_gather(kv: Tensor, columns: Sequence[Sequence[int]], begins: Sequence[int]) -> None:
    """Move columns of kv (..., B, H, S, D): row r's `columns[r]` go to `begins[r]`, `begins[r] + 1`, ... in that order.

    Source and target may overlap. Columns that are in place already are not moved. All leading dimensions (layers, keys
    and values) move in the same way.
    """
    if kv.device.type == "cpu":
        copy_rows(kv, columns, begins)
    elif kv.dim() <= 5 and runs_on(kv.device) and fits(columns, begins):
        from mmdec.ops.kv_gather_triton import kv_gather_triton

        kv_gather_triton(kv, columns, begins)
    else:
        index_rows(kv, columns, begins)


def copy_rows(kv: Tensor, columns: Sequence[Sequence[int]], begins: Sequence[int]) -> None:
    """Move columns as `kv_gather` does, with two copies for each row: on a CPU, in a third of the time of indexing."""
    for row, (path, begin) in enumerate(zip(columns, begins, strict=True)):
        first = next((step for step, column in enumerate(path) if column != begin + step), len(path))
        if first < len(path):
            cells = kv.select(-4, row)  # (..., H, S, D)
            source = cells.index_select(-2, torch.tensor(path[first:], device=kv.device))
            cells.narrow(-2, begin + first, len(path) - first).copy_(source)


def index_rows(kv: Tensor, columns: Sequence[Sequence[int]], begins: Sequence[int]) -> None:
    """Move columns as `kv_gather` does, all rows in a few launches, for a GPU without the kernel."""
    moves = [
        (row, column, begin + step)
        for row, (path, begin) in enumerate(zip(columns, begins, strict=True))
        for step, column in enumerate(path)
        if column != begin + step
    ]
    if moves:
        rows, sources, targets = torch.tensor(moves, device=kv.device).unbind(1)
        cells = kv.movedim((-4, -2), (0, 1))  # (B, S, ..., H, D)
        cells[rows, targets] = cells[rows, sources]


def fits(columns: Sequence[Sequence[int]], begins: Sequence[int]) -> bool:
    """Return whether the kernel can move these columns: each row has at most `PATH`, or its columns ascend and move to
    lower indices."""
    for path, begin in zip(columns, begins, strict=True):
        ascending = all(a < b for a, b in pairwise(path))
        if len(path) > PATH and not (ascending and path[0] >= begin):
            return False
    return True
