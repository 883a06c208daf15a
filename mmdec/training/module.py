"""Bases of the training modules whose options are a dataclass, and of those that train a drafter of a frozen model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.optim import Optimizer

from mmdec.errors import InputError
from mmdec.hub.publish import write_provenance
from mmdec.training.optim import Schedule, seed_step, with_schedule


class RecipeModule(LightningModule, ABC):
    """Base of training modules whose options are a dataclass. A subclass calls `use_options` in its `__init__`.

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

    @abstractmethod
    def optimizer(self) -> Optimizer:
        """Make the optimizer, with the peak of the learning rate."""

    def configure_optimizers(self) -> OptimizerLRScheduler:
        return with_schedule(self.optimizer(), lambda step: self.rate(step))


class DrafterModule(RecipeModule):
    """Base of modules that train a drafter of a frozen model, the data module's `base`, and save the best one.

    Validation simulates decoding: a subclass calls `add_validation` in its `validation_step`.

    State: `base_fingerprint`, the name of the model's weights; `best`, tokens per round of the best drafter so far.
    """

    base_fingerprint: str
    best = 0.0
    decides: ClassVar[Literal["chain", "tree"]]  # the drafts whose tokens per round decide which drafter is the best

    def use_options(self, options: Any) -> None:
        super().use_options(options)
        # for each text of this validation: (n - 1, K), the ranks of its n true tokens at the K depths of a draft
        self.ranks: list[Tensor] = []
        self.sums = {"loss": 0.0, "rows": 0.0}

    @abstractmethod
    def score(self, texts: list[Tensor]) -> dict[str, float]:
        """Simulate decoding.

        Args:
            texts: For each text the ranks of its true tokens.

        Returns:
            Name -> score; among them "chain" and "tree", the tokens per round with chains and with trees.
        """

    @abstractmethod
    def save_drafter(self, scores: dict[str, float]) -> Path:
        """Save the drafter, replacing an earlier one. All processes call this.

        Args:
            scores: Those of validation, by name; empty: the drafter was never validated.

        Returns:
            The drafter's folder.
        """

    def add_validation(self, ranks: Sequence[Tensor], loss: float) -> None:
        """Add texts to this validation.

        Args:
            ranks: Of each text.
            loss: The mean over these texts.
        """
        self.ranks += ranks
        self.sums["loss"] += loss * len(ranks)
        self.sums["rows"] += len(ranks)

    def on_validation_epoch_end(self) -> None:
        texts, sums = _gather(self.ranks, self.sums)
        self.ranks, self.sums = [], dict.fromkeys(self.sums, 0.0)
        scores = {"loss": sums["loss"] / sums["rows"], **self.score(texts)}
        if self.trainer.sanity_checking:  # Lightning's check before training: these scores are the initial drafter's
            chain, tree = scores["chain"], scores["tree"]
            rank_zero_info(f"at the start: {chain:.2f} tokens per round in chains, {tree:.2f} in trees")
            # a resumed training is validated once more at its beginning; this is not logged
            if self.global_step:
                return
        else:
            self.log_dict({f"dev/{name}": value for name, value in scores.items()}, sync_dist=True)
        if scores[self.decides] > self.best and self.trainer.state.fn == TrainerFn.FITTING:
            self.best = scores[self.decides]
            self.save_drafter(scores)

    def on_train_end(self) -> None:
        if self.best == 0.0:
            self.save_drafter({})

    def write_training(self, folder: Path, scores: dict[str, float]) -> None:
        """Write into a drafter's folder how it was trained.

        Args:
            scores: Of validation, by name.
        """
        options = {name: value for name, value in self.hparams.items() if not name.startswith("_")}
        training = {"step": self.global_step, "hyperparameters": options, "dev": scores}
        write_provenance(folder, training, self.device)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint |= {"best": self.best, "base": self.base_fingerprint}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if checkpoint["base"] != self.base_fingerprint:
            raise InputError(
                "`ckpt_path` must be of a drafter for the same `base`, but that has been trained or changed since. "
                "Start a new run, with the earlier drafter as `start`."
            )
        self.best = checkpoint["best"]


def _gather(ranks: list[Tensor], sums: dict[str, float]) -> tuple[list[Tensor], dict[str, float]]:
    """Join the texts' ranks of all processes, and add their sums."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return ranks, sums
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, (ranks, sums))
    total = {name: float(sum(each[name] for _, each in parts)) for name in sums}
    return [text for texts, _ in parts for text in texts], total
