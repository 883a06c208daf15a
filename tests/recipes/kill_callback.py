"""A callback that kills its process at a training step, as a power cut would."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL

from lightning.pytorch import Callback, LightningModule, Trainer

from tests.support.warm_processes import TRAINING, Program, start


class Killed(Callback):
    """Sends SIGKILL to its process after step `step`."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def training_to_be_killed(options: Sequence[str], step: int, folder: Path, log: Path) -> Program:
    """Start `mmdec.training` with these options in `folder`, in a separate process that is killed after step `step`.

    log: the file for its stdout and stderr.
    """
    killed = ("--trainer.callbacks+=tests.recipes.kill_callback.Killed", f"--trainer.callbacks.step={step}")
    with log.open("wb") as file:
        words = ["mmdec.training", *options, *killed]
        return start(words, TRAINING, folder, {"OMP_NUM_THREADS": "1"}, True, (DEVNULL, file, file))


def ends_killed(program: Program, log: Path) -> None:
    """Wait until the program ends, and assert that it was killed. log: the file of its output."""
    try:
        ended = program.wait(900)
    except BaseException:
        program.kill()
        raise
    assert ended == -signal.SIGKILL, log.read_text(encoding="utf-8", errors="replace")


def train_until_killed(options: Sequence[str], step: int, folder: Path) -> None:
    """Run `mmdec.training` with these options in `folder`, in a separate process, until it is killed after `step`."""
    log = folder / "log.txt"
    ends_killed(training_to_be_killed(options, step, folder, log), log)
