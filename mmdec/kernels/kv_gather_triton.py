"""Moves entries of a key-value cache in all layers by one kernel launch, in place.

Each program moves the entries of one head in one row of one layer's keys or values, which no other program accesses. It
reads up to `PATH` entries before it writes the first one, so source and destination may overlap in any order. Moves of
more entries (they remove padding inside a prompt) are done `PATH` entries at a time. This is safe if indices ascend and
entries move to lower indices.

It copies bits, so it works for any dtype.
"""

# A kernel is Triton's language in Python's syntax; which of it type checkers follow changes with Triton's release.
# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mmdec.kernels.availability import launch
from mmdec.kernels.kv_gather import PATH

WORD_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@triton.jit(do_not_specialize=["longest"])
def _move(
    first, offsets, begins, counts, sources, longest,
    row_stride, head_stride, column_stride, width_stride,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """Move cache entries along the token axis.

    Args:
        sources: (B, longest), indices of the entries of each row. Row b moves its first counts[b] of them to begins[b],
            begins[b] + 1, ...
    """
    row, head, layer = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS, tl.program_id(1)
    cells = first + tl.load(offsets + layer) + row.to(tl.int64) * row_stride + head.to(tl.int64) * head_stride
    begin, count = tl.load(begins + row), tl.load(counts + row)
    d = tl.arange(0, BLOCK_D)
    for start in range(0, count, PATH):
        step = start + tl.arange(0, PATH)
        mask = (step < count)[:, None] & (d < WIDTH)[None]
        source = tl.load(sources + row * longest + step, mask=step < count, other=0).to(tl.int64)
        target = (begin + step).to(tl.int64)
        bits = tl.load(cells + source[:, None] * column_stride + d[None] * width_stride, mask=mask, other=0)
        tl.debug_barrier()  # source and destination overlap, so all reads must end before the first write
        tl.store(cells + target[:, None] * column_stride + d[None] * width_stride, bits, mask=mask)
        tl.debug_barrier()


def kv_gather_triton(kv: Tensor, columns: Sequence[Sequence[int]], begins: Sequence[int]) -> None:
    """Move the cache entries with indices `columns[r]` of each row r to `begins[r]`, `begins[r] + 1`, ... in place.

    Leading entries that are in place already are skipped; if all are, nothing is launched. Requires that `fits(columns,
    begins)` is True.

    Args:
        kv: (layers, B, H, S, D), or (B, H, S, D).
    """
    paths, targets = [], []
    for path, begin in zip(columns, begins, strict=True):
        skipped = next((step for step, column in enumerate(path) if column != begin + step), len(path))
        paths.append(list(path[skipped:]))
        targets.append(begin + skipped)
    longest = max(map(len, paths), default=0)
    if longest == 0:
        return
    layers = kv if kv.dim() == 5 else kv[None]
    numbers = [*targets, *map(len, paths), *(column for path in paths for column in path + [0] * (longest - len(path)))]
    moves = torch.tensor(numbers, dtype=torch.int32)
    moves = moves.pin_memory().to(kv.device, non_blocking=True) if kv.device.type == "cuda" else moves
    rows, offsets = len(paths), torch.arange(len(layers), device=kv.device) * layers.stride(0)
    first = layers[0].view(WORD_DTYPES[kv.element_size()])
    _, heads, _, width = first.shape
    launch(_move, (rows * heads, len(offsets)))(
        first, offsets, moves[:rows], moves[rows : 2 * rows], moves[2 * rows :], longest,
        *first.stride(),
        HEADS=heads, WIDTH=width, BLOCK_D=triton.next_power_of_2(width), PATH=PATH, num_warps=4,
    )  # fmt: skip
