"""A callback that ends its process without a word, as a power cut would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer


class Killed(Callback):
    """SIGKILL after step `step`."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(options: Sequence[str], step: int, folder: Path) -> None:
    """Run `mmdec.training` with these options in `folder`, in a process of its own that is killed after step `step`."""
    killed = ("--trainer.callbacks+=tests.support.killed.Killed", f"--trainer.callbacks.step={step}")
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "mmdec.training", *options, *killed],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=900,
        check=False,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr.decode()
