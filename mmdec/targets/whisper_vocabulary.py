"""Whisper's output layer on a CPU: the product with 51,865 words is the dearest of a small decoder's pass."""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as torch_linear

from mmdec.ops.half import HalfWeights, copies_of
from mmdec.ops.onednn import linear
from mmdec.targets.hf_target import plain_linear

LARGE = 2**14  # minimum number of tokens in a large vocabulary
MOST = 32  # columns for which the layer's half-precision copy is used


def vocabulary_scores(output: nn.Module, states: Tensor) -> Tensor:
    """Apply the output layer to states (B, N, H) -> logits (B, N, V).

    On a CPU and in float32, a large layer is read from its half-precision copy (`ops/half.py`) once that pays, and
    multiplied by oneDNN before. The sums have another order, so logits differ by up to 1e-5.
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
