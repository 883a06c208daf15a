"""Dtypes of networks."""

from __future__ import annotations

import torch

from mmdec.evaluation.quality.harness import dtype_of


def test_a_networks_dtype() -> None:
    assert dtype_of(torch.nn.Linear(1, 1).to(torch.bfloat16)) == torch.bfloat16
