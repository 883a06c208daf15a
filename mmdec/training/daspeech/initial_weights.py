"""Weights that a stage of DASpeech's training starts from: those of the stages before it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from mmdec.checks.weights import read_weights
from mmdec.training.daspeech.module import load_network
from mmdec.types import InputError


class InitialWeights(Callback):
    """Loads safetensors into the network before a fresh run; a resumed run keeps its checkpoint's weights.

    Names and shapes that do not fit keep their initial values and are counted: none fitting is an error.
    """

    def __init__(self, files: Sequence[str], acoustic: str | None = None) -> None:
        self.files = [(Path(file), "") for file in files]
        if acoustic is not None:
            self.files.append((Path(acoustic), "tts."))  # trained alone: its names lack the whole network's prefix

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or trainer.ckpt_path:
            return
        for file, prefix in self.files:
            if not file.is_file():
                raise InputError(
                    f"`files` must name existing safetensors, but '{file}' does not exist. Train it first."
                )
            state = {prefix + name: value.float() for name, value in read_weights([file], "files").items()}
            network: Any = pl_module.network  # torch types what it finds in a module as a tensor, too
            if prefix:
                self._reorder(state, network.state_dict(), pl_module.hparams["units"], file.with_suffix(".json"))
            left = load_network(network, state)
            taken = len(network.state_dict()) - len(left)
            if taken == 0:
                raise InputError(f"`files` must fit the network, but no tensor of '{file}' does. Check the sizes.")
            rank_zero_info(f"{file}: {taken} tensors loaded")

    def _reorder(self, state: dict[str, Tensor], own: dict[str, Tensor], units: list[str], listed: Path) -> None:
        """Put the phones' embeddings in this model's order; a phone that the voice never met keeps its initial row."""
        earlier = json.loads(listed.read_text(encoding="utf-8"))["units"]
        rows = own["tts.units.weight"].clone()
        for index, unit in enumerate(units):
            if unit in earlier:
                rows[index] = state["tts.units.weight"][earlier.index(unit)]
        state["tts.units.weight"] = rows
