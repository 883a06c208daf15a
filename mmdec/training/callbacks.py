"""Lightning callbacks for all training: progress, time limits, exact resumption, and an orderly end after SIGTERM."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from mmdec.training.checkpoints import any_process
from mmdec.training.optim import Schedule
from mmdec.training.processes import EXIT_CODE_TERMINATED


class PlainProgress(Callback):
    """Logs a line every `log_every_n_steps` training steps: step, samples per second, losses.

    These lines suit log files better than a progress bar.

    State: the number of samples since the last logged line, and that line's time.
    """

    def __init__(self) -> None:
        self.since = time.monotonic()
        self.rows = 0

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self.rows += len(getattr(batch, "rows", ())) * trainer.world_size
        if trainer.global_step % trainer.log_every_n_steps:  # type: ignore[attr-defined] # undeclared
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


class TimeLimit(Timer):
    """Lightning's Timer, which also lets the learning rate of a trapezoid schedule fall to zero at the end of the time.

    Training ends after the step in which the time runs out, with a validation and a checkpoint. Checkpoints do not
    store the time that has passed: a resumed run has a new limit.

    Args:
        seconds: Time limit, from the first training step on.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(duration=timedelta(seconds=seconds), interval="step", verbose=False)
        self.first_step = 0  # training step at which this run began

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.first_step = trainer.global_step

    def on_train_epoch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_train_epoch_end(trainer, *args, **kwargs)
        module = trainer.lightning_module
        rate, left = getattr(module, "rate", None), self.time_remaining()
        if isinstance(rate, Schedule) and left is not None:
            steps = trainer.global_step - self.first_step
            end = trainer.global_step + round(steps * max(left, 0.0) / max(self.time_elapsed(), 1e-3))
            # all processes must compute with the same rate
            module.rate = rate.ending_at(trainer.global_step, trainer.strategy.broadcast(end))  # type: ignore[assignment] # not a submodule

    def state_dict(self) -> dict[str, Any]:
        return {}


BAR_WIDTH = 24  # width of the progress bar, in characters
AVERAGED_STEPS = 10  # the shown tokens per round are an average over about this many training steps
# tokens in a drafted chain, when modules estimate tokens per decoding round in training ("train/round")
ESTIMATED_CHAIN_LENGTH = 4
# seconds between two updates of the bar; True: on a terminal, False: elsewhere
UPDATE_SECONDS = {True: 0.5, False: 10.0}


class StageBar(Callback):
    """A progress bar for training with a time limit: `units [######------]  52 %  step 34  loss 2.310  1:05 left`.

    The bar shows the share of the time that has passed, because the number of steps is unknown. If a module estimates
    tokens per decoding round in training ("train/round"), the bar shows this estimate. After the first validation, it
    shows the tokens per round on held-out answers instead, because a drafter may overfit the training answers.

    Args:
        stage: The name to show.
        seconds: The time limit, from the first training step on.
    """

    def __init__(self, stage: str, seconds: float) -> None:
        self.stage, self.seconds = stage, seconds
        self.started = self.shown = time.time()
        self.loss: float | None = None
        self.rounds: float | None = None  # moving average of the tokens per round that training steps estimate
        self.held_out: float | None = None  # tokens per decoding round, measured at the last validation

    @rank_zero_only
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.started, self.shown = time.time(), 0.0

    @rank_zero_only
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        value = trainer.callback_metrics.get("train/loss")
        if isinstance(outputs, Mapping) and outputs.get("loss") is not None:
            value = outputs["loss"]
        self.loss = self.loss if value is None else float(value)
        if (tokens_per_round := trainer.callback_metrics.get("train/round")) is not None:
            before = float(tokens_per_round) if self.rounds is None else self.rounds
            self.rounds = before + (float(tokens_per_round) - before) / AVERAGED_STEPS
        if time.time() - self.shown >= UPDATE_SECONDS[sys.stdout.isatty()]:
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
        part = 1.0 if done else min((now - self.started) / max(self.seconds, 1e-9), 1.0)
        filled = round(BAR_WIDTH * part)
        loss = "" if self.loss is None else f"  loss {self.loss:.3f}"
        if self.held_out is not None:
            loss += f": {self.held_out:.1f} tokens per round on held-out answers"
        elif self.rounds is not None:
            loss += f": chains of {ESTIMATED_CHAIN_LENGTH} give about {self.rounds:.1f} tokens per round"
        left = max(round(self.started + self.seconds - now), 0)
        rest = "done" if done else f"{left // 60}:{left % 60:02d} left"
        line = (
            f"{self.stage} [{'#' * filled}{'-' * (BAR_WIDTH - filled)}] {100 * part:3.0f} %  step {step}{loss}  {rest}"
        )
        if sys.stdout.isatty():
            print(f"\r\x1b[K{line}", end="", flush=True)
        else:
            print(line, flush=True)

    def _end_line(self) -> None:
        if sys.stdout.isatty():
            print(flush=True)


