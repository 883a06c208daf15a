"""The kernel against the plain reference in float64, one node at a time, at shapes that kernels get wrong."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.support.interpreter import DEVICE  # before the kernels

from mmdec.ops import tree_attention_triton  # isort: skip
from mmdec.decode.tree import ancestors
from mmdec.ops.tree_attention import tree_attention_reference, tree_mask
from tests.support.poison import poisoned

# nodes, columns, (start, end) of each row, heads, key heads, width of keys and of values, window, splits, dtype
Case = tuple[int, int, list[tuple[int, int]], int, int, int, int, int | None, int, torch.dtype]
CASES: dict[str, Case] = {
    "one node, no prefix": (1, 0, [(0, 0)], 2, 2, 16, 16, None, 1, torch.float32),
    "empty beside full": (5, 70, [(0, 70), (9, 9)], 4, 1, 40, 24, None, 2, torch.float32),
    "63 nodes": (63, 130, [(0, 130), (3, 65)], 4, 2, 16, 16, None, 3, torch.float32),
    "64 nodes": (64, 129, [(1, 129), (0, 64)], 2, 2, 16, 16, None, 2, torch.float32),
    "65 nodes": (65, 63, [(0, 63), (62, 63)], 2, 1, 16, 16, None, 1, torch.float32),
    "128 nodes": (128, 33, [(0, 33)], 2, 2, 16, 16, None, 1, torch.float32),
    "seven heads a key": (9, 65, [(0, 65)], 7, 1, 80, 80, None, 1, torch.float32),
    "more splits than columns": (4, 3, [(0, 3), (1, 2)], 2, 2, 16, 16, None, 5, torch.float32),
    "window": (33, 140, [(0, 140), (100, 131)], 4, 2, 16, 16, 70, 2, torch.float32),
    "window in the tree": (12, 20, [(0, 20), (4, 9)], 2, 1, 16, 16, 3, 1, torch.float32),
    "window of one": (6, 20, [(0, 20)], 2, 1, 16, 16, 1, 2, torch.float32),
    "bfloat16": (17, 66, [(0, 66), (2, 50)], 4, 2, 32, 32, None, 2, torch.bfloat16),
    "float16": (17, 66, [(0, 66), (2, 50)], 4, 2, 32, 32, 40, 2, torch.float16),
}
# Of one rounding to the dtype, for values below 4; the interpreter cuts to bfloat16 where a GPU rounds.
NEAR = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def random_tree(nodes: int, seed: int) -> Tensor:
    """Parents (N,): chains and bushes, whatever comes."""
    rng = random.Random(seed)
    return torch.tensor([-1] + [rng.choice([node - 1, rng.randrange(node)]) for node in range(1, nodes)])


def difference(module: ModuleType, case: Case, seed: int = 0) -> float:
    """The largest distance from the reference; NaN where the kernel left a cell unwritten or read a foreign one."""
    nodes, columns, bounds, heads, key_heads, width, v_width, window, splits, dtype = case
    batch = len(bounds)
    torch.manual_seed(seed)
    q = torch.randn(batch, nodes, heads, width).to(dtype).transpose(1, 2)  # strides as projections leave them
    pool = torch.randn(2, batch, key_heads, columns + nodes + 7, max(width, v_width)).to(dtype)
    k, v = pool[0, :, :, : columns + nodes, :width], pool[1, :, :, : columns + nodes, :v_width]
    starts, ends = torch.tensor(bounds).unbind(1)
    above = ancestors(torch.stack([random_tree(nodes, seed + row) for row in range(batch)]))
    mask = tree_mask(starts, ends, above, columns, torch.float64, window=window)
    want = tree_attention_reference(q.double(), k.double(), v.double(), mask, width**-0.5)
    for row, (start, end) in enumerate(bounds):
        for foreign in (slice(0, start), slice(end, columns)):
            k[row, :, foreign] = v[row, :, foreign] = torch.nan
    pool[:, :, :, columns + nodes :] = torch.nan
    packed = module.PackedTree.of(starts.to(DEVICE), ends.to(DEVICE), above.to(DEVICE))
    pool, q = pool.to(DEVICE), q.to(DEVICE)
    k, v = pool[0, :, :, : columns + nodes, :width], pool[1, :, :, : columns + nodes, :v_width]
    with poisoned():
        got = module.tree_attention_triton(q, k, v, packed, width**-0.5, window=window, splits=splits)
    assert got.shape == (batch, heads, nodes, v_width)
    assert got.dtype == dtype
    return float((got.cpu().double() - want).abs().amax().item())


@pytest.mark.parametrize("name", CASES)
def test_equals_the_reference(name: str) -> None:
    case = CASES[name]
    assert difference(tree_attention_triton, case) < NEAR[case[-1]]


def test_ancestors_are_bits() -> None:
    above = ancestors(torch.stack([random_tree(128, seed) for seed in range(3)]))
    packed = tree_attention_triton.PackedTree.of(torch.zeros(3), torch.zeros(3), above)
    bits = packed.words[..., None].long() >> torch.arange(32) & 1
    assert torch.equal(bits.flatten(2).bool(), above)
    assert torch.equal(packed.depths, above.sum(2).int() - 1)
    starts, ends = torch.tensor([[0, 5], [1, 6], [2, 7]], dtype=torch.int32).unbind(1)
    strided = tree_attention_triton.PackedTree.of(starts, ends, above)
    assert strided.starts.is_contiguous()  # the kernel reads row after row
    assert strided.ends.is_contiguous()


def test_the_mask_of_a_window_is_the_reference_s() -> None:
    """The dense form, which runs everywhere else, sees the same columns."""
    from mmdec.ops.tree_attention import tree_attention

    above = ancestors(torch.stack([random_tree(9, 1), random_tree(9, 2)]))
    starts, ends = torch.tensor([0, 5]), torch.tensor([20, 12])
    q, k = torch.randn(2, 4, 9, 8).double(), torch.randn(2, 2, 29, 8).double()
    for window in (1, 2, 7, 100):
        mask = tree_mask(starts, ends, above, 20, torch.float64, window=window)
        want = tree_attention_reference(q, k, k, mask, 0.3)
        torch.testing.assert_close(tree_attention(q, k, k, mask, 0.3), want, rtol=1e-12, atol=1e-12)
