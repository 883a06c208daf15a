"""8-bit integers with one scale per row, for weights that are stored small, and for linear layers on a CPU.

In a file, a tensor of two or more dimensions with at least `MIN_PACKED_ELEMENTS` numbers is stored as `name` (int8, the
same shape) and `name.scale` (float32, one number for each index of the first dimension). Other floating-point tensors
are stored in half precision. One safetensors file holds all tensors.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from mmdec.errors import InputError
from mmdec.kernels.cpu_features import has_bfloat16_tiles, has_int8_products

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
class Int8Weights:
    """A linear layer that computes in 8-bit integers on a CPU.

    torch's dynamic quantisation uses one scale for the whole input. A token's result would then depend on its
    neighbours, so drafts and batches would change the text. Here each row of the input has its own scale, and sums of
    integers are exact in any order. So a row's result has the same bits, whatever the other rows are.

    Args:
        weight: (O, I) float32.
        bias: (O,).
        fine: Whether each number of the input becomes the sum of two integers, the second in steps of 1/254. Attention
            sums in an order that depends on the draft, which changes its output by 1e-7. With one integer, this noise
            sometimes becomes a whole step of 1/127 in the next layer. Reading the weights takes most of the time of a
            pass over few tokens, so a second integer costs little.

    Raises:
        InputError: If fbgemm does not support this CPU.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, fine: bool = False) -> None:
        integers, scales = quantise_rows(weight)
        self._multiply: Callable[[Tensor], Tensor]
        if has_onednn_products():
            self._levels, self._multiply = LEVELS[0], partial(_onednn_product, _onednn_pack(integers, scales))
        else:
            self._levels = max_exact_level()
            self._multiply = partial(fbgemm_product, packed=fbgemm_pack(integers, scales), max_level=self._levels)
        self._bias, self._fine = bias, fine

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the linear layer to x (..., I).

        Returns:
            (..., O) float32.
        """
        rows = x.reshape(-1, x.shape[-1]).float()
        # `amax` of absolute values is far faster than a norm
        scales = rows.abs().amax(1, keepdim=True).clamp_(min=MIN_ROW_MAXIMUM).div_(self._levels)
        quotients = rows.div(scales)
        if self._fine:
            whole = quotients.round()
            rest = quotients.sub_(whole).mul_(2 * self._levels).round_()
            out = self._multiply(torch.cat([whole, rest]))
            out = out[: len(rows)].add_(out[len(rows) :], alpha=0.5 / self._levels).mul_(scales)
        else:
            out = self._multiply(quotients.round_()).mul_(scales)
        if self._bias is not None:
            out += self._bias  # added separately: with a bias, fbgemm rounds differently, but only for some shapes
        return out.view(*x.shape[:-1], out.shape[-1])


@final
class Int8Linear(nn.Linear):
    """`Int8Weights` as a module in place of torch's linear layer.

    It also keeps the original weights, for other code that reads them, such as the search for the model's shipped
    drafters.
    """

    def __init__(self, linear: nn.Linear, fine: bool = False) -> None:
        _take(self, linear)
        self.product = Int8Weights(linear.weight, linear.bias, fine)

    def forward(self, input: Tensor) -> Tensor:
        return self.product(input)


@final
class Bfloat16Linear(nn.Linear):
    """A linear layer that computes in bfloat16 and sums in float32, and returns the dtype of its input.

    Like `Int8Linear` it keeps the original weights. A product's order of sums depends on its number of rows, so each
    row of a batch is computed by itself.
    """

    def __init__(self, linear: nn.Linear) -> None:
        _take(self, linear)
        self._weight = linear.weight.detach().bfloat16()
        self._bias = None if linear.bias is None else linear.bias.detach().bfloat16()

    def forward(self, input: Tensor) -> Tensor:
        rows = input.bfloat16().split(1) if input.dim() > 2 else (input.bfloat16(),)
        products = [nn.functional.linear(row, self._weight, self._bias) for row in rows]
        return (products[0] if len(products) == 1 else torch.cat(products)).to(input.dtype)


def _take(layer: nn.Linear, other: nn.Linear) -> None:
    """Initialise a layer with the weights of another; the constructor of `nn.Linear` would allocate new ones."""
    nn.Module.__init__(layer)
    layer.weight, layer.bias = other.weight, other.bias
    layer.in_features, layer.out_features = other.in_features, other.out_features


@final
class RowwiseConv1d(nn.Conv1d):
    """A convolution that computes each row of the batch by itself.

    Libraries sum in another order if there are more rows.
    """

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([super(RowwiseConv1d, self).forward(row) for row in input.split(1)])


def quantise_linears(model: Any) -> None:
    """Replace linear layers of an encoder-decoder model on a CPU by those that this CPU computes fastest, in place.

    The encoder, and the keys and values of cross-attention, read all states of a window at once. They become
    `Int8Linear`; with AMX `Bfloat16Linear`, because quantising the input would take longer than 8 bits save. Their
    convolutions keep their weights, but compute each row of a batch by itself.

    The decoder reads few tokens at a time, which takes the time of reading the weights. Its layers and the output layer
    become `Int8Linear` too. On a CPU without VNNI they are rounded to half precision instead, to be read by
    `kernels/float16_linear.py`: quantising the inputs would cost more there than it saves.

    Raises:
        InputError: On a GPU, or if fbgemm does not support this CPU.
    """
    if next(model.parameters()).device.type != "cpu":
        raise InputError("`dtype` may be int8 only on a CPU, but the device is a GPU. Choose bfloat16 or float16.")
    encoder, decoder = model.get_encoder(), model.get_decoder()
    large_layer = Bfloat16Linear if has_bfloat16_tiles() else Int8Linear
    _replace(encoder.modules(), large_layer)
    _replace((layer.encoder_attn for layer in decoder.layers), large_layer, ("k_proj", "v_proj"))
    if has_onednn_products():
        fine = partial(Int8Linear, fine=True)
        _replace(decoder.modules(), fine)
        model.set_output_embeddings(fine(model.get_output_embeddings()))
        return
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.copy_(weight.half())


def _replace(
    modules: Iterable[nn.Module], linear: Callable[[nn.Linear], nn.Linear], names: tuple[str, ...] = ("",)
) -> None:
    """Replace layers among the children of `modules`.

    torch's linear layers whose names end in one of `names` become `linear`, convolutions `RowwiseConv1d`.
    """
    for module in list(modules):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name.endswith(names):
                setattr(module, name, linear(child))
            elif type(child) is nn.Conv1d:
                alone = copy.copy(child)  # the copy shares the weights
                alone.__class__ = RowwiseConv1d
                setattr(module, name, alone)


def has_int8_layers(model: nn.Module) -> bool:
    """Return whether layers of a model were replaced by `quantise_linears`."""
    return any(type(module) in (Int8Linear, Bfloat16Linear) for module in model.modules())


def has_onednn_products() -> bool:
    """Return whether oneDNN sums products of 8-bit integers exactly on this CPU, as it does with VNNI."""
    return has_int8_products() and _is_onednn_exact()


@cache
def _is_onednn_exact() -> bool:
    products = _onednn_product(_onednn_pack(_largest_weights(), torch.ones(16)), torch.full((1, 64), 127.0))
    return bool(products.eq(64 * 127 * 127).all())


def _largest_weights() -> Tensor:
    return torch.full((16, 64), 127, dtype=torch.int8)


@cache
def max_exact_level() -> int:
    """Return the largest number in `LEVELS` for which fbgemm sums products exactly on this CPU.

    Raises:
        InputError: If fbgemm does not support the CPU, or if no sum is exact.
    """
    for max_level in LEVELS:
        try:
            products = fbgemm_product(
                torch.full((1, 64), float(max_level)), fbgemm_pack(_largest_weights(), torch.ones(16)), max_level
            )
        except (RuntimeError, NotImplementedError) as error:
            raise InputError(
                "`dtype` must not be int8 on this CPU: torch has fbgemm's kernels only for x86. Choose float32."
            ) from error
        if products.eq(64 * 127 * max_level).all():
            return max_level
    raise InputError("`dtype` must not be int8 on this CPU, where sums of integers are not exact. Choose float32.")


def fbgemm_pack(integers: Tensor, scales: Tensor) -> Any:
    """Convert weights to the format that fbgemm reads in `fbgemm_product`.

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


