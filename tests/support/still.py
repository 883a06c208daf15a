"""A callback that trains what is compared: dropout and augmentation off, batch statistics frozen."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer


class Still(Callback):
    """Each step in evaluation mode, with gradients."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        pl_module.eval()
