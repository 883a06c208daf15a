"""Compares oneDNN's matrix products with torch's, and tests when they are not used."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from mmdec.kernels import onednn
from mmdec.kernels.onednn import MIN_QUERIES, SCORE_ROWS, attention, is_usable, linear


@pytest.mark.parametrize("shape", [(7,), (1, 3), (2, 5), (0,)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_a_layer_equals_torch_up_to_rounding(shape: tuple[int, ...], bias: bool, activation: onednn.Activation) -> None:
    x, weight, added = torch.randn(*shape, 24), torch.randn(16, 24), torch.randn(16) if bias else None
    expected = F.linear(x, weight, added)
    result = linear(x, weight, added, activation)
    assert torch.allclose(result, F.gelu(expected) if activation == "gelu" else expected, atol=1e-5)
    turned = linear(x.transpose(0, -2), weight.t().contiguous().t(), added, activation)  # of other strides
    assert torch.allclose(turned, result.transpose(0, -2), atol=1e-5)


@pytest.mark.parametrize("queries", [1, MIN_QUERIES, SCORE_ROWS + 7, 2 * SCORE_ROWS])
def test_attention_equals_torch_up_to_rounding(queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "is_intel", lambda: False)
    q, k, v = torch.randn(2, 3, queries, 8), torch.randn(2, 3, 90, 8), torch.randn(2, 3, 90, 8)
    result = attention(q, k, v)
    assert torch.allclose(result, F.scaled_dot_product_attention(q, k, v, scale=1.0), atol=1e-5)
    assert torch.equal(attention(q[1:], k[1:], v[1:]), result[1:])  # alone as beside others


def test_gradients_and_other_precisions_use_torch() -> None:
    x, weight = torch.randn(3, 8), torch.randn(4, 8, requires_grad=True)
    assert not is_usable(x, weight)
    linear(x, weight).sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        assert is_usable(x, weight) == onednn.HAS_ONEDNN
    assert not is_usable(x.double())
    assert torch.equal(linear(x.double(), weight.double()), F.linear(x.double(), weight.double()))


def test_without_onednn_torch_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "HAS_ONEDNN", False)
    x, weight = torch.randn(3, 8), torch.randn(4, 8)
    assert torch.equal(linear(x, weight, activation="gelu"), F.gelu(F.linear(x, weight)))
    heads = torch.randn(1, 2, MIN_QUERIES, 8)
    assert torch.equal(attention(heads, heads, heads), F.scaled_dot_product_attention(heads, heads, heads, scale=1.0))
