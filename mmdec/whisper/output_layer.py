"""Computes Whisper's output layer on a CPU, with half-precision copies of weights, which are read from memory faster.

In a small decoder's pass, the product with the embeddings of all 51,865 tokens takes the most time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as torch_linear

from mmdec.kernels import tokenwise
from mmdec.kernels.float16_linear import HalfWeights, weights_state
from mmdec.kernels.onednn import linear
from mmdec.targets.hf_target import plain_linear
from mmdec.targets.tokenwise import is_half_on_cpu

MIN_COPIED_VOCABULARY = 2**14  # minimum vocabulary size for which a half-precision copy of the output layer saves time
# After this many passes the half-precision copies are made. This costs as much time as the copies save in 100 passes,
# so it would not pay for a short use.
MIN_PASSES_BEFORE_COPY = 64
# the output layer's half-precision copy is used for up to this many positions (rows x tokens) in a pass
MAX_COPY_POSITIONS = 32


@final
@dataclass
class HalfPrecisionCopies:
    """Half-precision copies of a module's weights, and the number of passes so far, after which copies are made."""

    usable: bool  # False: no copies, because changes of weights would not be noticed, or the last attempt failed
    state: list[tuple[int, int]]  # from `weights_state`
    passes: int = 0
    _made: Any = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, make: Callable[[], Any]) -> Any:
        """Return the copies; None before `MIN_PASSES_BEFORE_COPY` passes, or if they cannot be made.

        Args:
            make: Makes the copies; called once.
        """
        with self._lock:
            if self.usable and self._made is None and self.passes >= MIN_PASSES_BEFORE_COPY:
                try:
                    self._made = make()
                except RuntimeError:  # no such matrix product on this CPU, or weights too large for half precision
                    self._made = None
                self.usable = self._made is not None
            return self._made


_copies: WeakKeyDictionary[nn.Module, HalfPrecisionCopies] = WeakKeyDictionary()
_lock = threading.Lock()


def half_precision_copies(module: nn.Module) -> HalfPrecisionCopies:
    """Return the `HalfPrecisionCopies` of a module; a new one, with 0 passes, if the weights have changed."""
    weights = list(module.parameters())
    plain = all(one.dtype == torch.float32 and one.device.type == "cpu" and not one.is_inference() for one in weights)
    state = weights_state(weights) if plain else []
    with _lock:
        copies = _copies.get(module)
        if copies is None or copies.state != state:
            copies = _copies[module] = HalfPrecisionCopies(plain, state)
        return copies


def vocabulary_scores(output: nn.Module, states: Tensor) -> Tensor:
    """Return the logits (B, N, V) of hidden states (B, N, H).

    On a CPU and in float32, a large output layer is computed by oneDNN, and from its half-precision copy after
    `MIN_PASSES_BEFORE_COPY` passes. Both ways sum in another order than torch, so logits differ by up to 1e-5.
    """
    if not (plain_linear(output) and output.bias is None):
        return output(states)
    weight = cast(nn.Linear, output).weight
    if is_half_on_cpu(output):
        return tokenwise.linear(states, weight, copied=True)
    if (
        len(weight) < MIN_COPIED_VOCABULARY
        or not states.dtype == weight.dtype == torch.float32
        or states.device.type != "cpu"
    ):
        return torch_linear(states, weight)
    copies = half_precision_copies(output)
    copies.passes += 1
    copy = copies.get(partial(HalfWeights, weight)) if states.shape[0] * states.shape[1] <= MAX_COPY_POSITIONS else None
    return linear(states, weight) if copy is None else copy(states)
