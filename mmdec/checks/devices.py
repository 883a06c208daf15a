"""Checks the device and the dtype of a call, or chooses the best device and dtype on this machine."""

from __future__ import annotations

from typing import Any

import torch

from mmdec.checks.arguments import format_value
from mmdec.errors import InputError

# exceptions that the caller gets unchanged; any other exception of a library is converted to an InputError
PASSED_ON = (InputError, MemoryError, torch.OutOfMemoryError)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_device(device: str | torch.device | None) -> torch.device:
    """Return the device; None chooses a GPU if there is one, else the CPU.

    Raises:
        InputError: If this machine does not have it.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if not isinstance(device, (str, torch.device)):
            raise TypeError
        checked = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"`device` must be 'cpu' or 'cuda', but is {format_value(device)}. Leave it out to have it chosen."
        ) from error
    if checked.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"`device` must exist, but is '{device}' and this machine has no GPU. Use `device='cpu'`.")
    if checked.type == "cuda" and (checked.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"`device` must exist, but is '{device}' and the last GPU is cuda:{torch.cuda.device_count() - 1}. "
            "Count from 0."
        )
    if checked.type not in ("cpu", "cuda"):
        raise InputError(f"`device` must be 'cpu' or 'cuda', but is '{device}'. Leave it out to have it chosen.")
    return checked


def check_dtype(dtype: object, integers: bool = False) -> torch.dtype:
    """Convert a dtype or its name to a torch dtype; None means float32.

    Args:
        integers: Whether int8 is accepted, too.

    Raises:
        InputError: For any other value.
    """
    result: Any = dtype
    if dtype is None:
        result = torch.float32
    elif isinstance(dtype, str):
        result = getattr(torch, dtype, None)
    if not isinstance(result, torch.dtype) or (result not in DTYPES and not (integers and result is torch.int8)):
        text = str(dtype) if isinstance(dtype, torch.dtype) else format_value(dtype)
        raise InputError(
            f"`dtype` must be float32, bfloat16, float16{', int8' if integers else ''} or float64, but is {text}. "
            "Choose one, or leave it out."
        )
    return result


def check_same_dtype(dtype: object, model_dtype: torch.dtype) -> None:
    """Raise InputError unless `dtype` is None or equals `model_dtype`, the dtype of a loaded model."""
    if dtype is not None and check_dtype(dtype) != model_dtype:
        raise InputError(f"`dtype` must be that of the loaded `model`, {model_dtype}, but is {dtype}. Leave it out.")


def fastest_dtype(device: str | torch.device | None) -> torch.dtype:
    """Return the fastest dtype of sufficient precision: bfloat16 on a GPU that supports it in hardware, else float32.

    The command line uses it by default. The calls default to float32, in which drafts never change the output.

    Raises:
        InputError: For an impossible device.
    """
    quick = check_device(device).type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if quick else torch.float32


def has_fast_bfloat16(device: torch.device) -> bool:
    """Return whether matrix products on this device are faster in bfloat16 than in float32.

    On a CPU without AVX-512 they are not.
    """
    return device.type != "cpu" or torch.backends.cpu.get_cpu_capability().startswith("AVX512")
