"""The device that a caller names, or the best one that this machine has."""

from __future__ import annotations

import torch

from mmdec.checks.arguments import show
from mmdec.checks.errors import InputError


def check_device(device: str | torch.device | None) -> torch.device:
    """The device, checked to exist on this machine; None takes a GPU if there is one. Raises InputError."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if not isinstance(device, (str, torch.device)):
            raise TypeError
        checked = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"`device` must be 'cpu' or 'cuda', but is {show(device)}. Leave it out to have it chosen."
        ) from error
    if checked.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"`device` must exist, but is '{device}' and this machine has no GPU. Use device='cpu'.")
    if checked.type == "cuda" and (checked.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"`device` must exist, but is '{device}' and the last GPU is cuda:{torch.cuda.device_count() - 1}. "
            "Count from 0."
        )
    if checked.type not in ("cpu", "cuda"):
        raise InputError(f"`device` must be 'cpu' or 'cuda', but is '{device}'. Leave it out to have it chosen.")
    return checked


def fast_bfloat16(device: torch.device) -> bool:
    """Whether products in bfloat16 are faster than in float32 there: on a CPU they are not before AVX-512."""
    return device.type != "cpu" or torch.backends.cpu.get_cpu_capability().startswith("AVX512")
