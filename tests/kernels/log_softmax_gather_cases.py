"""Compares the fused kernel with log_softmax and gather in float64."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from tests.kernels.interpreter import DEVICE  # before the kernels
from tests.support.poisoned_memory import poisoned

# B, vertices, vocabulary, tokens, dtype
CASES = {
    "one of each": (1, 1, 1, 1, torch.float32),
    "tokens twice": (2, 3, 5, 9, torch.float32),
    "wider than a block": (1, 2, 2100, 66, torch.float32),
    "bfloat16": (2, 3, 33, 4, torch.bfloat16),
}
Case = tuple[int, int, int, int, torch.dtype]


def difference(module: ModuleType | SimpleNamespace, case: Case, seed: int = 0) -> float:
    """Compute the largest difference from float64: of the result, and of the gradient relative to its dtype's
    rounding."""
    batch, vertices, vocabulary, tokens, dtype = case
    torch.manual_seed(seed)
    logits = (3 * torch.randn(batch, vocabulary, vertices)).to(dtype).transpose(1, 2)  # not contiguous
    targets = torch.randint(0, vocabulary, (batch, tokens))
    weight = torch.randn(batch, vertices, tokens).transpose(1, 2)
    exact = logits.double().requires_grad_()
    index = targets[:, None].expand(batch, vertices, tokens)
    expected = exact.log_softmax(2).gather(2, index).transpose(1, 2)
    (expected * weight).sum().backward()
    own = logits.to(DEVICE).requires_grad_()
    with poisoned():
        got: Tensor = module.gather_triton(own, targets.to(DEVICE))
        (got * weight.to(DEVICE)).sum().backward()
    assert own.grad is not None
    assert exact.grad is not None
    assert own.grad.dtype == dtype
    assert got.shape == (batch, tokens, vertices)
    grad = (own.grad.cpu().double() - exact.grad).abs().amax() * (1 if dtype == torch.float32 else 1e-4)
    return float(torch.maximum((got.detach().cpu() - expected.detach()).abs().amax(), grad))
