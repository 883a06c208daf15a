"""Callbacks that the recipes name: progress as plain lines, and weights to start from."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch import Tensor

from mmdec.checks.weights import read_weights
from mmdec.training.daspeech.module import load_network
from mmdec.training.lr_schedule import Schedule
from mmdec.types import InputError


class PlainProgress(Callback):
    """One line every `every` steps: step, utterances per second, losses; readable in a log file."""

    def __init__(self, every: int = 50) -> None:
        self.every = every
        self.since = time.monotonic()
        self.rows = 0

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self.rows += len(getattr(batch, "rows", ())) * trainer.world_size
        if trainer.global_step % self.every:
            return
        now = time.monotonic()
        speed, self.since, self.rows = self.rows / (now - self.since), now, 0
        self._line(trainer, f"{speed:.1f}/s", "train/")

    @rank_zero_only
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._line(trainer, "dev", "dev/")
        self.since, self.rows = time.monotonic(), 0

    def _line(self, trainer: Trainer, head: str, prefix: str) -> None:
        values = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith(prefix)}
        parts = " ".join(f"{name.removeprefix(prefix)} {value:.3f}" for name, value in sorted(values.items()))
        rank_zero_info(f"{time.strftime('%H:%M:%S')} step {trainer.global_step} {head} {parts}")


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
            network = pl_module.network
            if prefix:
                self._reorder(state, network.state_dict(), pl_module.hparams["units"], file.with_suffix(".json"))  # type: ignore[union-attr, operator]
            left = load_network(network, state)  # type: ignore[arg-type]
            taken = len(network.state_dict()) - len(left)  # type: ignore[union-attr, operator]
            if taken == 0:
                raise InputError(f"`files` must fit the network, but no tensor of '{file}' does. Check the sizes.")
            rank_zero_info(f"{file}: {taken} tensors loaded")

    def _reorder(self, state: dict[str, Tensor], own: dict[str, Tensor], units: list[str], listed: Path) -> None:
        """Put the phones' embeddings in this model's order; a phone that the voice never met keeps its initial row."""
        known = json.loads(listed.read_text(encoding="utf-8"))["units"]
        rows = own["tts.units.weight"].clone()
        for place, unit in enumerate(units):
            if unit in known:
                rows[place] = state["tts.units.weight"][known.index(unit)]
        state["tts.units.weight"] = rows


class Deadline(Callback):
    """Ends a run so that it is over at a given time: at the end of the last epoch that still fits.

    After each epoch it counts how many more of that pace fit before `at` (seconds since 1970), with the validations
    among them, at most `epochs` in all, and sets the trainer's limits, which schedules of the learning rate look at.
    With `decay` the module's trapezoid falls to zero at that end. At least one epoch is run. Checkpoints keep nothing
    of it: a resumed run has new time.
    """

    def __init__(self, at: float, decay: bool = False, epochs: int | None = None) -> None:
        self.at, self.decay, self.epochs = at, decay, epochs
        self.since = self.looking = time.time()
        self.looked = 0.0  # seconds of validation in this epoch
        self.look: float | None = None  # those of the longest one

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.since, self.looked = time.time(), 0.0

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.looking = time.time()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        took = time.time() - self.looking
        self.looked, self.look = self.looked + took, max(self.look or 0.0, took)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        now = time.time()
        took = max(now - self.since - self.looked, 1e-3)
        self.since, self.looked = now, 0.0
        done: int = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
        look = took if self.look is None else self.look  # until one was seen it is taken to last as long as an epoch
        total = done + epochs_that_fit(self.at - now, took, look, done, trainer.check_val_every_n_epoch)
        if self.epochs is not None:
            total = max(done, min(total, self.epochs))
        total = trainer.strategy.broadcast(total)  # all ranks stop at once
        trainer.fit_loop.max_epochs = total
        end = trainer.global_step + (total - done) * int(trainer.num_training_batches)
        if trainer.max_steps != -1:
            trainer.fit_loop.epoch_loop.max_steps = end
        rate = getattr(pl_module, "rate", None)
        if self.decay and isinstance(rate, Schedule):
            pl_module.rate = rate.ending(trainer.global_step, end)  # type: ignore[assignment]


def epochs_that_fit(seconds: float, epoch: float, validation: float, done: int, every: int | None) -> int:
    """How many more epochs, each of so many seconds, with a validation after every `every`-th, counted from the first
    of all."""
    more = max(int(seconds / epoch), 0)
    while more and every and more * epoch + ((done + more) // every - done // every) * validation > seconds:
        more -= 1
    return more


class WholeEpochs(Callback):
    """A checkpoint of an epoch's end goes on with the next epoch, from its first batch.

    Left alone, Lightning (2.6) takes it for one from the middle of the epoch wherever `max_steps` is set: the resumed
    run's first epoch ends after one batch, and every batch and random number from there on differs.
    """

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        loop = checkpoint["loops"]["fit_loop"]
        if not loop["epoch_loop.batch_progress"]["is_last_batch"]:
            return
        for part in ("total", "current"):
            epochs = loop["epoch_progress"][part]
            epochs.update(dict.fromkeys(epochs, epochs["ready"]))
        for name, progress in loop.items():
            if name.startswith("epoch_loop.") and name.endswith("progress") and ".val_loop." not in name:
                _start_again(progress)


def _start_again(progress: dict[str, Any]) -> None:
    """Set all counts of the current epoch to zero, at any depth."""
    for name, value in progress.items():
        if name == "current":
            value.update(dict.fromkeys(value, 0))
        elif isinstance(value, dict):
            _start_again(value)
