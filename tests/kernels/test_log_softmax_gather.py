"""Compares the fused kernel, and the same operation in torch, with log_softmax and gather in float64."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.kernels.interpreter import DEVICE  # before the kernels

from mmdec.kernels import dag_triton  # isort: skip
from mmdec.errors import InputError
from mmdec.kernels.dag import log_softmax_gather
from tests.kernels.log_softmax_gather_cases import CASES, difference

TORCH = SimpleNamespace(gather_triton=log_softmax_gather)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("module", [dag_triton, TORCH], ids=["kernel", "torch"])
def test_agrees_with_float64(module: ModuleType | SimpleNamespace, name: str) -> None:
    assert difference(module, CASES[name]) < 2e-5


def test_the_gradient_of_bfloat16_is_right_to_its_rounding() -> None:
    batch, vertices, vocabulary, tokens, dtype = CASES["bfloat16"]
    logits = torch.randn(batch, vertices, vocabulary).to(dtype)
    targets = torch.randint(0, vocabulary, (batch, tokens))
    exact = logits.double().requires_grad_()
    exact.log_softmax(2).gather(2, targets[:, None].expand(batch, vertices, tokens)).sum().backward()
    own = logits.to(DEVICE).requires_grad_()
    dag_triton.gather_triton(own, targets.to(DEVICE)).sum().backward()
    assert own.grad is not None
    torch.testing.assert_close(own.grad.cpu().double(), exact.grad, rtol=2**-7, atol=1e-4)


def test_shapes_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(InputError, match="targets"):
        log_softmax_gather(torch.zeros(2, 3, 4), torch.zeros(3, 2, dtype=torch.long))
