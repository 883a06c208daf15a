"""Tests the products and the attention whose results for a token do not depend on the other tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mmdec.kernels.tokenwise import MAX_PRODUCT_ROWS, draft_chains, half_weights, least_rows, linear
from mmdec.kernels.tree_attention import tree_attention, tree_attention_reference, tree_mask
from mmdec.targets.kv_cache import ancestors_of

half_precision = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


@half_precision
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(64, 32), (100, 37), (192, 576), (96, 1536)])
def test_a_row_has_the_same_bits_beside_any_others(
    shape: tuple[int, int], transposed: bool, biased: bool, copied: bool, dtype: torch.dtype
) -> None:
    """Each row's product is a sum that cancels, so that its bits show the order of the sum."""
    generator = torch.Generator().manual_seed(0)
    half, x = torch.randn(shape[0], shape[1] // 2, generator=generator), torch.randn(70, shape[1] // 2)
    weight = F.pad(torch.cat([half, -half], 1), (0, shape[1] % 2)).mul(64).to(dtype)
    weight = weight.t().contiguous().t() if transposed else weight
    rows = F.pad(torch.cat([x, x], 1), (0, shape[1] % 2)).to(dtype)
    bias = torch.zeros(shape[0], dtype=dtype) if biased else None
    copy = half_weights(weight, bias) if copied else None
    expected = torch.cat([linear(row, weight, bias, copy) for row in rows.split(1)])
    assert expected.count_nonzero() > 0
    for count in (2, 3, 8, 31, 32, 33, 64, 70):
        assert torch.equal(linear(rows[:count], weight, bias, copy), expected[:count])
        assert torch.equal(linear(rows[-count:], weight, bias, copy), expected[-count:])


@half_precision
@pytest.mark.parametrize("copied", [False, True])
def test_the_product_is_that_of_the_layer(copied: bool, dtype: torch.dtype) -> None:
    def product() -> Tensor:
        return linear(x, weight, bias, half_weights(weight, bias) if copied else None).double()

    weight, bias, x = torch.randn(40, 64).to(dtype), torch.randn(40).to(dtype), torch.randn(3, 50, 64).to(dtype)
    expected = x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(product(), expected, rtol=2e-2, atol=5e-2)
    weight[0] += 1  # a copy is made anew after a change
    expected = x.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(product(), expected, rtol=2e-2, atol=5e-2)


def test_a_copy_is_made_anew_after_a_change_that_torch_does_not_count() -> None:
    """peft merges adapters by adding to `weight.data`."""
    weight, x = torch.randn(40, 64).half(), torch.randn(3, 64).half()
    before = half_weights(weight)
    assert half_weights(weight) is before
    weight.data += 1
    expected = x.double() @ weight.double().t()
    torch.testing.assert_close(linear(x, weight, None, half_weights(weight)).double(), expected, rtol=2e-2, atol=5e-2)


def test_the_least_number_of_rows_is_within_a_product() -> None:
    assert 1 <= least_rows(torch.bfloat16, (64, 32), True, False, 1) <= MAX_PRODUCT_ROWS


def test_trees_are_divided_into_chains() -> None:
    chains = draft_chains([[-1, 0, 0, 1, 1], [-1, 0, 1, 0, 0]], [5, 3])
    assert [chain.path.tolist() for chain in chains] == [
        [[0, 2, -1], [0, 1, 2]],
        [[0, 1, 3], [0, 1, 2]],
        [[0, 1, 4], [0, 1, 2]],
    ]
    assert chains[0].nodes.tolist() == [[0, 2, 0], [0, 1, 2]]
    assert [chain.nodes[0].tolist() for chain in chains[1:]] == [[1, 3, 1], [4, 4, 4]]


@half_precision
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_tree_attention_equals_the_reference(heads: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    parents = [[-1, 0, 0, 1, 3, 2], [-1, 0, 1, 2, 3, 0]]
    q = torch.randn(2, heads[0], 6, 16, generator=generator).to(dtype)
    k, v = (torch.randn(2, heads[1], 26, 16, generator=generator).to(dtype) for _ in range(2))
    tree = tree_mask(torch.tensor([0, 3]), torch.tensor([20, 14]), ancestors_of(parents), 20, dtype)
    expected = tree_attention_reference(q.double(), k.double(), v.double(), tree, 0.25)
    before = k.clone()
    result = tree_attention(q, k, v, replace(tree, chains=draft_chains(parents, [6, 5])), 0.25)
    torch.testing.assert_close(result[0].double(), expected[0], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(result[1, :, :5].double(), expected[1, :, :5], rtol=2e-2, atol=2e-2)
    assert not result[1, :, 5].any()  # a padding node's
    assert torch.equal(k[:, :, 20:], before[:, :, 20:])
