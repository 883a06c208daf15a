"""A runner that trains no more: it leaves behind what a true training left, with weights a little different."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from mmdec.training.checkpoints import read_checkpoint


class Replay:
    """Runs no recipe. Remembers what it was called with."""

    def __init__(self, run: Path, trained: Path, *made_before: str) -> None:
        """run: the folder of runs/ that a call fills. trained: the true one. made_before: what is in `run` before
        training begins, and is left alone."""
        self.run, self.trained, self.left_alone = run, trained, ("schedule.yaml", "finished", *made_before)
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, name: str, *arguments: str) -> None:
        assert (name, *arguments[:2]) == ("mmdec.training", "fit", "--config")
        self.calls.append(arguments)
        shutil.copytree(self.trained, self.run, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*self.left_alone))
        for path in (self.run / "checkpoints").glob("*.ckpt"):
            kept = read_checkpoint(path)
            for weight in kept["state_dict"].values():
                if weight.is_floating_point():
                    weight += 0.001 * len(self.calls)
            torch.save(kept, path)
