"""Compares the tree-attention kernel with the plain reference in float64."""

from __future__ import annotations

import random
from types import ModuleType

import torch
from torch import Tensor

from mmdec.core.tree import ancestors
from mmdec.kernels.tree_attention import tree_attention_reference, tree_mask
from tests.kernels.interpreter import DEVICE  # before the kernels
from tests.support.poisoned_memory import poisoned

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
# Tolerances: one rounding to the dtype, for values below 4. The interpreter truncates to bfloat16; a GPU rounds.
NEAR = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def random_tree(nodes: int, seed: int) -> Tensor:
    """Draw the parents (N,) of a random tree."""
    rng = random.Random(seed)
    return torch.tensor([-1] + [rng.choice([node - 1, rng.randrange(node)]) for node in range(1, nodes)])


def difference(module: ModuleType, case: Case, seed: int = 0) -> float:
    """Compute the largest difference from the reference. It is NaN if the kernel did not write a cell, or read one that
    it must not read."""
    nodes, columns, bounds, heads, key_heads, width, v_width, window, splits, dtype = case
    batch = len(bounds)
    torch.manual_seed(seed)
    q = torch.randn(batch, nodes, heads, width).to(dtype).transpose(1, 2)  # strides as projections leave them
    pool = torch.randn(2, batch, key_heads, columns + nodes + 7, max(width, v_width)).to(dtype)
    k, v = pool[0, :, :, : columns + nodes, :width], pool[1, :, :, : columns + nodes, :v_width]
    starts, ends = torch.tensor(bounds).unbind(1)
    above = ancestors(torch.stack([random_tree(nodes, seed + row) for row in range(batch)]))
    mask = tree_mask(starts, ends, above, columns, torch.float64)
    mask = mask if window is None else mask.within_window(window)
    expected = tree_attention_reference(q.double(), k.double(), v.double(), mask, width**-0.5)
    for row, (start, end) in enumerate(bounds):
        for foreign in (slice(0, start), slice(end, columns)):
            k[row, :, foreign] = v[row, :, foreign] = torch.nan
    pool[:, :, :, columns + nodes :] = torch.nan
    packed = module.PackedTree.pack(starts.to(DEVICE), ends.to(DEVICE), above.to(DEVICE))
    pool, q = pool.to(DEVICE), q.to(DEVICE)
    k, v = pool[0, :, :, : columns + nodes, :width], pool[1, :, :, : columns + nodes, :v_width]
    with poisoned():
        got = module.tree_attention_triton(q, k, v, packed, width**-0.5, window=window, splits=splits)
    assert got.shape == (batch, heads, nodes, v_width)
    assert got.dtype == dtype
    return float((got.cpu().double() - expected).abs().amax().item())
