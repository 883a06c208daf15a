"""8-bit integers with one scale per row, for weights that are stored small, and for linear layers on a CPU.

In a file, a tensor of two or more dimensions with at least `MIN_PACKED_ELEMENTS` numbers is stored as `name` (int8, the
same shape) and `name.scale` (float32, one number for each index of the first dimension). Other floating-point tensors
are stored in half precision. One safetensors file holds all tensors.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from mmdec.errors import InputError

SCALE_SUFFIX = ".scale"
# minimum number of elements of a tensor that is stored in 8 bits; for smaller ones the gain is negligible
MIN_PACKED_ELEMENTS = 4096


def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise weight (R, ...) to int8 (R, ...) and float32 scales (R,). Approximately weight = int8 * scale.

    The scales have only 16 bits of precision, so that 127 times a scale is exact. Then weights that were unpacked and
    are packed again give the same bytes.
    """
    rows = weight.detach().float().flatten(1)
    # smaller scales would clip large weights, which gives larger errors
    largest = rows.abs().amax(1).clamp(min=1e-12) / 127
    digits, exponent = torch.frexp(largest)
    scales = torch.ldexp(torch.ceil(digits * 2**16) / 2**16, exponent)
    return (rows / scales[:, None]).round().to(torch.int8).view(weight.shape), scales


