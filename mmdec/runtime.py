"""Dtypes and progress messages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

CPU = torch.device("cpu")
Log = Callable[[str], None]  # receives a progress message


def no_log(line: str) -> None:
    """Drop the line."""


def dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype of a network's first parameter."""
    return next(module.parameters()).dtype
