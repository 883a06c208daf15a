"""Stores weights in 8 bits: each row of a matrix as int8 with its own scale. They are used in float32.

A tensor of two dimensions or more, of at least `SMALLEST` numbers, becomes `name` (int8, the same shape) and
`name.scale` (float32, one for each row of the first dimension); all others are stored in half precision. Both are
written to one safetensors file.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmdec.types import InputError

SCALE = ".scale"
SMALLEST = 4096  # minimum numbers in a tensor that is packed


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(R, ...) float -> int8 (R, ...) and float32 scales (R,): weight is about int8 times scale.

    A scale has 16 bits of precision, so that 127 times the scale is exact: unpacked weights are packed to the same
    bytes again.
    """
    rows = weight.detach().float().flatten(1)
    largest = rows.abs().amax(1).clamp(min=1e-12) / 127  # scales that cut the largest weights have larger errors
    digits, exponent = torch.frexp(largest)
    scales = torch.ldexp(torch.ceil(digits * 2**16) / 2**16, exponent)
    return (rows / scales[:, None]).round().to(torch.int8).view(weight.shape), scales


def pack_rows(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state: matrices to 8 bits, the rest to half precision. `unpack_rows` reverses it, except for
    rounding."""
    packed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if tensor.is_floating_point() and tensor.dim() > 1 and tensor.numel() >= SMALLEST:
            packed[name], packed[name + SCALE] = quantise_rows(tensor)
        else:
            packed[name] = tensor.detach().half() if tensor.is_floating_point() else tensor.detach()
        packed[name] = packed[name].contiguous()
    return packed


def unpack_rows(state: Mapping[str, Tensor], argument: str = "model") -> dict[str, Tensor]:
    """Convert packed weights to float32. Tensors that were not packed do not change. argument: names them in errors.
    Raises InputError for a scale without a tensor, or with another number of rows."""
    unpacked: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith(SCALE) and name.removesuffix(SCALE) in state:
            continue
        scale = state.get(name + SCALE)
        if scale is None:
            unpacked[name] = tensor.float() if tensor.is_floating_point() else tensor
            continue
        if tensor.dtype != torch.int8 or scale.shape != tensor.shape[:1]:
            raise InputError(
                f"`{argument}` must hold int8 rows and a scale for each, but '{name}' is {tensor.dtype} of "
                f"{tuple(tensor.shape)} with scales of {tuple(scale.shape)}. Fetch it again."
            )
        unpacked[name] = tensor.float() * scale.float().view(-1, *[1] * (tensor.dim() - 1))
    return unpacked
