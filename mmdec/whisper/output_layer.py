"""Computes Whisper's output layer on a CPU, with half-precision copies of weights, which are read from memory faster.

In a small decoder's pass, the product with the embeddings of all 51,865 tokens takes the most time.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as torch_linear

from mmdec.kernels import tokenwise
from mmdec.kernels.float16_linear import HalfWeights, half_precision_copies
from mmdec.kernels.onednn import linear
from mmdec.targets.hf_target import plain_linear
from mmdec.targets.tokenwise import is_half_on_cpu

MIN_COPIED_VOCABULARY = 2**14  # minimum vocabulary size for which a half-precision copy of the output layer saves time
# the output layer's half-precision copy is used for up to this many positions (rows x tokens) in a pass
MAX_COPY_POSITIONS = 32


def vocabulary_scores(output: nn.Module, states: Tensor) -> Tensor:
    """Return the logits (B, N, V) of hidden states (B, N, H).

    On a CPU and in float32, a large output layer is computed by oneDNN, and from its half-precision copy after
    `MIN_PASSES_BEFORE_COPY` passes. Both ways sum in another order than torch, so logits differ by up to 1e-5.
    """
    if not (plain_linear(output) and output.bias is None):
        return output(states)
    weight = cast(nn.Linear, output).weight
    if is_half_on_cpu(output):
        return tokenwise.linear(states, weight, half=tokenwise.half_weights(weight))
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
