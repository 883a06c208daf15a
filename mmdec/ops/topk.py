"""Indices of the largest values of long rows."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 64  # columns whose maximum is compared first
FEW = 2**16  # up to so many values in all, plain `topk` is faster


def top_indices(values: Tensor, count: int) -> Tensor:
    """Indices of the largest values, largest first: (..., V) -> (..., count); fewer if V is smaller.

    The best values lie in the chunks with the best maxima, which is several times faster than `topk` over a large
    vocabulary.
    """
    size = values.shape[-1]
    chunks = size // CHUNK
    if chunks <= 2 * count or values.numel() <= FEW:
        return values.topk(min(count, size), dim=-1).indices
    body = values[..., : chunks * CHUNK].unflatten(-1, (chunks, CHUNK))
    best = body.amax(-1).topk(count, dim=-1).indices  # (..., count) chunks
    index = (best[..., None] * CHUNK + torch.arange(CHUNK, device=values.device)).flatten(-2)
    rest = torch.arange(chunks * CHUNK, size, device=values.device).expand(*index.shape[:-1], -1)
    index = torch.cat([index, rest], -1)
    return index.gather(-1, values.gather(-1, index).topk(count, dim=-1).indices)
