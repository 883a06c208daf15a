"""Tests tree attention against its plain reference, and its entry in transformers' registries."""

from __future__ import annotations

import math

import pytest
import torch

from mmdec.core.tree import ancestors
from mmdec.kernels.tree_attention import TreeMask, tree_attention, tree_attention_reference, tree_mask
from mmdec.targets.attention import TREE_ATTENTION
from tests.support.tiny_text import language_model

PARENTS = torch.tensor([[-1, 0, 0, 1, 2, 2], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 0, 0]])
STARTS, ENDS = torch.tensor([0, 3, 2]), torch.tensor([9, 7, 3])


def parts(columns: int, key_heads: int, heads: int = 4, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    batch, nodes = PARENTS.shape
    q = torch.randn(batch, heads, nodes, 8, dtype=dtype)
    k, v = (torch.randn(batch, key_heads, columns + nodes, width, dtype=dtype) for width in (8, 5))
    return q, k, v


def mask(columns: int, dtype: torch.dtype = torch.float64) -> TreeMask:
    return tree_mask(STARTS, ENDS, ancestors(PARENTS), columns, dtype)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_tree_attention_equals_the_reference_in_float64(key_heads: int) -> None:
    q, k, v = parts(9, key_heads)
    got = tree_attention(q, k, v, mask(9), 0.3)
    torch.testing.assert_close(got, tree_attention_reference(q, k, v, mask(9), 0.3), rtol=1e-12, atol=1e-12)


def test_masked_columns_do_not_matter() -> None:
    q, k, v = parts(9, 2)
    expected = tree_attention(q, k, v, mask(9), 0.3)
    for row, (start, end) in enumerate(zip(STARTS.tolist(), ENDS.tolist(), strict=True)):
        for tensor in (k, v):
            tensor[row, :, :start] = tensor[row, :, end:9] = 1e4
    assert torch.equal(tree_attention(q, k, v, mask(9), 0.3), expected)
    k[:, :, -1] = 1e4  # the last node is a leaf: only it sees itself
    assert torch.equal(tree_attention(q, k, v, mask(9), 0.3)[:, :, :-1], expected[:, :, :-1])


def test_even_rows_have_the_same_mask_without_bounds() -> None:
    whole = torch.zeros(3, dtype=torch.long), torch.full((3,), 9)
    even = tree_mask(*whole, ancestors(PARENTS), 9, torch.float32, ragged=False)
    assert torch.equal(even.additive, tree_mask(*whole, ancestors(PARENTS), 9, torch.float32).additive)


def test_without_a_tree_every_column_is_seen() -> None:
    q, k, v = parts(9, 2)
    weights = (q[:, :, :1] @ k.repeat_interleave(2, 1).transpose(2, 3) / math.sqrt(8)).softmax(-1)
    got = tree_attention(q[:, :, :1], k, v, None, 1 / math.sqrt(8))
    torch.testing.assert_close(got, weights @ v.repeat_interleave(2, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks_are_finite_and_rows_of_them_begin_aligned(dtype: torch.dtype) -> None:
    additive = mask(9, dtype).additive
    assert additive.dtype == dtype
    assert additive.isfinite().all()
    assert additive.stride(2) % 8 == 0
    assert mask(9, dtype).grouped_mask(2).shape == (3, 1, 12, 15)


@pytest.mark.parametrize("key_heads", [2, 4])
def test_a_model_under_the_registered_name_equals_sdpa(key_heads: int) -> None:
    model = language_model("llama", num_key_value_heads=key_heads, eos_token_id=None).double()
    ids = torch.randint(1, 40, (2, 7))
    padding = torch.ones_like(ids)
    padding[1, :3] = 0
    answers = {}
    for name in ("sdpa", TREE_ATTENTION):
        model.set_attn_implementation(name)
        with torch.no_grad():
            answers[name] = [
                model(ids).logits,  # causal, no mask
                model(ids, attention_mask=padding).logits[:, 3:],
                model.generate(ids, attention_mask=padding, max_new_tokens=8, do_sample=False),
            ]
    for expected, got in zip(answers["sdpa"], answers[TREE_ATTENTION], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
