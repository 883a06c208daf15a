"""Converts a speech encoder's weights from and to fairseq2's `s2t_conformer`.

`mmdec convert fairseq2` reads a checkpoint of fairseq2, and writes weights with which mmdec's training can begin
(`mmdec.daspeech.training.module.InitialWeights`). `mmdec export fairseq2` writes a network's encoder under fairseq2's
names. Supported version: fairseq2 0.8.1 (docs/train/fairseq2.md).
"""

from __future__ import annotations

import os
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from mmdec.checks.files import write_atomically
from mmdec.checks.weights import check_finite_weights, read_pickle, read_weights
from mmdec.errors import InputError
from mmdec.nn.conformer import from_fairseq2, to_fairseq2

PREFIX = "encoder."  # prefix of the encoder's tensor names in a DASpeech network


def convert_fairseq2(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Convert the encoder of a fairseq2 `s2t_conformer` to safetensors with the tensor names of a DASpeech network.

    Args:
        source: A .pt or .safetensors file of fairseq2: a state dict, or a dict with a state dict under "model".
        target: The file to write.

    Returns:
        `target`.

    Raises:
        InputError: If the file is no such checkpoint. From a pickle, only tensors are read.
    """
    ours = from_fairseq2(_read(Path(source)))
    return _write({PREFIX + name: value for name, value in ours.items()}, Path(target))


def export(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Path:
    """Convert a network's encoder to safetensors with fairseq2's tensor names.

    Args:
        source: Safetensors of a DASpeech network, such as a translator's model.safetensors.
        target: The file to write.

    Returns:
        `target`.

    Raises:
        InputError: If the network has no Conformer encoder.
    """
    state = read_weights([Path(source)], "source")
    weights = {name.removeprefix(PREFIX): value for name, value in state.items() if name.startswith(PREFIX)}
    return _write(to_fairseq2(weights), Path(target))


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return read_weights([path], "source")
    stored = read_pickle(path, "Save only its `model`.")
    state = stored.get("model", stored) if isinstance(stored, dict) else None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(f"`source` must hold a state dict, or one as `model`, but '{path}' does not. Save it again.")
    check_finite_weights(state, path, "source")
    return state


def _write(state: dict[str, Tensor], path: Path) -> Path:
    if path.suffix != ".safetensors":
        raise InputError(f"`target` must end in .safetensors, but is '{path}'.")
    write_atomically(path, save({name: value.contiguous() for name, value in state.items()}))
    return path
