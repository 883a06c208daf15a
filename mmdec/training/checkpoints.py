"""Lightning's checkpoints: read without running code, the newest ones of a folder, and their average."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdec.checks.errors import InputError
from mmdec.checks.weights import check_finite_weights


def read_checkpoint(path: Path) -> dict[str, Any]:
    """One Lightning checkpoint, tensors and plain values only. Raises InputError for one that is damaged, holds more
    than that, or weights that are not finite."""
    try:
        checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        state: dict[str, Tensor] = checkpoint["state_dict"]
    except Exception as error:  # a damaged pickle may raise anything
        raise InputError(
            f"`checkpoint` must hold whole tensors and plain values, but '{path}' does not ({type(error).__name__}: "
            f"{error!s:.300}). Train again, or take an earlier one."
        ) from error
    check_finite_weights(state, path, "checkpoint")
    return checkpoint


def newest(folder: Path, count: int) -> list[Path]:
    """The last `count` checkpoints by step, without last.ckpt's copy."""
    numbered = sorted(
        (path for path in folder.glob("step=*.ckpt")), key=lambda path: int(path.stem.removeprefix("step="))
    )
    if not numbered:
        raise InputError(f"`folder` must hold checkpoints, but '{folder}' holds none. Train first.")
    return numbered[-count:]


def average(states: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several state dicts; integers are taken from the last."""
    total: dict[str, Tensor] = {}
    count = 0
    for state in states:
        count += 1
        for name, value in state.items():
            total[name] = (
                total[name] + value.double()
                if name in total and value.is_floating_point()
                else (value.double() if value.is_floating_point() else value)
            )
    return {name: (value / count).float() if value.is_floating_point() else value for name, value in total.items()}
