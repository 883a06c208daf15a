"""Decides which operators run as Triton kernels: all of them, on a supported GPU with Triton installed.

Otherwise torch computes the same, with equal results up to rounding. Environment variables: `MMDEC_KERNELS=0` switches
all kernels off. `TRITON_INTERPRET=1`, set before Triton is first imported, lets kernels run on a CPU, slowly. The
kernels must then be called by name, as tests do: operators never choose an interpreted kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

KERNELS = {
    "tree_attention": "attention of a draft's nodes: split prefix, ancestors as bits, grouped heads packed",
    "kv_gather": "the accepted path of all layers moved in one launch",
    "dag": "marginal, gradient and best path of a graph",
    "log_softmax_gather": "only the log-probabilities of the target's tokens",
}
MIN_TRITON_VERSION = (3, 4)  # the oldest version of Triton that is supported
MIN_CUDA_CAPABILITY = (8, 0)  # minimum CUDA compute capability, because the kernels use bfloat16 matrix products


def is_interpreted() -> bool:
    """Return whether this process runs Triton kernels in Triton's interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_version() -> str | None:
    """Return the installed Triton's version; None if it is not installed."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def runs_on(device: torch.device) -> bool:
    """Return whether the operators named in `KERNELS` run as Triton kernels on tensors of this device."""
    return device.type == "cuda" and unavailable_reason(device.index) is None


@cache
def unavailable_reason(index: int | None = None) -> str | None:
    """Return why the Triton kernels are not used on a GPU, in words; None if they are used.

    Args:
        index: The GPU's number; None: the current GPU.
    """
    if os.environ.get("MMDEC_KERNELS") == "0":
        return "MMDEC_KERNELS=0 keeps them off"
    installed = triton_version()
    if installed is None:
        return "Triton is not installed"
    if tuple(int(part) for part in installed.split(".")[:2]) < MIN_TRITON_VERSION:
        return f"Triton {installed} is older than {'.'.join(map(str, MIN_TRITON_VERSION))}"
    if is_interpreted():
        return "TRITON_INTERPRET=1 interprets them: for tests only"
    if not torch.cuda.is_available():
        return "no GPU"
    if torch.version.hip is not None:
        return "they were written for NVIDIA's GPUs"
    capability = torch.cuda.get_device_capability(index)
    if capability < MIN_CUDA_CAPABILITY:
        return (
            f"the GPU has compute capability {capability[0]}.{capability[1]}, below "
            f"{MIN_CUDA_CAPABILITY[0]}.{MIN_CUDA_CAPABILITY[1]}"
        )
    return None


def launch(kernel: Any, grid: tuple[Any, ...]) -> Callable[..., None]:
    """Return a function that launches `kernel` with the given grid, on the GPU of its first tensor.

    Triton by itself would use the current GPU. The function takes the kernel's arguments, and num_warps and num_stages,
    which Triton's type hints lack.
    """
    start = kernel[grid]

    def on_device(*arguments: Any, **options: Any) -> None:
        device: torch.device = arguments[0].device
        if device.type != "cuda":  # on a CPU the kernels run in Triton's interpreter, so there is no GPU to choose
            start(*arguments, **options)
            return
        with torch.cuda.device(device):
            start(*arguments, **options)

    return on_device
