"""Options of a module, or of its data: a frozen dataclass, and the flat hyperparameters of recipes and checkpoints.

A class takes `**options` and makes its dataclass of them: the command line finds the dataclass's fields there, so that
recipes and checkpoints name each option directly.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from lightning.pytorch import LightningModule
from transformers import PreTrainedTokenizerBase

from mmdec.types import InputError


def check_counts(**counts: int) -> None:
    """Raises InputError for a count below 1."""
    for name, value in counts.items():
        if value < 1:
            raise InputError(f"`{name}` must be at least 1, but is {value}. Raise it.")


def token_list(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The tokens by their number: the option `units`, which the command line passes from the data to every model."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


def keep_options(module: LightningModule, options: Any) -> None:
    """Add the options that were left at their defaults to the hyperparameters, which a checkpoint keeps."""
    for field in fields(options):
        module.hparams.setdefault(field.name, getattr(options, field.name))
