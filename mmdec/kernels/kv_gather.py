"""Moves the keys and values of the accepted tokens together in a key-value cache, in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from mmdec.kernels.availability import runs_on

PATH = 64  # maximum entries of a row that the Triton kernel reads before it writes; up to 64, any move is possible


def kv_gather(kv: Tensor, columns: Sequence[Sequence[int]], begins: Sequence[int]) -> None:
    """Move the entries of some tokens in a key-value cache, in place.

    Source and destination may overlap. Entries that are in place already are not moved.

    Args:
        kv: (..., B, H, S, D): B rows, H key heads, S tokens; leading dimensions (layers, keys and values) are moved in
            the same way.
        columns: For each row, the indices (0 .. S - 1) of the entries to move.
        begins: For each row, the index to which the first of these entries moves; the next entries follow it in order.
    """
    if kv.device.type == "cpu":
        copy_rows(kv, columns, begins)
    elif kv.dim() <= 5 and runs_on(kv.device) and kernel_fits(columns, begins):
        from mmdec.kernels.kv_gather_triton import kv_gather_triton

        kv_gather_triton(kv, columns, begins)
    else:
        index_rows(kv, columns, begins)


def copy_rows(kv: Tensor, columns: Sequence[Sequence[int]], begins: Sequence[int]) -> None:
    """Move cache entries row by row, with two copies for each row.

    On a CPU this takes a third of the time of indexing.

    Args:
        kv: (..., B, H, S, D).
        columns: For each row, the indices of the entries to move.
        begins: For each row, the index to which the first one moves.
    """
    for row, (path, begin) in enumerate(zip(columns, begins, strict=True)):
        first = next((step for step, column in enumerate(path) if column != begin + step), len(path))
        if first < len(path):
            cells = kv.select(-4, row)  # shape (..., H, S, D)
            source = cells.index_select(-2, torch.tensor(path[first:], device=kv.device))
            cells.narrow(-2, begin + first, len(path) - first).copy_(source)


def index_rows(kv: Tensor, columns: Sequence[Sequence[int]], begins: Sequence[int]) -> None:
    """Move the cache entries of all rows in a few operations, on a GPU where the Triton kernel cannot be used.

    Args:
        kv: (..., B, H, S, D).
        columns: For each row, the indices of the entries to move.
        begins: For each row, the index to which the first one moves.
    """
    moves = [
        (row, column, begin + step)
        for row, (path, begin) in enumerate(zip(columns, begins, strict=True))
        for step, column in enumerate(path)
        if column != begin + step
    ]
    if moves:
        rows, sources, targets = torch.tensor(moves, device=kv.device).unbind(1)
        cells = kv.movedim((-4, -2), (0, 1))  # shape (B, S, ..., H, D)
        cells[rows, targets] = cells[rows, sources]


def kernel_fits(columns: Sequence[Sequence[int]], begins: Sequence[int]) -> bool:
    """Return whether the Triton kernel can do these moves.

    Each row must move at most `PATH` entries, or its indices must ascend and each entry move to a lower index.

    Args:
        columns: For each row, the indices of the entries to move.
        begins: For each row, the index to which the first one moves.
    """
    for path, begin in zip(columns, begins, strict=True):
        ascending = all(a < b for a, b in pairwise(path))
        if len(path) > PATH and not (ascending and path[0] >= begin):
            return False
    return True