def pack_rows(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert a state dict for storing; `unpack_rows` reverses this, except for rounding.

    Matrices of at least `MIN_PACKED_ELEMENTS` elements become int8 with a tensor `name.scale`, other floating-point
    tensors half precision.
    """
    packed: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if tensor.is_floating_point() and tensor.dim() > 1 and tensor.numel() >= MIN_PACKED_ELEMENTS:
            packed[name], packed[name + SCALE_SUFFIX] = quantise_rows(tensor)
        else:
            packed[name] = tensor.detach().half() if tensor.is_floating_point() else tensor.detach()
        packed[name] = packed[name].contiguous()
    return packed


def unpack_rows(state: Mapping[str, Tensor], argument: str = "model") -> dict[str, Tensor]:
    """Convert a state dict from `pack_rows` to float32.

    Integer tensors without a scale are not changed.

    Args:
        argument: Name of the caller's argument, for errors.

    Raises:
        InputError: If a tensor with a scale is not int8, or has another number of rows than its scale.
    """
    unpacked: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) in state:
            continue
        scale = state.get(name + SCALE_SUFFIX)
        if scale is None:
            unpacked[name] = tensor.float() if tensor.is_floating_point() else tensor
            continue
        if tensor.dtype != torch.int8 or scale.shape != tensor.shape[:1]:
            raise InputError(
                f"`{argument}` must hold int8 rows and a scale for each, but '{name}' is {tensor.dtype} of "
                f"{tuple(tensor.shape)} with scales of {tuple(scale.shape)}. Download it again."
            )
        unpacked[name] = tensor.float() * scale.float().view(-1, *[1] * (tensor.dim() - 1))
    return unpacked


LEVELS = (127, 63)  # largest input integer; 63 for CPUs (such as those with AVX2 only) that sum two products in 16 bits
MIN_ROW_MAXIMUM = 1e-12  # minimum of a row's largest absolute value, so that a row of zeros is not divided by 0


@final
class Int8Linear(nn.Linear):
    """A linear layer that computes in 8-bit integers on a CPU.

    The layer also keeps the original weights, for other code that reads them, such as the search for the model's
    shipped drafters.

    torch's dynamic quantisation uses one scale for the whole input. A token's result would then depend on its
    neighbours, so drafts and batches would change the text. Here each row of the input has its own scale. The integers
    are multiplied by fbgemm's kernel for static quantisation, with input scale 1. Its integer sums are exact in any
    order. So a row's result has the same bits, whatever the other rows are.
    """

    def __init__(self, linear: nn.Linear) -> None:
        # call the constructor of `Module`, because that of `nn.Linear` would allocate new weights
        nn.Module.__init__(self)
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        integers, scales = quantise_rows(linear.weight)
        self._packed = pack(integers, scales)
        self._levels = levels()

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features)
        whole, scales = quantise_inputs(rows, self._levels)
        out = product(whole, self._packed, self._levels).mul_(scales)
        if self.bias is not None:
            out += self.bias  # added separately: with a bias, fbgemm rounds differently, but only for some shapes
        return out.view(*input.shape[:-1], self.out_features)


@final
class RowwiseConv1d(nn.Conv1d):
    """A convolution that computes each row of the batch by itself.

    Libraries sum in another order if there are more rows.
    """

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([super(RowwiseConv1d, self).forward(row) for row in input.split(1)])


def quantise_linears(model: Any) -> None:
    """Replace linear layers of an encoder-decoder model on a CPU by `Int8Linear`, in place.

    These are all layers of the encoder, and in the decoder the key and value projections of cross-attention.

    The decoder's other weights stay floating-point, but are rounded to half precision: then they can be read faster
    (`kernels/float16_linear.py`). A decoder pass over few tokens takes the time of reading the weights, and quantising
    those few inputs would cost more than it saves. Convolutions keep their weights, but compute each row of a batch by
    itself.

    Raises:
        InputError: On a GPU, or if fbgemm does not support this CPU.
    """
    if next(model.parameters()).device.type != "cpu":
        raise InputError("`dtype` may be int8 only on a CPU, but the device is a GPU. Choose bfloat16 or float16.")
    encoder, decoder = model.get_encoder(), model.get_decoder()
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.copy_(weight.half())
    _replace(encoder.modules(), ("",))
    _replace((layer.encoder_attn for layer in decoder.layers), ("k_proj", "v_proj"))


def _replace(modules: Iterable[nn.Module], names: tuple[str, ...]) -> None:
    """Replace layers among the children of `modules`.

    Linear layers whose names end in one of `names` become `Int8Linear`, convolutions `RowwiseConv1d`.
    """
    for module in list(modules):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name.endswith(names):
                setattr(module, name, Int8Linear(child))
            elif type(child) is nn.Conv1d:
                alone = copy.copy(child)  # the copy shares the weights
                alone.__class__ = RowwiseConv1d
                setattr(module, name, alone)


def has_int8_layers(model: nn.Module) -> bool:
    """Return whether a model has layers of type `Int8Linear`."""
    return any(type(module) is Int8Linear for module in model.modules())


@cache
def levels() -> int:
    """Return the largest number in `LEVELS` for which fbgemm sums products exactly on this CPU.

    Raises:
        InputError: If fbgemm does not support the CPU, or if no sum is exact.
    """
    for most in LEVELS:
        weight = torch.full((16, 64), 127, dtype=torch.int8)
        try:
            products = product(torch.full((1, 64), float(most)), pack(weight, torch.ones(16)), most)
        except (RuntimeError, NotImplementedError) as error:
            raise InputError(
                "`dtype` must not be int8 on this CPU: torch has fbgemm's kernels only for x86. Choose float32."
            ) from error
        if products.eq(64 * 127 * most).all():
            return most
    raise InputError("`dtype` must not be int8 on this CPU, where sums of integers are not exact. Choose float32.")


def quantise_inputs(rows: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Quantise the rows of a matrix (N, I): each becomes whole numbers from -most to most, times a scale.

    Returns:
        The numbers (N, I) as floats, and the scales (N, 1).
    """
    # `amax` of absolute values is far faster than a norm
    scales = rows.abs().amax(1, keepdim=True).clamp_(min=MIN_ROW_MAXIMUM).div_(most)
    return rows.div(scales).round_(), scales


def pack(integers: Tensor, scales: Tensor) -> Any:
    """Convert weights to the format that fbgemm reads in `product`.

    Args:
        integers: (O, I) int8.
        scales: (O,), factor of each row.
    """
    zeros = torch.zeros(len(scales), dtype=torch.long)
    with warnings.catch_warnings():
        # deprecated since torch 2.13, without a successor
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor")
        weight = torch.quantize_per_channel(integers * scales[:, None], scales.double(), zeros, 0, torch.qint8)
    return torch.ops.quantized.linear_prepack(weight, None)


def product(rows: Tensor, packed: Any, most: int) -> Tensor:
    """Multiply a matrix (N, I) of whole numbers by weights from `pack`.

    Args:
        most: The largest absolute value that `rows` may hold.

    Returns:
        (N, O) float32.
    """
    kernel = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    # The kernel adds most + 1 to each number, so that all are positive. With most = 63 they are 1 to 127: then the sum
    # of two products fits in 16 bits, as some CPUs need.
    return cast(Tensor, kernel(rows, 1.0, most + 1, packed))
