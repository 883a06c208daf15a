"""Checks whether a drafter fits a model: its sizes, its device and its dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmdec.errors import InputError
from mmdec.types import Target


def check_model_sizes(
    sizes: Mapping[str, tuple[int, object]], trained_for: str, hints: Mapping[str, str] | None = None
) -> None:
    """Raise InputError unless a loaded model has the sizes for which a drafter's weights were trained.

    Args:
        sizes: What is counted, such as "tokens" -> (number in the weights, number in the model).
        trained_for: The model for which the weights were trained; "" if it is not known.
        hints: What is counted -> a further sentence of the error.
    """
    for noun, (expected, actual) in sizes.items():
        if expected != actual:
            hint = (hints or {}).get(noun, "")
            raise InputError(
                f"`model` must have {expected} {noun} for this drafter, but has {actual}. It was trained for "
                f"{trained_for or 'another model'}; use a drafter trained for this model. {hint}".rstrip()
            )


def check_target_sizes(target: Target, hidden_size: int, vocab_size: int) -> None:
    """Raise InputError unless a drafter of these sizes fits the target."""
    if (hidden_size, vocab_size) != (target.hidden_size, target.vocab_size):
        raise InputError(
            f"`drafter` must fit a model with {target.hidden_size} channels and {target.vocab_size} tokens, but this "
            f"one is for {hidden_size} and {vocab_size}. Use a drafter trained for this model."
        )


def check_drafter_device(target: Target, device: torch.device) -> None:
    """Raise InputError unless a drafter on this device is on the target's."""
    if device != target.device:
        raise InputError(f"`drafter` must be on the target's device, {target.device}, but is on {device}. Move it.")


def check_drafter_placement(target: Target, weight: Tensor, dtype: torch.dtype) -> None:
    """Raise InputError unless a drafter's weights have the device of the target, and the dtype of its LM head.

    Args:
        weight: One of the drafter's weights.
        dtype: The LM head's.
    """
    if weight.device != target.device or weight.dtype != dtype:
        raise InputError(
            f"`drafter` must be on {target.device} in {dtype}, but is on {weight.device} in {weight.dtype}. Load it "
            "again for this model, or move its weights there."
        )
