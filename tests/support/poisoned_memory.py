"""Fills new tensors with NaN, or the least integer, so that cells which a kernel does not write show in the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor


def _filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def empty(*args: Any, **kwargs: Any) -> Tensor:
        made = make(*args, **kwargs)
        return made.fill_(torch.nan if made.is_floating_point() else torch.iinfo(made.dtype).min)

    return empty


@contextmanager
def poisoned() -> Iterator[None]:
    """Within the block, let `torch.empty` and `torch.empty_like` fill their tensors with NaN or the least integer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", _filled(torch.empty))
        patch.setattr(torch, "empty_like", _filled(torch.empty_like))
        yield
