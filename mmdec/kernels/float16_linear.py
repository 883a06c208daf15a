"""Multiplies float32 inputs by weights stored in float16 on a CPU, which halves the bytes of weights that are read.

Many models are published in half precision and loaded as float32. fbgemm multiplies float32 inputs by float16 weights
and sums in float32. No weight loses precision, and a row's result has the same bits, whatever the other rows are. In a
decoder pass over few tokens, reading the weights takes nearly all of the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS_PER_PART = 512  # number of weight rows that are converted at a time, so that they stay in the processor's cache
# factor on the remainder (weight minus its float16 rounding), so that it is large enough for float16
REMAINDER_SCALE = 2.0**11


@final
class HalfWeights:
    """A linear layer with weights (O, I) stored in float16: one number for each, or two whose sum is the weight.

    Two numbers are stored if one is not exact. Their sum keeps 22 of the 24 bits of precision of float32.

    Args:
        weight: (O, I) float32 on a CPU.
        bias: (O,).

    Raises:
        RuntimeError: If fbgemm does not support this CPU, or if a weight is too large for float16.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        weight = weight.detach()
        parts = weight.split(ROWS_PER_PART)
        self.exact = all(torch.equal(part.half().float(), part) for part in parts)
        first = weight if self.exact else weight.half().float()
        if not all(bool(part.isfinite().all()) for part in first.split(ROWS_PER_PART)):
            raise RuntimeError("weights are too large for half precision")
        prepack = torch.ops.quantized.linear_prepack_fp16
        self._first: Any = prepack(first, None if bias is None else bias.detach())
        self._rest: Any = None if self.exact else prepack((weight - first).mul_(REMAINDER_SCALE), None)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the linear layer to x (..., I) float32.

        Returns:
            (..., O).
        """
        if -(count := x.shape[:-1].numel()) % (group := _group()):
            rows = F.pad(x.reshape(count, -1), (0, 0, 0, -count % group))
            return self._product(rows)[:count].view(*x.shape[:-1], -1)
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        product = cast(Tensor, torch.ops.quantized.linear_dynamic_fp16(x, self._first))
        if self._rest is None:
            return product
        return product.add_(torch.ops.quantized.linear_dynamic_fp16(x, self._rest), alpha=1 / REMAINDER_SCALE)


def weights_state(weights: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return (address, version counter) of each weight, by which changes after a copy are noticed."""
    return [(weight.data_ptr(), weight._version) for weight in weights]


@cache
def _group() -> int:
    """Return n: if the number of input rows is a multiple of n, a row's result does not depend on the other rows.

    n is 1; or 3 on a CPU (with AVX2 only) where fbgemm sums the last one or two rows in another order.
    """
    draw = torch.Generator().manual_seed(0)
    weight, rows = torch.randn(64, 512, generator=draw).half().float(), torch.randn(3, 512, generator=draw)
    packed = torch.ops.quantized.linear_prepack_fp16(weight, None)
    kernel = torch.ops.quantized.linear_dynamic_fp16
    return 1 if torch.equal(kernel(rows[:1], packed), kernel(rows, packed)[:1]) else 3
