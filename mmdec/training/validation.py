"""A module's scores on the development split of its data."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping

from lightning.pytorch import LightningDataModule, LightningModule, Trainer

import mmdec.training.lightning_leaves  # noqa: F401 # imported for its effect


def validate(module: LightningModule, data: LightningDataModule) -> Mapping[str, float]:
    """What a module logs on its development split, in one process, with nothing written or printed."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers")  # a few batches need none
        return trainer.validate(module, data, verbose=False)[0]
