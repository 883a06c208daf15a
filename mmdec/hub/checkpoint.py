"""The content of a published drafter's folder before its format is known: config.json, and tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from mmdec.checks.weights import (
    WEIGHTS_FILE,
    WEIGHTS_INDEX,
    check_finite_weights,
    lies_inside,
    read_settings,
    read_weights,
    report_damage,
    weight_files,
)
from mmdec.errors import InputError
from mmdec.hub.find import DRAFTER_PICKLES

MAX_CHECKPOINT_BYTES = 16 * 2**30


@dataclass(frozen=True)
class Checkpoint:
    """A published drafter's folder that has been read: the content of config.json, and all tensors."""

    folder: Path
    config: Mapping[str, Any]  # the content of config.json
    state: Mapping[str, Tensor]  # the tensors by name
    argument: str  # name of the caller's argument that names the folder, for errors

    @classmethod
    def read(cls, folder: Path, argument: str) -> Checkpoint:
        """Read config.json and all tensors of a folder, from safetensors, else from a pickle.

        Args:
            argument: The caller's argument, for errors.
        """
        return cls(folder, read_settings(folder / "config.json", argument), read_tensors(folder, argument), argument)

    def error(self, rule: str, fault: str, remedy: str) -> InputError:
        """Make an InputError about this folder.

        Its message says what the folder must do (rule), what is wrong (fault), and what the caller can do (remedy).
        """
        return InputError(f"`{self.argument}` must {rule}, but '{self.folder}' {fault}. {remedy}")

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a matrix.

        Args:
            name: The tensor's name.

        Raises:
            InputError: If the tensor is missing or no matrix.
        """
        tensor = self.state.get(name)
        if tensor is None or tensor.dim() != 2 or not tensor.numel():
            raise self.error(f"hold '{name}'", "does not", "Name a draft network's folder.")
        return tensor.shape


def tensor_names(folder: Path, argument: str) -> frozenset[str]:
    """Return the names of the tensors in a folder.

    In safetensors files, only the names are read; a pickle is read completely.
    """
    if (folder / WEIGHTS_INDEX).is_file() and not (folder / WEIGHTS_FILE).is_file():
        names = read_settings(folder / WEIGHTS_INDEX, argument).get("weight_map")
        return frozenset(names) if isinstance(names, dict) else frozenset()
    if (folder / WEIGHTS_FILE).is_file():
        with (
            report_damage(f"`{argument}` must hold whole safetensors, but '{folder / WEIGHTS_FILE}' is damaged"),
            safe_open(folder / WEIGHTS_FILE, framework="pt") as opened,
        ):
            return frozenset(opened.keys())
    return frozenset(read_tensors(folder, argument)) if _pickle(folder) else frozenset()


def _pickle(folder: Path) -> Path | None:
    return next((folder / name for name in DRAFTER_PICKLES if (folder / name).is_file()), None)


def read_tensors(folder: Path, argument: str) -> dict[str, Tensor]:
    """Return all tensors of a folder by name, from its safetensors, else from its pickle.

    From the pickle, only tensors are read.
    """
    file = _pickle(folder)
    if (folder / WEIGHTS_FILE).is_file() or (folder / WEIGHTS_INDEX).is_file() or file is None:
        return read_weights(weight_files(folder, argument), argument)
    if not lies_inside(file, folder):
        raise InputError(
            f"`{argument}` must hold its weights in its own folder, but '{file}' lies outside. Copy it there."
        )
    if file.stat().st_size > MAX_CHECKPOINT_BYTES:
        raise InputError(
            f"`{argument}` must hold at most {MAX_CHECKPOINT_BYTES} bytes, but '{file}' has more. Name a draft "
            "network's."
        )
    with report_damage(f"`{argument}` must hold named tensors, but '{file}' does not"):
        state = torch.load(file, map_location="cpu", weights_only=True)
        if not isinstance(state, Mapping) or not all(
            isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items()
        ):
            raise ValueError("it holds something else than named tensors")
    check_finite_weights(state, file, argument)
    return dict(state)
