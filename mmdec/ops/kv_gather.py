"""Keeps the accepted path's columns of a key or value cache, in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def kv_gather(kv: Tensor, columns: Sequence[Sequence[int]], begins: Sequence[int]) -> None:
    """Move columns of kv (..., B, H, S, D): row r's `columns[r]` go to `begins[r]`, `begins[r] + 1`, ... in that order.

    Everything is read before anything is written, so that the two ranges may overlap. What lies in place already is not
    touched, and where that is all, nothing runs. Leading dimensions (layers, keys and values) move together.
    """
    moves = [
        (row, column, begin + step)
        for row, (path, begin) in enumerate(zip(columns, begins, strict=True))
        for step, column in enumerate(path)
        if column != begin + step
    ]
    if not moves:
        return
    if kv.shape[-4] == 1:
        first, count = moves[0][2], len(moves)
        if moves[-1][2] - first + 1 == count:  # one run of targets: two plain copies beat an indexed write
            source = torch.tensor([column for _, column, _ in moves], device=kv.device)
            kv.narrow(-2, first, count).copy_(kv.index_select(-2, source))
            return
    rows, sources, places = torch.tensor(moves, device=kv.device).unbind(1)
    cells = kv.movedim((-4, -2), (0, 1))  # (B, S, ..., H, D)
    cells[rows, places] = cells[rows, sources]
