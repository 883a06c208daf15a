"""8-bit integers with a scale for each row: to store weights that are used in float32, and for linear layers.

In a file, a tensor of two dimensions or more and at least `SMALLEST` numbers becomes `name` (int8, the same shape) and
`name.scale` (float32, one for each row of the first dimension). All other floating-point tensors are stored in half
precision. One safetensors file holds all.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from mmdec.types import InputError

SCALE = ".scale"
SMALLEST = 4096  # a tensor is packed if it has at least this many numbers: packing small ones saves little


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weight (R, ...) to int8 (R, ...) and float32 scales (R,): the weight is about int8 times scale.

    A scale has 16 bits of precision, so that 127 times the scale is exact: unpacked weights are packed to the same
    bytes again.
    """
    rows = weight.detach().float().flatten(1)
    largest = rows.abs().amax(1).clamp(min=1e-12) / 127  # smaller scales, which clip large weights, give larger errors
    digits, exponent = torch.frexp(largest)
    scales = torch.ldexp(torch.ceil(digits * 2**16) / 2**16, exponent)
    return (rows / scales[:, None]).round().to(torch.int8).view(weight.shape), scales


def pack_rows(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert large matrices to 8 bits, and other floating-point tensors to half precision, see the module's docstring.
    `unpack_rows` reverses it, except for rounding."""
    packed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if tensor.is_floating_point() and tensor.dim() > 1 and tensor.numel() >= SMALLEST:
            packed[name], packed[name + SCALE] = quantise_rows(tensor)
        else:
            packed[name] = tensor.detach().half() if tensor.is_floating_point() else tensor.detach()
        packed[name] = packed[name].contiguous()
    return packed


def unpack_rows(state: Mapping[str, Tensor], argument: str = "model") -> dict[str, Tensor]:
    """Convert the output of `pack_rows` to float32; integers without a scale do not change. argument: the name of
    `state` in errors. Raises InputError if a tensor with a scale is not int8, or the scale has another number of rows.
    """
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


LEVELS = (127, 63)  # largest integer of a row; 63 for CPUs that sum two products in 16 bits, such as AVX2 alone
LEAST = 1e-12  # minimum of a row's largest value, so that a row of zeros is not divided by 0


@final
class Int8Linear(nn.Linear):
    """A linear layer in 8-bit integers on a CPU; forward: (..., I) float32, returns (..., O) float32. It keeps the
    weights of the layer that it replaces, for code that reads them (to find the drafters shipped for a model, say).

    torch's dynamic quantisation has one scale for the whole input, so that a token's result depends on the tokens
    beside it: drafts and batches would change the text. Here each row of the input has its own scale. The integers are
    multiplied by fbgemm's kernel for static quantisation, whose input scale is fixed at 1. Its sums of integers are
    exact in any order. So a row's result has the same bits, whatever the other rows are.
    """

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)  # no new weights
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        integers, scales = quantise_rows(linear.weight)
        self._packed = pack(integers, scales)
        self._levels = levels()

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features)
        whole, scales = whole_numbers(rows, self._levels)
        out = product(whole, self._packed, self._levels).mul_(scales)
        if self.bias is not None:
            out += self.bias  # a separate step: a fused one rounds in another way, and only for some shapes
        return out.view(*input.shape[:-1], self.out_features)


@final
class EachAlone(nn.Conv1d):
    """A convolution that computes each row of a batch alone, because libraries sum in another order for more rows."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([super(EachAlone, self).forward(row) for row in input.split(1)])


def quantise_linears(model: Any) -> None:
    """Replace linear layers of a model on the CPU by `Int8Linear`, in place: all of the encoder's, and the decoder's
    key and value projections of the encoder's states. Raises InputError on a GPU, or if this CPU has no such kernel.

    All weights of the decoder are rounded to half precision: those that stay floating-point can then be read faster
    (`ops/half.py`), and a pass over few columns takes the time of reading the weights. To quantise such columns would
    cost more than it saves. Convolutions keep their weights, but compute each row of a batch by itself.
    """
    if next(model.parameters()).device.type != "cpu":
        raise InputError("`dtype` may be int8 on a CPU alone, but the device is a GPU. Choose bfloat16 or float16.")
    encoder, decoder = model.get_encoder(), model.get_decoder()
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.copy_(weight.half())
    _replace(encoder.modules(), ("",))
    _replace((layer.encoder_attn for layer in decoder.layers), ("k_proj", "v_proj"))


def _replace(modules: Iterable[nn.Module], names: tuple[str, ...]) -> None:
    """Replace the children of `modules` that are convolutions, or linear layers whose names end in one of `names`."""
    for module in list(modules):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name.endswith(names):
                setattr(module, name, Int8Linear(child))
            elif type(child) is nn.Conv1d:
                alone = copy.copy(child)  # it shares the weights
                alone.__class__ = EachAlone
                setattr(module, name, alone)


def quantised(model: nn.Module) -> bool:
    """Return whether a model has layers of 8-bit integers."""
    return any(type(module) is Int8Linear for module in model.modules())


@cache
def levels() -> int:
    """Find the largest of `LEVELS` for which this CPU's kernel adds products exactly. Raises InputError if there is no
    such kernel or no such level."""
    for most in LEVELS:
        weight = torch.full((16, 64), 127, dtype=torch.int8)
        try:
            found = product(torch.full((1, 64), float(most)), pack(weight, torch.ones(16)), most)
        except (RuntimeError, NotImplementedError) as error:
            raise InputError(
                "`dtype` may be int8 where torch has fbgemm's kernels (x86), but this CPU has none. Choose float32."
            ) from error
        if found.eq(64 * 127 * most).all():
            return most
    raise InputError("`dtype` may be int8 where sums of integers are exact, but here they are not. Choose float32.")


def whole_numbers(rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Write rows (N, I) as whole numbers from -most to most, times a scale. Returns: numbers (N, I), scales (N, 1)."""
    scales = rows.abs().amax(1, keepdim=True).clamp_(min=LEAST).div_(most)  # far faster than a norm
    return rows.div(scales).round_(), scales


def pack(integers: Tensor, scales: Tensor) -> Any:
    """Prepare weights for `product`. integers: (O outputs, I inputs) int8. scales: (O,), their factors."""
    zeros = torch.zeros(len(scales), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "torch.quantize_per_tensor"
        )  # deprecated since torch 2.13, without a successor
        weight = torch.quantize_per_channel(integers * scales[:, None], scales.double(), zeros, 0, torch.qint8)
    return torch.ops.quantized.linear_prepack(weight, None)


def product(rows: Tensor, packed: Any, most: int) -> Tensor:
    """Multiply whole numbers (N, I), of at most `most`, by weights from `pack`. Returns: (N, O) float32."""
    kernel = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    # the kernel adds the zero point most + 1: if most is 63, numbers become 1 to 127, and two products fit in 16 bits
    return cast(Tensor, kernel(rows, 1.0, most + 1, packed))
