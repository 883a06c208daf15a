"""Tests matrix products with half-precision copies of weights."""

from __future__ import annotations

import pytest
import torch

from mmdec.kernels.float16_linear import HalfWeights
from tests.support.half_kernel import needs_half_kernel

pytestmark = needs_half_kernel


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 7])
def test_the_product_equals_float32(exact: bool, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(300, 70, generator=generator) / 8
    weight[:, ::9] *= 1e-5  # some are no normal half-precision numbers
    weight = weight.half().float() if exact else weight
    bias, x = torch.randn(300, generator=generator), torch.randn(2, rows, 70, generator=generator)
    product = HalfWeights(weight, bias)
    assert product.exact == exact
    result, expected = product(x).double(), x.double() @ weight.double().t() + bias.double()
    size = x.double().abs() @ weight.double().abs().t()
    assert ((result - expected).abs() <= 70 * 2.0**-24 * size + 1e-6).all()


def test_bfloat16_weights_are_exact() -> None:
    torch.manual_seed(0)  # by chance a weight may be smaller than any scale of float16 allows
    weight = (torch.randn(300, 70) * 0.02).bfloat16().float()
    weight[::7] *= 2.0**-14  # float16 has too few digits for some of these
    assert not torch.equal(weight.half().float(), weight)
    product, x = HalfWeights(weight, torch.randn(300)), torch.randn(5, 70)
    assert product.exact
    result, expected = product(x), torch.nn.functional.linear(x, weight) + product(torch.zeros(1, 70))
    assert torch.allclose(result, expected, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 9, 14, 31, 40])
def test_a_row_alone_equals_a_row_beside_others_bitwise(count: int) -> None:
    weight, x = torch.randn(2000, 96).half().float(), torch.randn(count, 96)
    product = HalfWeights(weight)
    assert torch.equal(product(x), torch.cat([product(row) for row in x.split(1)]))


def test_weights_beyond_the_range_are_refused() -> None:
    with pytest.raises(RuntimeError, match="too large"):
        HalfWeights(torch.full((16, 16), 1e5))
