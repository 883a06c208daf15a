"""Progress and loss of a stage: a moving bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only

WIDTH = 24  # characters of the bar
EVERY = {True: 0.5, False: 10.0}  # seconds between two looks: on a terminal, elsewhere


class StageBar(Callback):
    """For a stage that ends at a time: `units [######------]  52 %  step 34  loss 2.310  1:05 left`.

    stage: its name. at: when it ends, in seconds since 1970. The bar is of time, for steps are not known before.
    """

    def __init__(self, stage: str, at: float) -> None:
        self.stage, self.at = stage, at
        self.begun = self.shown = time.time()
        self.loss: float | None = None

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
        if time.time() - self.shown >= EVERY[sys.stdout.isatty()]:
            self._show(trainer.global_step)

    @rank_zero_only
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking:
            return
        values = sorted((name, float(value)) for name, value in trainer.callback_metrics.items() if name[:4] == "dev/")
        self._end_line()
        print(f"{self.stage}: step {trainer.global_step} on dev:", *(f"{n[4:]} {v:.3f}" for n, v in values), flush=True)

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
