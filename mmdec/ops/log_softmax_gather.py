"""Log-probabilities of a target's tokens on every vertex of a graph, without a log-softmax of the whole vocabulary.

logits  (B, L, V)   of the vertices
targets (B, M)      tokens, 0 .. V - 1
->      (B, M, L)   log P(y_t | v_j), float32 at least: the `match` of `mmdec.ops.dag`
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmdec.ops.kernels import runs_on
from mmdec.types import InputError


def log_softmax_gather(logits: Tensor, targets: Tensor) -> Tensor:
    """See above. Differentiable once, in the logits. On a GPU it reads them once, and once more for the gradient."""
    if logits.dim() != 3 or targets.dim() != 2 or len(logits) != len(targets) or targets.is_floating_point():
        raise InputError(
            f"`logits` and `targets` must be (B, L, V) and integers (B, M), but are {tuple(logits.shape)} and "
            f"{targets.dtype} {tuple(targets.shape)}. Give every sample its own tokens."
        )
    if runs_on(logits.device) and logits.dtype != torch.float64:
        from mmdec.ops.log_softmax_gather_triton import gather_triton

        return gather_triton(logits, targets)
    return _Gather.apply(logits, targets)


class _Gather(torch.autograd.Function):
    """Chosen logits minus the log-sum-exp of all. The backward pass allocates only the gradient itself."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        index = targets.long()[:, None].expand(-1, logits.shape[1], -1)  # (B, L, M)
        total = logits.to(wide).logsumexp(2)  # (B, L)
        ctx.save_for_backward(logits, index, total)
        return (logits.gather(2, index).to(wide) - total[:, :, None]).transpose(1, 2).contiguous()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] # the decorator makes `ctx` position-only
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None]:
        logits, index, total = ctx.saved_tensors
        grad = grads[0].transpose(1, 2).to(total.dtype)  # (B, L, M)
        out = (logits.to(total.dtype) - total[:, :, None]).exp_()
        out *= -grad.sum(2, keepdim=True)
        return out.scatter_add_(2, index, grad).to(logits.dtype), None
