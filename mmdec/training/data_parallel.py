"""Several processes train as one with a larger batch: each takes its rows of every batch, and losses weigh by tokens.

DDP and FSDP average the processes' gradients. A mean over one process's tokens would give a token of a short batch more
weight than one of a long batch; `token_weight` corrects this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def rows_of(batches: Sequence[Sequence[T]], rank: int, world: int) -> list[list[T]]:
    """The rows of every batch that process `rank` of `world` takes. All leave out a batch with fewer rows than
    processes."""
    return [list(batch[rank::world]) for batch in batches if len(batch) >= world]


def token_weight(count: Tensor) -> Tensor:
    """The factor on this process's mean loss over `count` tokens, so that the processes' average is the mean over all
    of their tokens: count / (the mean count of all processes).

    count: any shape, several counts at once; the same shape in every process. Returns the factors, 1 in a lone process
        and without gradients: validation may have a batch in one process that no other has.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized() and torch.is_grad_enabled()):
        return torch.ones_like(count, dtype=torch.float32)
    total = count.detach().to(torch.float32, copy=True)
    torch.distributed.all_reduce(total)
    return count * torch.distributed.get_world_size() / total.clamp(min=1)