class Resumption(Callback):
    """Makes a resumed run continue exactly where its checkpoint was saved, by correcting Lightning's counts.

    Without it, Lightning (2.6) makes two errors. First, if `max_steps` is set, it takes a finished epoch for an
    unfinished one, so the first epoch after resumption ends after one batch. Second, if the checkpoint was saved in the
    middle of an epoch, the first batches of this epoch are trained again.
    """

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        loop = checkpoint["loops"]["fit_loop"]
        batches = loop["epoch_loop.batch_progress"]
        current, total, done = batches["current"], batches["total"], batches["current"]["processed"]
        is_mid_batch = current["ready"] > done  # True if the checkpoint was saved in the middle of a batch
        over = batches["is_last_batch"] and not is_mid_batch
        # in a checkpoint from just before a validation, this count lacks the last batch
        if trainer.accumulate_grad_batches == 1:
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
    """Set the current epoch's counts to zero in `progress`, the nested dict in which Lightning saves its counts."""
    for name, value in progress.items():
        if name == "current":
            value.update(dict.fromkeys(value, 0))
        elif isinstance(value, dict):
            _start_again(value)


def _pass_over(data: LightningDataModule, done: int) -> None:
    """Let the next training data loader skip its first `done` batches. Later data loaders skip nothing."""
    make = data.train_dataloader

    def rest() -> Any:
        data.train_dataloader = make
        return _Rest(make(), done)

    data.train_dataloader = rest


class _Rest:
    """A data loader without its first `done` batches.

    Its length includes them, because Lightning counts them as trained.
    """

    def __init__(self, loader: Any, done: int) -> None:
        self.loader, self.done = loader, done

    def __iter__(self) -> Iterator[Any]:
        return islice(self.loader, self.done, None)

    def __len__(self) -> int:
        return len(self.loader)


class Termination(Callback):
    """Ends training after SIGTERM with exit code 143.

    During training, the process ends before the next step, after saving `last.ckpt`; in the last validation there is
    no next step, and training finishes normally. Before and after training, it ends at once. Several processes wait for
    each other, and end together.

    State: `received`, whether SIGTERM has come; `training`, whether training is in progress.
    """

    def __init__(self) -> None:
        self.received = self.training = False

    @contextmanager
    def handle_sigterm(self) -> Iterator[None]:
        """Handle SIGTERM within the `with` block. Outside the main thread, this does nothing."""
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
        self.received = True
        if not self.training:
            raise SystemExit(EXIT_CODE_TERMINATED)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()  # replaces the handler of Lightning (2.6), which exits with code 0 and may wait forever

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._listen()
        self.training = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.training = False

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.training = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if any_process(trainer, self.received):
            self._end(trainer)

    def _end(self, trainer: Trainer) -> None:
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath and not trainer.fast_dev_run:  # type: ignore[attr-defined] # undeclared
                name = callback.CHECKPOINT_NAME_LAST + callback.FILE_EXTENSION
                trainer.save_checkpoint(
                    callback.last_model_path or Path(callback.dirpath) / name, callback.save_weights_only
                )
        rank_zero_info(f"SIGTERM: this run ends after step {trainer.global_step}. --ckpt_path=last continues it.")
        raise SystemExit(EXIT_CODE_TERMINATED)


@contextmanager
def lightning_log_level(level: int) -> Iterator[None]:
    """Within the `with` block, hide Lightning's log messages below `level`, such as `logging.WARNING`."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)
