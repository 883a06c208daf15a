"""Computes float32 linear layers and attention on a CPU by oneDNN, for inference.

torch gives float32 products to MKL, which uses half of what an AMD processor with AVX-512 can do. oneDNN, which torch
has built in, takes the same weights as they are, in half of the time. Its sums have another order: results differ by
float noise.
"""

from __future__ import annotations

import platform
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn import functional as F

ROWS = 250  # rows of scores computed at once, so that they stay in the processor's cache
MANY = 64  # minimum number of queries for which this attention is faster than torch's
BUILT_IN = platform.machine() in ("x86_64", "AMD64") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
Activation = Literal["none", "gelu"]


def takes(*tensors: Tensor) -> bool:
    """Return whether oneDNN computes with these: float32 on a CPU of x86, no gradient is wanted, and nothing is
    exported or computed in another precision."""
    return (
        BUILT_IN
        and not torch.compiler.is_exporting()
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
        and all(one.dtype == torch.float32 and one.device.type == "cpu" for one in tensors)
        and not (torch.is_grad_enabled() and any(one.requires_grad for one in tensors))
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = "none") -> Tensor:
    """Apply a linear layer and its activation. x: (..., I). weight: (O, I). bias: (O,). Returns (..., O).

    If `takes` is False, torch's own layer computes it.
    """
    if not takes(x, weight):
        product = F.linear(x, weight, bias)
        return F.gelu(product) if activation == "gelu" else product
    return _product(x, weight, bias, activation)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = "none") -> Tensor:
    return cast(Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], "none"))


def attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute attention of scaled queries (B, heads, N, D) over all keys and values (B, heads, S, D).

    A row's result does not depend on the other rows. For few queries, or if `takes` is False, torch's own attention
    computes it. Returns (B, heads, N, D).
    """
    if not takes(queries, keys, values) or queries.shape[2] < MANY:
        return F.scaled_dot_product_attention(queries, keys, values, scale=1.0)
    batch, heads, count, size = queries.shape
    out = torch.empty(batch, count, heads, size).transpose(1, 2)  # stored as the next layer reads it: (B, N, heads, D)
    for row in range(batch):
        for head in range(heads):
            own, key = queries[row, head].contiguous(), keys[row, head].contiguous()
            across = values[row, head].t().contiguous()
            for start in range(0, count, ROWS):
                scores = _product(own[start : start + ROWS], key)
                torch.softmax(scores, 1, out=scores)
                out[row, head, start : start + ROWS] = _product(scores, across)
    return out
