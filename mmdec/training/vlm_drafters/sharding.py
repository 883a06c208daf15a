"""What differs where the drafter's weights are sharded over processes (`--trainer.strategy=fsdp`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def sharded(trainer: Trainer) -> FullyShardedDataParallel | None:
    """The wrapper that holds the shards; None where every process has all weights."""
    wrapped: nn.Module | None = trainer.strategy.model
    return wrapped if isinstance(wrapped, FullyShardedDataParallel) else None


@contextmanager
def whole_weights(trainer: Trainer) -> Iterator[None]:
    """Inside, every process has all weights, for reading. All processes must enter."""
    wrapped = sharded(trainer)
    if wrapped is None:
        yield
        return
    with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
        yield
