"""Dropout with precomputed random numbers for CPUs.

On a CPU the random numbers of `nn.Dropout` took a quarter of a training step of the small model. `PooledDropout` draws
a pool of masks once and uses a random window of it in each call; on other devices it is plain dropout.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmdec.types import InputError

_POOL_SIZE = 1 << 23
_pools: dict[float, Tensor] = {}


def _pool(p: float) -> Tensor:
    """A pool of scaled masks, drawn from a generator of its own. (int8 masks would need a cast at each use.)"""
    if p not in _pools:
        generator = torch.Generator().manual_seed(0x5EED)
        keep = torch.rand(_POOL_SIZE, generator=generator) >= p
        _pools[p] = (keep.to(torch.float32) / (1.0 - p)).to(torch.bfloat16)
    return _pools[p]


class PooledDropout(nn.Module):
    """Replaces `nn.Dropout(p)`. The window's offset comes from torch's global generator, so seeding works."""

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise InputError(f"`p` must be in [0, 1), but is {p}. It is the share of numbers set to zero.")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        size = x.numel()
        if x.device.type != "cpu" or size >= _POOL_SIZE:
            return F.dropout(x, self.p, True)
        start = int(torch.randint(_POOL_SIZE - size, ()))
        return x * _pool(self.p)[start : start + size].view(x.shape).to(x.dtype)

    def extra_repr(self) -> str:
        return f"p={self.p}"
