"""A callback for tests that compare two trainings: no dropout, no augmentation, frozen batch statistics."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer


class Still(Callback):
    """Puts the model into evaluation mode before each training step."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        pl_module.eval()
