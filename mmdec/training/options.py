"""Options of a module or a data module: a frozen dataclass, whose fields recipes and checkpoints store directly.

A class takes `**options` and builds its dataclass from them. The command line finds the dataclass's fields there, so
recipes name each option without nesting.
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
    """The tokens, ordered by id: the option `units`, which the command line copies from the data to every model."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


def keep_options(module: LightningModule, options: Any) -> None:
    """Add options with default values to the hyperparameters, so that checkpoints store all options."""
    for field in fields(options):
        module.hparams.setdefault(field.name, getattr(options, field.name))
