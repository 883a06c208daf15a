"""Whisper's output layer on a CPU, and half-precision copies of its weights and the decoder's, which are read faster.

The product with the embeddings of 51,865 tokens is the most expensive one in a small decoder's pass.
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

from mmdec.ops.half import HalfWeights
from mmdec.ops.onednn import linear
from mmdec.targets.hf_target import plain_linear

LARGE = 2**14  # minimum number of tokens for which a half-precision copy of the output layer pays
PAYS = 64  # copies are made after this many passes: making them takes the time that 100 passes save
MOST = 32  # maximum columns of a pass for which the output layer's half-precision copy is used


@final
@dataclass
class Copies:
    """The half-precision copies of a module's weights, and the number of the module's passes."""

    usable: bool  # False: changes of the weights could not be noticed, or this CPU has no kernel
    state: list[tuple[int, int]]  # address and version of each weight
    passes: int = 0
    _made: Any = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def made(self, make: Callable[[], Any]) -> Any:
        """Return the copies, for which `make` is called once, after `PAYS` passes; None before, or if it fails."""
        with self._lock:
            if self.usable and self._made is None and self.passes >= PAYS:
                try:
                    self._made = make()
                except RuntimeError:  # this CPU has no kernel for half precision
                    self._made = None
                self.usable = self._made is not None
            return self._made


_copies: WeakKeyDictionary[nn.Module, Copies] = WeakKeyDictionary()
_lock = threading.Lock()


def copies_of(module: nn.Module) -> Copies:
    """Return the copies of a module's weights. They are made anew if the weights have changed."""
    weights = list(module.parameters())
    plain = all(one.dtype == torch.float32 and one.device.type == "cpu" and not one.is_inference() for one in weights)
    state = [(one.data_ptr(), one._version) for one in weights] if plain else []
    with _lock:
        copies = _copies.get(module)
        if copies is None or copies.state != state:
            copies = _copies[module] = Copies(plain, state)
        return copies


def vocabulary_scores(output: nn.Module, states: Tensor) -> Tensor:
    """Apply the output layer to states (B, N, H). Returns: logits (B, N, V).

    On a CPU and in float32, a large layer is read from its half-precision copy (`ops/half.py`) after some passes;
    before, oneDNN multiplies it. The sums have another order, so logits differ by up to 1e-5.
    """
    if not (plain_linear(output) and output.bias is None):
        return output(states)
    weight = cast(nn.Linear, output).weight
    if len(weight) < LARGE or not states.dtype == weight.dtype == torch.float32 or states.device.type != "cpu":
        return torch_linear(states, weight)
    copies = copies_of(output)
    copies.passes += 1
    copy = copies.made(partial(HalfWeights, weight)) if states.shape[0] * states.shape[1] <= MOST else None
    return linear(states, weight) if copy is None else copy(states)
