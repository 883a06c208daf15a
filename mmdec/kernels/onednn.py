"""Computes float32 linear layers and attention with oneDNN on a CPU, for inference.

torch uses MKL for float32 matrix products, which reaches half of the speed that AMD processors with AVX-512 allow.
oneDNN, which is part of torch, takes half of the time, with the same weights. It sums in another order, so results
differ by float32 rounding.
"""

from __future__ import annotations

import platform
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from mmdec.kernels.cpu_features import is_intel

SCORE_ROWS = 250  # number of score rows that are computed at a time, so that they stay in the processor's cache
MIN_QUERIES = 64  # minimum number of queries for which this attention is faster than torch's own
HAS_ONEDNN = platform.machine() in ("x86_64", "AMD64") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
Activation = Literal["none", "gelu"]


def is_usable(*tensors: Tensor) -> bool:
    """Return whether oneDNN can be used for these tensors.

    They must be float32 on an x86 CPU, without gradients, autocast or model export.
    """
    return (
        HAS_ONEDNN
        and not torch.compiler.is_exporting()
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
        and all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in tensors)
        and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors))
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = "none") -> Tensor:
    """Apply a linear layer and its activation.

    If `is_usable` is False, torch's own layer computes it.

    Args:
        x: (..., I).
        weight: (O, I).
        bias: (O,).

    Returns:
        (..., O).
    """
    if not is_usable(x, weight):
        product = F.linear(x, weight, bias)
        return F.gelu(product) if activation == "gelu" else product
    return _product(x, weight, bias, activation)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = "none") -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "none"))


def attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute attention without a mask.

    A row's result does not depend on the other rows. Few queries, tensors that are not `is_usable`, and those on an
    Intel CPU go to torch's own attention.

    Args:
        queries: (B, heads, N, D), already scaled.
        keys: (B, heads, S, D).
        values: (B, heads, S, D).

    Returns:
        (B, heads, N, D).
    """
    if not is_usable(queries, keys, values) or queries.shape[2] < MIN_QUERIES or is_intel():
        return F.scaled_dot_product_attention(queries, keys, values, scale=1.0)
    batch, heads, count, size = queries.shape
    # memory is ordered (B, N, heads, D), because the next layer reads it so
    out = torch.empty(batch, count, heads, size).transpose(1, 2)
    for row in range(batch):
        for head in range(heads):
            query, key = queries[row, head].contiguous(), keys[row, head].contiguous()
            across = values[row, head].t().contiguous()
            for start in range(0, count, SCORE_ROWS):
                scores = _product(query[start : start + SCORE_ROWS], key)
                torch.softmax(scores, 1, out=scores)
                out[row, head, start : start + SCORE_ROWS] = _product(scores, across)
    return out
