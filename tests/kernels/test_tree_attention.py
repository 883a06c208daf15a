"""Compares the tree-attention kernel with the plain reference in float64, at shapes where kernels are often wrong."""

from __future__ import annotations

import pytest
import torch

from mmdec.kernels import tree_attention_triton  # isort: skip
from mmdec.core.tree import ancestors
from mmdec.kernels.tree_attention import tree_attention_reference, tree_mask
from tests.kernels.tree_attention_cases import CASES, NEAR, difference, random_tree


@pytest.mark.parametrize("name", CASES)
def test_triton_tree_attention_equals_the_reference(name: str) -> None:
    case = CASES[name]
    assert difference(tree_attention_triton, case) < NEAR[case[-1]]


def test_ancestors_are_bits() -> None:
    above = ancestors(torch.stack([random_tree(128, seed) for seed in range(3)]))
    packed = tree_attention_triton.PackedTree.pack(torch.zeros(3), torch.zeros(3), above)
    bits = packed.words[..., None].long() >> torch.arange(32) & 1
    assert torch.equal(bits.flatten(2).bool(), above)
    assert torch.equal(packed.depths, above.sum(2).int() - 1)
    starts, ends = torch.tensor([[0, 5], [1, 6], [2, 7]], dtype=torch.int32).unbind(1)
    strided = tree_attention_triton.PackedTree.pack(starts, ends, above)
    assert strided.starts.is_contiguous()  # the kernel reads row after row
    assert strided.ends.is_contiguous()


def test_the_mask_of_a_window_is_the_reference_s() -> None:
    """The dense form, which runs everywhere else, sees the same columns."""
    from mmdec.kernels.tree_attention import tree_attention

    above = ancestors(torch.stack([random_tree(9, 1), random_tree(9, 2)]))
    starts, ends = torch.tensor([0, 5]), torch.tensor([20, 12])
    q, k = torch.randn(2, 4, 9, 8).double(), torch.randn(2, 2, 29, 8).double()
    for window in (1, 2, 7, 100):
        mask = tree_mask(starts, ends, above, 20, torch.float64).within_window(window)
        expected = tree_attention_reference(q, k, k, mask, 0.3)
        torch.testing.assert_close(tree_attention(q, k, k, mask, 0.3), expected, rtol=1e-12, atol=1e-12)
