"""SIGTERM, as clusters and `timeout` send it: a run ends after its step, with a checkpoint to go on from."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_info

from mmdec.training.finite import any_process
from mmdec.training.processes import TERMINATED


class Termination(Callback):
    """Ends a run that gets SIGTERM with exit code 143: in training after the step, with a `last.ckpt`; else at once.

    One process that is validating ends between two batches of it; several go on to the next step, for they wait for
    each other. A run whose last validation it is comes to its own end.
    """

    def __init__(self) -> None:
        self.asked = self.training = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Inside, SIGTERM comes here, if this is the main thread."""
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
        self._listen()  # Lightning (2.6) has put a handler of its own before, which ends with 0 and may wait for ever

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
    """Whether nothing but the end comes after the epoch that is validated."""
    loop = trainer.fit_loop
    if loop.max_steps != -1 and trainer.global_step >= loop.max_steps:
        return True
    return loop.max_epochs not in (None, -1) and trainer.current_epoch + 1 >= loop.max_epochs
