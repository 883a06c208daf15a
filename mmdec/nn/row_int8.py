"""Weights in 8 bits: the rows of a matrix as int8 with a scale each, computed in float32 again.

A tensor of two dimensions or more, of at least `SMALLEST` numbers, becomes `name` (int8, its own shape) and
`name.scale` (float32, one for each row of the first dimension); all others stay in half precision. safetensors holds
both.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmdec.types import InputError

SCALE = ".scale"
SMALLEST = 4096  # numbers in a tensor that is worth it


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(R, ...) float -> int8 (R, ...) and float32 scales (R,): weight is about int8 times scale.

    A scale has 16 bits of precision, so that 127 times it is exact: what was unpacked is packed to the same bytes.
    """
    rows = weight.detach().float().flatten(1)
    largest = rows.abs().amax(1).clamp(min=1e-12) / 127  # scales that cut the largest weights have larger errors
    digits, exponent = torch.frexp(largest)
    scales = torch.ldexp(torch.ceil(digits * 2**16) / 2**16, exponent)
    return (rows / scales[:, None]).round().to(torch.int8).view(weight.shape), scales


def pack_rows(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state with its matrices in 8 bits, the rest in half precision. `unpack_rows` undoes it, but for rounding."""
    packed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if tensor.is_floating_point() and tensor.dim() > 1 and tensor.numel() >= SMALLEST:
            packed[name], packed[name + SCALE] = quantise_rows(tensor)
        else:
            packed[name] = tensor.detach().half() if tensor.is_floating_point() else tensor.detach()
        packed[name] = packed[name].contiguous()
    return packed


def unpack_rows(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in float32. Tensors that were never packed are left alone. Raises InputError for a scale that has no
    tensor, or another number of rows."""
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
                f"`model` must hold int8 rows and a scale for each, but '{name}' is {tensor.dtype} of "
                f"{tuple(tensor.shape)} with scales of {tuple(scale.shape)}. Fetch it again."
            )
        unpacked[name] = tensor.float() * scale.float().view(-1, *[1] * (tensor.dim() - 1))
    return unpacked
