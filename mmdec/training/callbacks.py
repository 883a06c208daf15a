"""Callbacks that the recipes of all systems name: progress as plain lines, runs of a given time."""

from __future__ import annotations

import time

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from mmdec.training.lr_schedule import Schedule


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
        current = trainer.fit_loop.epoch_progress.current
        done: int = current.processed  # type: ignore[attr-defined] # a _ProcessedTracker, declared as a wider class
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
            pl_module.rate = rate.ending(trainer.global_step, end)  # type: ignore[assignment] # no part of the network


def epochs_that_fit(seconds: float, epoch: float, validation: float, done: int, every: int | None) -> int:
    """How many more epochs, each of so many seconds, with a validation after every `every`-th, counted from the first
    of all."""
    more = max(int(seconds / epoch), 0)
    while more and every and more * epoch + ((done + more) // every - done // every) * validation > seconds:
        more -= 1
    return more
