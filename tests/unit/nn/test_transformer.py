"""Tests dropout from a pool of masks: its mean and rate are right, a seed repeats it, and evaluation has none."""

import pytest
import torch

from mmdec.nn.transformer import PooledDropout, RowsLinear


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_keeps_its_rate_and_the_mean(p: float):
    torch.manual_seed(0)
    layer = PooledDropout(p)
    made = torch.stack([layer(torch.ones(500, 400)) for _ in range(3)])
    assert (made == 0).float().mean().item() == pytest.approx(p, abs=0.005)
    assert made.mean().item() == pytest.approx(1.0, abs=0.01)
    passed = made[made > 0]
    assert passed.min() == passed.max()
    assert passed[0].item() == pytest.approx(1 / (1 - p), rel=0.005)


def test_the_seed_determines_the_mask():
    layer, x = PooledDropout(0.3), torch.ones(64, 64)
    torch.manual_seed(5)
    first, second = layer(x), layer(x)
    torch.manual_seed(5)
    assert torch.equal(layer(x), first)
    assert not torch.equal(first, second)


def test_nothing_happens_in_evaluation_or_at_rate_zero():
    x = torch.randn(8, 8)
    assert PooledDropout(0.5).eval()(x) is x
    assert PooledDropout(0.0)(x) is x


def test_gradients_are_those_of_the_mask():
    x = torch.randn(32, 32, requires_grad=True)
    made = PooledDropout(0.5)(x)
    made.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad * x, made)


def test_dropout_keeps_the_dtype():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert PooledDropout(0.2)(torch.ones(10, dtype=dtype)).dtype == dtype


def test_a_tensor_larger_than_the_pool_falls_back():
    x = torch.ones(1).expand((1 << 23) + 1)
    made = PooledDropout(0.5)(x)
    assert made.shape == x.shape
    assert made[:1000].unique().tolist() == [0.0, 2.0]


@pytest.mark.parametrize("p", [-0.1, 1.0])
def test_impossible_rates_are_refused(p: float):
    with pytest.raises(ValueError, match="must be in"):
        PooledDropout(p)


@pytest.mark.parametrize("rows", [1, 15, 16, 40])
def test_a_layer_of_many_rows_equals_torch_up_to_rounding(rows: int) -> None:
    layer, x = RowsLinear(24, 8), torch.randn(1, rows, 24)
    with torch.no_grad():
        result = layer(x)
        expected = torch.nn.functional.linear(x, layer.weight, layer.bias)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    if rows < 16:
        assert torch.equal(result, expected)
    assert layer(x).requires_grad
