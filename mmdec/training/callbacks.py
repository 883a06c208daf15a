"""Callbacks of all systems' runs: progress, time limits, exact resumption, and an orderly end after SIGTERM."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch.utils.data import DataLoader

from mmdec.training.checkpoints import any_process
from mmdec.training.optim import Schedule
from mmdec.training.processes import TERMINATED


class PlainProgress(Callback):
    """Logs a line every `every` steps: step, samples per second, losses. Unlike a progress bar, it suits log files."""

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
    """Ends a run before a given time, after the last epoch that still fits.

    After each epoch it estimates how many more epochs, with their validations, fit before `at` (seconds since 1970), at
    most `epochs` in all. It sets the trainer's `max_epochs` and `max_steps` accordingly. With `decay`, the module's
    trapezoid schedule falls to zero at the run's end. At least one epoch is run. Checkpoints store none of this: a
    resumed run has a new time limit.
    """

    def __init__(self, at: float, decay: bool = False, epochs: int | None = None) -> None:
        self.at, self.decay, self.epochs = at, decay, epochs
        self.since = self.looking = time.time()
        self.looked = 0.0  # seconds of validation in this epoch
        self.look: float | None = None  # seconds of the longest validation so far

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
        look = took if self.look is None else self.look  # no validation yet: assume it takes as long as an epoch
        total = done + epochs_that_fit(self.at - now, took, look, done, trainer.check_val_every_n_epoch)
        if self.epochs is not None:
            total = max(done, min(total, self.epochs))
        total = trainer.strategy.broadcast(total)  # so that all processes stop at the same step
        trainer.fit_loop.max_epochs = total
        end = trainer.global_step + (total - done) * int(trainer.num_training_batches)
        if trainer.max_steps != -1:
            trainer.fit_loop.epoch_loop.max_steps = end
        rate = getattr(pl_module, "rate", None)
        if self.decay and isinstance(rate, Schedule):
            pl_module.rate = rate.ending(trainer.global_step, end)  # type: ignore[assignment] # no part of the network


def epochs_that_fit(seconds: float, epoch: float, validation: float, done: int, every: int | None) -> int:
    """Return the number of further epochs that fit in `seconds`. epoch, validation: seconds of one epoch, and of one
    validation. done: epochs so far. every: a validation follows each `every`-th epoch, counted from the run's start."""
    more = max(int(seconds / epoch), 0)
    while more and every and more * epoch + ((done + more) // every - done // every) * validation > seconds:
        more -= 1
    return more


WIDTH = 24  # characters of the progress bar
RECENT = 10  # number of last steps whose estimates of tokens per round are averaged
CHAIN = 4  # length of the drafted chains for which modules estimate tokens per round in training ("train/round")
EVERY = {True: 0.5, False: 10.0}  # seconds between two updates: True on a terminal, False elsewhere


class StageBar(Callback):
    """A progress bar for a stage with a time limit: `units [######------]  52 %  step 34  loss 2.310  1:05 left`.

    stage: its name. at: its end, in seconds since 1970. The bar shows time, because the number of steps is unknown. If
    a module estimates tokens per round in training ("train/round"), the bar shows the estimate until the first
    validation. Then it shows the tokens per round on held-out answers, because a drafter may overfit the training
    answers.
    """

    def __init__(self, stage: str, at: float) -> None:
        self.stage, self.at = stage, at
        self.begun = self.shown = time.time()
        self.loss: float | None = None
        self.rounds: float | None = None  # tokens per round in training, the mean of the last steps' estimates
        self.held_out: float | None = None  # tokens per round at the last validation

    @rank_zero_only
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begun, self.shown = time.time(), 0.0

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        value = trainer.callback_metrics.get("train/loss")
        if isinstance(outputs, Mapping) and outputs.get("loss") is not None:
            value = outputs["loss"]
        self.loss = self.loss if value is None else float(value)
        if (found := trainer.callback_metrics.get("train/round")) is not None:
            before = float(found) if self.rounds is None else self.rounds
            self.rounds = before + (float(found) - before) / RECENT
        if time.time() - self.shown >= EVERY[sys.stdout.isatty()]:
            self._show(trainer.global_step)

    @rank_zero_only
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        values = sorted((name, float(value)) for name, value in trainer.callback_metrics.items() if name[:4] == "dev/")
        self.held_out = dict(values).get("dev/chain")
        self._end_line()
        words: Mapping[str, str] = getattr(pl_module, "words", {})
        parts = (f"{words.get(name[4:], name[4:])} {value:.3f}" for name, value in values)
        print(f"{self.stage}: step {trainer.global_step} on dev:", ", ".join(parts), flush=True)

    @rank_zero_only
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show(trainer.global_step, done=True)
        self._end_line()

    def _show(self, step: int, done: bool = False) -> None:
        self.shown = now = time.time()
        whole = max(self.at - self.begun, 1e-9)
        part = 1.0 if done else min(max((now - self.begun) / whole, 0.0), 1.0)
        filled = round(WIDTH * part)
        loss = "" if self.loss is None else f"  loss {self.loss:.3f}"
        if self.held_out is not None:
            loss += f": {self.held_out:.1f} tokens a round on held-out answers"
        elif self.rounds is not None:
            loss += f": chains of {CHAIN} give about {self.rounds:.1f} tokens a round"
        left = max(round(self.at - now), 0)
        rest = "done" if done else f"{left // 60}:{left % 60:02d} left"
        line = f"{self.stage} [{'#' * filled}{'-' * (WIDTH - filled)}] {100 * part:3.0f} %  step {step}{loss}  {rest}"
        if sys.stdout.isatty():
            print(f"\r\x1b[K{line}", end="", flush=True)
        else:
            print(line, flush=True)

    def _end_line(self) -> None:
        if sys.stdout.isatty():
            print(flush=True)


class Resumption(Callback):
    """Corrects Lightning's counts when a run resumes: a finished epoch counts as finished, and an unfinished epoch
    continues after its last trained batch.

    Without this, Lightning (2.6) makes two errors. If `max_steps` is set, it takes a finished epoch for an unfinished
    one: the resumed run's first epoch ends after one batch. And a run that was saved within an epoch repeats the first
    batches of this epoch.
    """

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        loop = checkpoint["loops"]["fit_loop"]
        batches = loop["epoch_loop.batch_progress"]
        current, total, done = batches["current"], batches["total"], batches["current"]["processed"]
        begun = current["ready"] > done  # the checkpoint was saved within a batch, before its step
        over = batches["is_last_batch"] and not begun
        if (
            trainer.accumulate_grad_batches == 1
        ):  # between a batch's end and a validation, Lightning has not counted the batch yet
            loop["epoch_loop.state_dict"]["_batches_that_stepped"] = total["processed"]
        total.update(dict.fromkeys(total, total["processed"]))
        for part in ("total", "current"):
            epochs = loop["epoch_progress"][part]
            ready = epochs["ready"]
            whole = ready if over else ready - 1
            epochs.update(dict.fromkeys(epochs, whole))
            if done and not over:
                epochs |= {"ready": ready, "started": ready}
        if over or not done:
            for name, progress in loop.items():
                if name.startswith("epoch_loop.") and name.endswith("progress") and ".val_loop." not in name:
                    _start_again(progress)
            return
        current.update(dict.fromkeys(current, done))
        batches["is_last_batch"] = False
        if isinstance(data := getattr(trainer, "datamodule", None), LightningDataModule):
            _pass_over(data, done)


def _start_again(progress: dict[str, Any]) -> None:
    """Set all counts of the current epoch in Lightning's `progress` to zero, at any depth of nesting."""
    for name, value in progress.items():
        if name == "current":
            value.update(dict.fromkeys(value, 0))
        elif isinstance(value, dict):
            _start_again(value)


def _pass_over(data: LightningDataModule, done: int) -> None:
    """Let the next training data loader skip its first `done` batches; later loaders skip none."""
    make = data.train_dataloader

    def rest() -> Any:
        data.train_dataloader = make
        loader = make()
        if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
            return loader
        return DataLoader(
            loader.dataset,
            batch_sampler=_Rest(list(loader.batch_sampler), done),
            collate_fn=loader.collate_fn,
            num_workers=loader.num_workers,
            worker_init_fn=loader.worker_init_fn,
            pin_memory=loader.pin_memory,
        )

    data.train_dataloader = rest


class _Rest:
    """The list `batches` without its first `done`. Its length still includes them, because Lightning counts them."""

    def __init__(self, batches: list[Any], done: int) -> None:
        self.batches, self.done = batches, done

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches[self.done :])

    def __len__(self) -> int:
        return len(self.batches)


