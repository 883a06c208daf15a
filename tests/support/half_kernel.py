"""The mark of tests that need fbgemm's products with half-precision weights."""

from __future__ import annotations

import pytest
import torch

from mmdec.kernels.float16_linear import HalfWeights


def _has_kernel() -> bool:
    try:
        return HalfWeights(torch.zeros(16, 16)).exact
    except RuntimeError:
        return False


needs_half_kernel = pytest.mark.skipif(not _has_kernel(), reason="this CPU has no kernel for half-precision weights")
