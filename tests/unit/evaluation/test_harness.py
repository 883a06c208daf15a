"""Tests that a measurement records its device, dtype, batch and threads."""

from __future__ import annotations

import torch

from mmdec.evaluation.harness import describe_measurement


def test_the_dtype_and_the_threads_are_reported() -> None:
    machine = describe_measurement(torch.nn.Linear(1, 1).to(torch.bfloat16), (1, 8), threads=3)
    assert [machine[name] for name in ("dtype", "target", "batch", "threads")] == ["bfloat16", "cpu", [1, 8], 3]