def fbgemm_product(rows: Tensor, packed: Any, max_level: int) -> Tensor:
    """Multiply a matrix (N, I) of whole numbers by weights from `fbgemm_pack`.

    Args:
        max_level: The largest absolute value that `rows` may hold.

    Returns:
        (N, O) float32.
    """
    kernel = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    # The kernel adds max_level + 1 to each number, so that all are positive. With 63 they are 1 to 127: then the sum
    # of two products fits in 16 bits, as some CPUs need.
    return cast(Tensor, kernel(rows, 1.0, max_level + 1, packed))


def _onednn_pack(integers: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert weights as for `fbgemm_pack` to what oneDNN reads: packed weights, scales and zeros (O,)."""
    return torch.ops.onednn.qlinear_prepack(integers, None), scales, torch.zeros(len(scales), dtype=torch.int32)


def _onednn_product(packed: tuple[Tensor, Tensor, Tensor], rows: Tensor) -> Tensor:
    """Do the same as `fbgemm_product`, with the same bits, in less time on a CPU with VNNI; `rows` is overwritten."""
    unsigned = rows.add_(128).to(torch.uint8)  # oneDNN has no fast kernel for signed input
    kernel = torch.ops.onednn.qlinear_pointwise
    return cast(Tensor, kernel(unsigned, 1.0, 128, *packed, None, 1.0, 0, torch.float32, "none", [], ""))
