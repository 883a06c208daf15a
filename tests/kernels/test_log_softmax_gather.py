"""The fused gather and its torch twin against log_softmax and gather in float64."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.support.interpreter import DEVICE  # before the kernels

from mmdec.ops import log_softmax_gather_triton  # isort: skip
from mmdec.ops.log_softmax_gather import log_softmax_gather
from mmdec.types import InputError
from tests.support.poison import poisoned

# B, vertices, vocabulary, tokens, dtype
CASES = {
    "one of each": (1, 1, 1, 1, torch.float32),
    "tokens twice": (2, 3, 5, 9, torch.float32),
    "wider than a block": (1, 2, 2100, 66, torch.float32),
    "bfloat16": (2, 3, 33, 4, torch.bfloat16),
}
Case = tuple[int, int, int, int, torch.dtype]
TORCH = SimpleNamespace(gather_triton=log_softmax_gather)


def difference(module: ModuleType | SimpleNamespace, case: Case, seed: int = 0) -> float:
    """The largest distance from float64: of the result, and of the gradient relative to its dtype's rounding."""
    batch, vertices, vocabulary, tokens, dtype = case
    torch.manual_seed(seed)
    logits = (3 * torch.randn(batch, vocabulary, vertices)).to(dtype).transpose(1, 2)  # not contiguous
    targets = torch.randint(0, vocabulary, (batch, tokens))
    weight = torch.randn(batch, vertices, tokens).transpose(1, 2)
    exact = logits.double().requires_grad_()
    index = targets[:, None].expand(batch, vertices, tokens)
    want = exact.log_softmax(2).gather(2, index).transpose(1, 2)
    (want * weight).sum().backward()
    own = logits.to(DEVICE).requires_grad_()
    with poisoned():
        got: Tensor = module.gather_triton(own, targets.to(DEVICE))
        (got * weight.to(DEVICE)).sum().backward()
    assert own.grad is not None
    assert exact.grad is not None
    assert own.grad.dtype == dtype
    assert got.shape == (batch, tokens, vertices)
    grad = (own.grad.cpu().double() - exact.grad).abs().amax() * (1 if dtype == torch.float32 else 1e-4)
    return float(torch.maximum((got.detach().cpu() - want.detach()).abs().amax(), grad))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("module", [log_softmax_gather_triton, TORCH], ids=["kernel", "torch"])
def test_agrees_with_float64(module: ModuleType | SimpleNamespace, name: str) -> None:
    assert difference(module, CASES[name]) < 2e-5


def test_the_gradient_of_bfloat16_is_right_to_its_rounding() -> None:
    batch, vertices, vocabulary, tokens, dtype = CASES["bfloat16"]
    logits = torch.randn(batch, vertices, vocabulary).to(dtype)
    targets = torch.randint(0, vocabulary, (batch, tokens))
    exact = logits.double().requires_grad_()
    exact.log_softmax(2).gather(2, targets[:, None].expand(batch, vertices, tokens)).sum().backward()
    own = logits.to(DEVICE).requires_grad_()
    log_softmax_gather_triton.gather_triton(own, targets.to(DEVICE)).sum().backward()
    assert own.grad is not None
    torch.testing.assert_close(own.grad.cpu().double(), exact.grad, rtol=2**-7, atol=1e-4)


def test_shapes_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(InputError, match="targets"):
        log_softmax_gather(torch.zeros(2, 3, 4), torch.zeros(3, 2, dtype=torch.long))
