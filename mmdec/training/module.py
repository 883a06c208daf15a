"""Bases of the training modules whose options are a dataclass, and of those that train a drafter of a frozen model."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch.optim import Optimizer

from mmdec.errors import InputError
from mmdec.hub.publish import write_provenance
from mmdec.training.optim import Schedule, seed_step, with_schedule


class RecipeModule(LightningModule):
    """Abstract base of training modules whose options are a dataclass. A subclass defines `optimizer`, and calls
    `use_options` in its `__init__`.

    All randomness of a step follows from (seed, epoch, step, rank), so that a resumed training draws the same numbers
    as an uninterrupted one.
    """

    options: Any
    rate: Schedule  # the learning rate as a share of its peak

    def use_options(self, options: Any) -> None:
        """Keep the options, a dataclass, also those that have their defaults, so that checkpoints store them all."""
        self.options = options
        for field in fields(options):
            self.hparams.setdefault(field.name, getattr(options, field.name))
        kind: Any = getattr(options, "schedule", "trapezoid")
        self.rate = Schedule(kind, options.warmup, options.decay_from, options.decay_steps)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        seed_step(getattr(self.options, "seed", 0), self.current_epoch, batch_idx, self.global_rank)

    def optimizer(self) -> Optimizer:
        """Make the optimizer, with the peak of the learning rate."""
        raise NotImplementedError

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return with_schedule(self.optimizer(), lambda step: self.rate(step))


class DrafterModule(RecipeModule):
    """Abstract base of modules that train a drafter of a frozen model, the data module's `base`, and save the best one.

    State: `mark`, the name of the model's weights; `best`, tokens per round of the best drafter so far.
    """

    mark: str
    best = 0.0

    def write_training(self, folder: Path, scores: dict[str, float]) -> None:
        """Write into a drafter's folder how it was trained.

        Args:
            scores: Of validation, by name.
        """
        options = {name: value for name, value in self.hparams.items() if not name.startswith("_")}
        training = {"step": self.global_step, "hyperparameters": options, "dev": scores}
        write_provenance(folder, training, self.device)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint |= {"best": self.best, "base": self.mark}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if checkpoint["base"] != self.mark:
            raise InputError(
                "`ckpt_path` must be of a drafter for the same `base`, but that has been trained or changed since. "
                "Start anew, with the drafter of before as `start`."
            )
        self.best = checkpoint["best"]
