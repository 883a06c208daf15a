"""Multiplies float32 inputs by weights stored in float16 on a CPU, which halves the bytes of weights that are read.

Many models are published in half precision and loaded as float32. fbgemm multiplies float32 inputs by float16 weights
and sums in float32. No weight loses precision, and a row's result has the same bits, whatever the other rows are. In a
decoder pass over few tokens, reading the weights takes nearly all of the time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, cast, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS_PER_PART = 512  # number of weight rows that are converted at a time, so that they stay in the processor's cache
# After this many passes the half-precision copies are made. This costs as much time as the copies save in 100 passes,
# so it would not pay for a short use.
MIN_PASSES_BEFORE_COPY = 64
SAMPLES_PER_WEIGHT = 16  # numbers of each weight that are compared to notice a change
MAX_EXPONENT = 15  # so that the largest weight is below 2**15, and its products do not overflow
# factor on the remainder (weight minus its float16 rounding), so that it is large enough for float16
REMAINDER_SCALE = 2.0**11


@final
class HalfWeights:
    """A linear layer with weights (O, I) stored in float16: one number for each, or two whose sum is the weight.

    One number is the weight times a power of 2, which loses nothing. Two numbers are stored if one is not exact. Their
    sum keeps 22 of the 24 bits of precision of float32.

    Args:
        weight: (O, I) float32 on a CPU.
        bias: (O,).

    Raises:
        RuntimeError: If fbgemm does not support this CPU, or if a weight is too large for float16.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        weight, self._scale = weight.detach(), 1.0
        self.exact = _is_exact(weight, 1.0)
        if not self.exact and _is_exact(weight, scale := _largest_scale(weight)):
            self.exact, self._scale = True, scale
        first = weight * self._scale if self.exact else weight.half().float()
        if not all(bool(part.isfinite().all()) for part in first.split(ROWS_PER_PART)):
            raise RuntimeError("weights are too large for half precision")
        prepack = torch.ops.quantized.linear_prepack_fp16
        self._first: Any = prepack(first, None if bias is None else bias.detach() * self._scale)
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
            return product if self._scale == 1.0 else product.mul_(1 / self._scale)
        return product.add_(torch.ops.quantized.linear_dynamic_fp16(x, self._rest), alpha=1 / REMAINDER_SCALE)


def _is_exact(weight: Tensor, scale: float) -> bool:
    parts = (part * scale for part in weight.split(ROWS_PER_PART))
    return all(torch.equal(part.half().float(), part) for part in parts)


def _largest_scale(weight: Tensor) -> float:
    """Return the largest power of 2 by which weights can be multiplied in float16.

    bfloat16 weights then become exact: without it, those below 2**-17 need more digits than float16 has there.
    """
    largest = float(weight.abs().amax())
    return 2.0 ** (MAX_EXPONENT - math.frexp(largest)[1]) if 0 < largest < math.inf else 1.0


def weights_state(weights: Iterable[Tensor]) -> list[tuple[int, int, list[float]]]:
    """Return address, version counter and samples of each weight, by which changes after a copy are noticed.

    The samples show changes of `weight.data`, which torch does not count, such as peft's when it merges adapters.
    """
    return [(weight.data_ptr(), weight._version, _samples(weight)) for weight in weights]


def _samples(weight: Tensor) -> list[float]:
    """Return evenly spaced numbers of a weight."""
    numbers = weight.detach().flatten()
    return cast(list[float], numbers[:: len(numbers) // SAMPLES_PER_WEIGHT | 1].tolist())  # odd: of several columns


@final
@dataclass
class HalfPrecisionCopies:
    """Half-precision copies of a module's weights, and the number of passes so far, after which copies are made."""

    usable: bool  # False: no copies, because changes of weights would not be noticed, or the last attempt failed
    weights: Sequence[Tensor]  # of the module
    passes: int = 0
    # `weights_state` before the copies were made; None: they are not, so nothing is read, which would take milliseconds
    state: list[tuple[int, int, list[float]]] | None = None
    _copies: Any = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, make: Callable[[], Any], after: int | None = None) -> Any:
        """Return the copies; None before they pay, or if they cannot be made.

        Args:
            make: Makes the copies; called once.
            after: Number of passes before the copies are made; None: `MIN_PASSES_BEFORE_COPY`.
        """
        min_passes = MIN_PASSES_BEFORE_COPY if after is None else after
        with self._lock:
            if self.usable and self._copies is None and self.passes >= min_passes:
                self.state = weights_state(self.weights)
                try:
                    self._copies = make()
                except RuntimeError:  # no such matrix product on this CPU, or weights too large for half precision
                    self._copies = None
                self.usable = self._copies is not None
            return self._copies


_copies: WeakKeyDictionary[nn.Module, HalfPrecisionCopies] = WeakKeyDictionary()
_lock = threading.Lock()


def half_precision_copies(module: nn.Module) -> HalfPrecisionCopies:
    """Return the `HalfPrecisionCopies` of a module; a new one, with 0 passes, if the weights of copies have changed."""
    weights = list(module.parameters())
    plain = all(
        weight.dtype == torch.float32 and weight.device.type == "cpu" and not weight.is_inference()
        for weight in weights
    )
    with _lock:
        copies = _copies.get(module)
        if copies is None or (copies.state is not None and copies.state != (weights_state(weights) if plain else [])):
            copies = _copies[module] = HalfPrecisionCopies(plain, weights)
        if copies.state is None:
            copies.usable, copies.weights = plain, weights
        return copies


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
