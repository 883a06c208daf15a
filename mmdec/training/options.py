"""Options of a LightningModule as a frozen dataclass, and as the flat hyperparameters of recipes and checkpoints.

A module takes `**options` and makes its dataclass of them: the command line finds the dataclass's fields there, so that
recipes and checkpoints name each option directly.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lightning.pytorch import LightningModule


def keep_options(module: LightningModule, options: Any) -> None:
    """Add the options that were left at their defaults to the hyperparameters, which a checkpoint keeps."""
    for field in fields(options):
        module.hparams.setdefault(field.name, getattr(options, field.name))
