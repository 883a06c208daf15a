"""`log_softmax_gather` in Triton: a program reads one vertex's logits once and keeps those of the target's tokens.

The gradient of a logit is the sum of incoming gradients of its token, minus its probability times the sum of all.
Repeated tokens of a target are summed before they are written, so that all writes to one address agree.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmdec.ops.kernels import launch

TOKENS = 64  # target tokens at a time
VOCABULARY = 2048  # logits read at a time


@triton.jit
def _gather(
    logits, targets, out, totals, vertices, vocabulary, tokens, x_b, x_l, x_v,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    row, vertex = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    row_logits = logits + row * x_b + vertex * x_l
    top = float("-inf")
    total = 0.0
    for begin in range(0, vocabulary, BLOCK_V):
        v = begin + tl.arange(0, BLOCK_V)
        x = tl.load(row_logits + v * x_v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), 0)
        top = new_top
    log_total = top + tl.log(total)
    tl.store(totals + row * vertices + vertex, log_total)
    for begin in range(0, tokens, BLOCK_M):
        m = begin + tl.arange(0, BLOCK_M)
        token = tl.load(targets + row * tokens + m, mask=m < tokens, other=0)
        x = tl.load(row_logits + token * x_v, mask=m < tokens, other=0.0).to(tl.float32)
        tl.store(out + (row * tokens + m) * vertices + vertex, x - log_total, mask=m < tokens)


@triton.jit
def _gather_gradient(
    logits, targets, totals, grads, out, vertices, vocabulary, tokens, x_b, x_l, x_v, g_b, g_m, g_l,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    row, vertex = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    row_logits = logits + row * x_b + vertex * x_l
    row_out = out + (row * vertices + vertex) * vocabulary
    log_total = tl.load(totals + row * vertices + vertex)
    grads += row * g_b + vertex * g_l
    targets += row * tokens
    total = 0.0
    for begin in range(0, tokens, BLOCK_M):
        m = begin + tl.arange(0, BLOCK_M)
        total += tl.sum(tl.load(grads + m * g_m, mask=m < tokens, other=0.0).to(tl.float32), 0)
    for begin in range(0, vocabulary, BLOCK_V):
        v = begin + tl.arange(0, BLOCK_V)
        x = tl.load(row_logits + v * x_v, mask=v < vocabulary, other=0.0).to(tl.float32)
        tl.store(row_out + v, (-total * tl.exp(x - log_total)).to(out.dtype.element_ty), mask=v < vocabulary)
    tl.debug_barrier()  # the whole row is written before single tokens are overwritten
    for begin in range(0, tokens, BLOCK_M):
        m = begin + tl.arange(0, BLOCK_M)
        token = tl.load(targets + m, mask=m < tokens, other=-1)
        share = tl.zeros([BLOCK_M], tl.float32)
        for other in range(0, tokens, BLOCK_M):
            n = other + tl.arange(0, BLOCK_M)
            others = tl.load(targets + n, mask=n < tokens, other=-2)
            grad = tl.load(grads + n * g_m, mask=n < tokens, other=0.0).to(tl.float32)
            share += tl.sum(tl.where(token[:, None] == others[None], grad[None], 0.0), 1)
        x = tl.load(row_logits + token * x_v, mask=m < tokens, other=0.0).to(tl.float32)
        value = share - total * tl.exp(x - log_total)
        tl.store(row_out + token, value.to(out.dtype.element_ty), mask=m < tokens)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        batch, vertices, vocabulary = logits.shape
        targets = targets.long().contiguous()
        tokens = targets.shape[1]
        out = torch.empty(batch, tokens, vertices, dtype=torch.float32, device=logits.device)
        totals = torch.empty(batch, vertices, dtype=torch.float32, device=logits.device)
        launch(_gather, (vertices, batch))(
            logits, targets, out, totals, vertices, vocabulary, tokens, *logits.stride(),
            BLOCK_V=VOCABULARY, BLOCK_M=TOKENS, num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(logits, targets, totals)
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] # the decorator makes `ctx` position-only
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None]:
        logits, targets, totals = ctx.saved_tensors
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        launch(_gather_gradient, (logits.shape[1], len(logits)))(
            logits, targets, totals, grads[0], out, *logits.shape[1:], targets.shape[1],
            *logits.stride(), *grads[0].stride(), BLOCK_V=VOCABULARY, BLOCK_M=TOKENS, num_warps=8,
        )  # fmt: skip
        return out, None


def gather_triton(logits: Tensor, targets: Tensor) -> Tensor:
    """(B, M, L) float32 for logits (B, L, V) and targets (B, M): see `log_softmax_gather`."""
    return _Gather.apply(logits, targets)