class Termination(Callback):
    """Ends a run after SIGTERM with exit code 143: in training after the current step, with a `last.ckpt`; outside of
    training at once.

    In validation, a single process ends between two batches. Several processes continue to the next training step,
    because they wait for each other. During the run's last validation, the run just finishes.
    """

    def __init__(self) -> None:
        self.asked = self.training = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Open a context in which this object handles SIGTERM. In other threads than the main one it does nothing."""
        before = signal.getsignal(signal.SIGTERM)
        self._listen()
        try:
            yield
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, before)

    def _listen(self) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if not self.training:
            raise SystemExit(TERMINATED)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()  # replaces Lightning's (2.6) handler, which exits with 0 and may wait for ever

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()
        self.training = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.training = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.training = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if any_process(trainer, self.asked):
            self._end(trainer)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: object,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self.asked and trainer.world_size == 1 and not _last_validation(trainer):
            self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath and not trainer.fast_dev_run:  # type: ignore[attr-defined] # undeclared
                name = callback.CHECKPOINT_NAME_LAST + callback.FILE_EXTENSION
                trainer.save_checkpoint(
                    callback.last_model_path or Path(callback.dirpath) / name, callback.save_weights_only
                )
        rank_zero_info(f"SIGTERM: this run ends after step {trainer.global_step}. --ckpt_path=last goes on with it.")
        raise SystemExit(TERMINATED)


def _last_validation(trainer: Trainer) -> bool:
    """Return whether the run ends after the current validation."""
    loop = trainer.fit_loop
    if loop.max_steps != -1 and trainer.global_step >= loop.max_steps:
        return True
    return loop.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= loop.max_epochs


@contextmanager
def lightning_says(level: int) -> Iterator[None]:
    """Open a context in which Lightning's messages below `level`, as in logging, are not logged."""
    heard = logging.getLogger("lightning.pytorch")
    before = heard.level
    heard.setLevel(level)
    try:
        yield
    finally:
        heard.setLevel(before)
