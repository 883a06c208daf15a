"""A copy of a float32 model that reads drafts from weights in half precision on a CPU.

A pass over few tokens takes the time of reading the weights, and torch's product of 8 tokens takes about twice as long
as that of one. fbgemm's product reads half of the bytes, and takes about as long for 8 tokens as for one. No weight
loses precision: see `mmdec.kernels.float16_linear`. A small model's weights stay in the processor's cache, from which
torch reads them faster.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmdec.kernels.float16_linear import HalfPrecisionCopies, HalfWeights, half_precision_copies
from mmdec.targets.hf_target import copy_modules, plain_linear
from mmdec.targets.ragged import current_packing, is_compiled
from mmdec.targets.tokenwise import MAX_COPIED_BYTES

MIN_COPIED_BYTES = 2**26  # of a model's weights; a smaller one is slower with copies (14 % with 16 MB)
MIN_COPIED_ELEMENTS = 2**15  # of a weight; the product of a smaller one takes the time of the call
MAX_ROWS = 28  # of a product, for which fbgemm is faster than torch
# Number of passes before the weights are copied. The copies of SmolLM2-135M take the time that they save in 280 passes.
MIN_PASSES = 256
MAX_COPIED_AT_ONCE = 2**22  # elements that are copied before a pass, in about 50 ms


@final
class HalfStoredLinear(nn.Linear):
    """torch's linear layer, which reads a copy of its weight in half precision for up to `MAX_ROWS` rows."""

    stored: HalfWeights

    def forward(self, input: Tensor) -> Tensor:
        packing = current_packing(input)
        rows = input.shape[:-1].numel() if packing is None else packing.nodes
        if rows > MAX_ROWS:
            return super().forward(input)
        return self.stored(input) if packing is None else packing.apply(self.stored, input)


@final
class DraftReader:
    """Makes the copy of a model that reads the drafts of a call, once the weights have been copied.

    Args:
        model: A decoder-only model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model
        size = sum(weight.nbytes for weight in model.parameters())
        pays = MIN_COPIED_BYTES <= size <= MAX_COPIED_BYTES
        self._copies: HalfPrecisionCopies | None = half_precision_copies(model) if pays else None
        self._copy: PreTrainedModel | None = None

    def model(self) -> PreTrainedModel:
        """Return the model for the next pass over a draft: the copy, or the model itself if it has none."""
        if self._copies is None or torch.is_autocast_enabled("cpu"):  # autocast computes in another precision
            return self._model
        self._copies.passes += 1
        if self._copy is None:
            layers: LayerCopies | None = self._copies.get(partial(LayerCopies, self._model), MIN_PASSES)
            if layers is not None and (halves := layers.copy_more()):
                self._copy = copy_modules(self._model, partial(_read_half, halves))
        return self._model if self._copy is None else self._copy


@final
class LayerCopies:
    """Half-precision copies of the layers that read drafts, made a few at a time, so that no pass waits long for them.

    Args:
        model: The model. No layer is copied if it is compiled.
    """

    def __init__(self, model: Any) -> None:
        layers = [*model.get_decoder().modules(), model.get_output_embeddings()]
        layers = [layer for layer in layers if plain_linear(layer) and layer.weight.numel() >= MIN_COPIED_ELEMENTS]
        self._remaining = [] if is_compiled(model) else layers
        self._halves = dict[nn.Module, HalfWeights]()
        self._lock = threading.Lock()

    def copy_more(self) -> Mapping[nn.Module, HalfWeights]:
        """Copy the next layers; none if half precision would change a weight, or if the CPU has no product with it.

        Returns:
            The copies of all layers once they are made, before that none.
        """
        with self._lock:
            copied = 0
            while self._remaining and copied < MAX_COPIED_AT_ONCE:
                layer = self._remaining.pop()
                try:
                    half = HalfWeights(layer.weight, layer.bias)
                except RuntimeError:
                    half = None
                if half is None or not half.exact:
                    self._remaining, self._halves = [], {}
                    break
                self._halves[layer] = half
                copied += layer.weight.numel()
            return {} if self._remaining else self._halves


def _read_half(halves: Mapping[nn.Module, HalfWeights], layer: nn.Module, same: Any) -> None:
    if layer in halves and plain_linear(layer):
        same.__class__, same.stored = HalfStoredLinear, halves[layer]
