"""Linear layers in 8-bit integers on a CPU, each row of their input quantised by itself.

torch's dynamic quantisation has one scale for the whole input, so that a token's result depends on the tokens beside
it: drafts and batches would change the text. Here each row has its own scale. The integers are multiplied by fbgemm's
kernel for static quantisation, whose input scale is fixed at 1; its sums of integers are exact, whatever the order. So
a row's result is the same bits beside any others.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from mmdec.nn.row_int8 import quantise_rows
from mmdec.types import InputError

ZERO = 128  # the byte that stands for 0
LEVELS = (127, 63)  # largest integer of a row; 63 for CPUs that sum two products in 16 bits
SMALLEST = 1e-12  # of a row's largest value: rows of zeros


@final
class Int8Linear(nn.Linear):
    """forward: (..., I) float32 -> (..., O) float32. Made from a linear layer, whose weights it keeps: what reads them
    (to find the drafters shipped for a model, say) still can."""

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)  # no new weights
        self.weight, self.bias = linear.weight, linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        integers, scales = quantise_rows(linear.weight)
        self._packed = _pack(integers, scales)
        self._levels = levels()

    def forward(self, input: Tensor) -> Tensor:
        rows = input.reshape(-1, self.in_features)
        scales = torch.linalg.vector_norm(rows, torch.inf, 1, True).clamp_(min=SMALLEST).div_(self._levels)
        out = _product(rows.div(scales).round_(), self._packed).mul_(scales)
        if self.bias is not None:
            out += self.bias  # not in one step with the product: a fused one rounds once, and not for every shape
        return out.view(*input.shape[:-1], self.out_features)


@final
class EachAlone(nn.Conv1d):
    """A convolution that computes each row of a batch by itself: libraries sum in another order for more rows."""

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([super(EachAlone, self).forward(row) for row in input.split(1)])


def quantise_linears(model: nn.Module) -> None:
    """Replace all linear layers of a model on the CPU, in place; convolutions keep their numbers, row by row. Raises
    InputError if this CPU has no such kernel."""
    if next(model.parameters()).device.type != "cpu":
        raise InputError("`dtype` may be int8 on a CPU alone, but the device is a GPU. Choose bfloat16 or float16.")
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear:
                setattr(module, name, Int8Linear(child))
            elif type(child) is nn.Conv1d:
                alone = copy.copy(child)  # of the same weights
                alone.__class__ = EachAlone
                setattr(module, name, alone)


def quantised(model: nn.Module) -> bool:
    """Whether a model has such layers."""
    return any(type(module) is Int8Linear for module in model.modules())


@cache
def levels() -> int:
    """The largest integer of a row for which this CPU's sums are exact. Raises InputError if it has no such kernel."""
    for most in LEVELS:
        weight = torch.full((16, 64), 127, dtype=torch.int8)
        try:
            found = _product(torch.full((1, 64), float(most)), _pack(weight, torch.ones(16)))
        except (RuntimeError, NotImplementedError) as error:
            raise InputError(
                "`dtype` may be int8 where torch has fbgemm's kernels (x86), but this CPU has none. Choose float32."
            ) from error
        if found.eq(64 * 127 * most).all():
            return most
    raise InputError("`dtype` may be int8 where sums of integers are exact, but here they are not. Choose float32.")


def _pack(integers: Tensor, scales: Tensor) -> Any:
    """integers: (O, I) int8. scales: (O,)."""
    zeros = torch.zeros(len(scales), dtype=torch.long)
    weight = torch.quantize_per_channel(integers * scales[:, None], scales.double(), zeros, 0, torch.qint8)
    return torch.ops.quantized.linear_prepack(weight, None)


def _product(rows: Tensor, packed: Any) -> Tensor:
    """(N, I) whole numbers -> (N, O) float32."""
    product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32
    return cast(Tensor, product(rows, 1.0, ZERO, packed))
