"""The loss of one Medusa head through an output matrix that is not trained.

Logits are made for a few positions at a time, their gradient with respect to the head's states at once: K heads' logits
over a vocabulary of 51866 never stand side by side, and none is made twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

CELLS = 1 << 25  # logits held at a time


class _FrozenOutput(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override] # torch declares it of any arguments
        ctx: Any, states: Tensor, output: Tensor, targets: Tensor, teacher: Tensor | None, weight: float, cells: int
    ) -> tuple[Tensor, Tensor]:
        wanted = states.requires_grad
        gradient = torch.empty_like(states) if wanted else None
        ranks = torch.empty_like(targets)
        total = torch.zeros((), dtype=torch.promote_types(states.dtype, torch.float32), device=states.device)
        rows = max(1, cells // output.shape[0])
        for begin in range(0, len(states), rows):
            part = slice(begin, begin + rows)
            target = targets[part, None]
            logits = linear(states[part].to(output.dtype), output).to(total.dtype)
            score = logits.gather(1, target)
            ranks[part] = (logits > score).sum(1)
            logs = logits.log_softmax(1)
            total -= logs.gather(1, target).sum()
            slope = logs.exp()
            if teacher is not None:
                guide = linear(teacher[part].to(output.dtype), output).to(total.dtype).log_softmax(1)
                likely = guide.exp()
                total += weight * (likely * (guide - logs)).sum()
                slope = slope * (1 + weight) - weight * likely
            if gradient is not None:
                slope.scatter_add_(1, target, -torch.ones_like(score))
                gradient[part] = (slope.to(output.dtype) @ output).to(gradient.dtype)
        count = max(len(states), 1)
        if gradient is not None:
            ctx.save_for_backward(gradient.div_(count))
        ctx.mark_non_differentiable(ranks)
        return total / count, ranks

    @staticmethod
    def backward(ctx: Any, loss: Tensor, _: Tensor) -> Any:  # type: ignore[override] # declared of any arguments
        (gradient,) = ctx.saved_tensors
        return (gradient * loss).to(gradient.dtype), None, None, None, None, None


def head_loss(
    states: Tensor,
    output: Tensor,
    targets: Tensor,
    teacher: Tensor | None = None,
    teacher_weight: float = 0.0,
    cells: int = CELLS,
) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy of states (N, H) times the output matrix (V, H) against targets (N,) int64, and the targets'
    ranks (N,): 0 where a target is the likeliest token.

    With `teacher` states (N, H), whose distribution through the same matrix is the model's own, `teacher_weight` times
    KL(model || head) is added (arXiv 2409.15869 does so). No gradient reaches the matrix or the teacher.
    """
    if not teacher_weight:
        teacher = None
    loss, ranks = _FrozenOutput.apply(states, output.detach(), targets, teacher, teacher_weight, cells)
    return loss, ranks
