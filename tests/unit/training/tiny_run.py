"""A very short run of `python -m mmdec.training`, which fits a line to numbers, and callbacks that disturb it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from mmdec.training.__main__ import main

STEPS = 4  # training steps in an epoch


class Numbers(LightningDataModule):
    """Batches of random numbers (4, 2), different in each epoch."""

    units = ("a", "b")

    def train_dataloader(self) -> DataLoader[Tensor]:
        assert self.trainer is not None
        draw = torch.Generator().manual_seed(self.trainer.current_epoch)
        rows = torch.randn(64, 2, generator=draw)
        batches = [list(range(4 * step, 4 * step + 4)) for step in range(STEPS)]
        return DataLoader(rows, batch_sampler=batches)  # type: ignore[arg-type] # a tensor has a length and items

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.ones(3, 2))  # type: ignore[arg-type]


class WholeBatches(Numbers):
    """The same batches from a loader without a batch sampler: each item of the data set is a whole batch."""

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader([*super().train_dataloader()], batch_size=None, shuffle=False)  # type: ignore[arg-type]


class Line(LightningModule):
    """Fits a linear map to the sum of two numbers. manual: use Lightning's manual optimisation."""

    def __init__(self, units: list[str] | None = None, lr: float = 0.1, width: int = 1, manual: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.line = nn.Linear(2, width)
        self.rate = lr
        self.automatic_optimization = not manual

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = (self.line(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.log("train/loss", loss)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("dev/loss", self.line(batch).sum())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.rate)


class Other(Line):
    """The same model as another class, to test checkpoints of another system."""


class Asked(Callback):
    """Sends SIGTERM to its process once, in the hook `hook`, at the first opportunity from step `at` on."""

    def __init__(self, hook: str, at: int = 0) -> None:
        self.hook, self.at = hook, at

    def _ask(self, hook: str, trainer: Trainer) -> None:
        if hook == self.hook and trainer.global_step >= self.at:
            self.hook = ""
            os.kill(os.getpid(), signal.SIGTERM)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._ask("setup", trainer)

    def on_train_batch_end(self, trainer: Trainer, *rest: Any) -> None:
        self._ask("batch", trainer)

    def on_validation_batch_start(self, trainer: Trainer, *rest: Any) -> None:
        self._ask("validation", trainer)


class Spoilt(Callback):
    """Makes a weight NaN after step `at`; or, with `gradient`, makes the next step's gradients infinite."""

    def __init__(self, at: int, gradient: bool = False) -> None:
        self.at, self.gradient = at, gradient

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        if trainer.global_step == self.at and not self.gradient:
            with torch.no_grad():
                next(pl_module.parameters()).fill_(float("nan"))

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, *rest: Any) -> None:
        if trainer.global_step == self.at and self.gradient:
            for weight in pl_module.parameters():
                weight.grad = torch.full_like(weight, float("inf"))


def recipe(folder: Path, model: str = "Line", data: str = "Numbers", **options: Any) -> Path:
    """Write a recipe that keeps every epoch's checkpoint in `folder`. options: the model's."""
    checkpoint = {"dirpath": str(folder / "checkpoints"), "filename": "{step}", "save_last": True, "save_top_k": -1}
    checkpoint |= {"save_on_train_epoch_end": True, "enable_version_counter": False}
    trainer = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 3,
        "num_sanity_val_steps": 0,
        "reload_dataloaders_every_n_epochs": 1,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
        "logger": {
            "class_path": "lightning.pytorch.loggers.CSVLogger",
            "init_args": {"save_dir": str(folder), "name": "log", "version": ""},
        },
        "callbacks": [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": checkpoint}],
    }
    written = {
        "seed_everything": 1,
        "trainer": trainer,
        "model": {"class_path": f"{__name__}.{model}", "init_args": options},
        "data": {"class_path": f"{__name__}.{data}"},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(written), encoding="utf-8")
    return path


def fit(path: Path | str, *more: str, callback: str = "", **options: Any) -> None:
    """Run a recipe in this process. callback: name of a callback of this module; options: its arguments."""
    more = (f"--trainer.callbacks+={__name__}.{callback}", *more) if callback else more
    given = [f"--trainer.callbacks.{name}={value}" for name, value in options.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["python"])  # Lightning would read pytest's arguments
        main(["fit", f"--config={path}", *more[:1], *given, *more[1:]])
