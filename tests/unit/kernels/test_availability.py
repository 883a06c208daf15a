"""Tests that kernels are launched on the GPU of their tensors."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mmdec.kernels.availability import launch


def test_a_kernel_starts_on_the_gpu_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes the current GPU, which is another one where a model was loaded with device="cuda:1"."""
    current, started = ["cuda:0"], list[tuple[str, Any]]()

    @contextmanager
    def device(expected: torch.device) -> Any:
        current.append(str(expected))
        yield
        current.pop()

    def kernel(tensor: Any, **options: int) -> None:
        started.append((current[-1], options))

    monkeypatch.setattr(torch.cuda, "device", device)
    for where in ("cuda:1", "cpu"):
        launch({(2, 3): kernel}, (2, 3))(SimpleNamespace(device=torch.device(where)), num_warps=4)
    assert started == [("cuda:1", {"num_warps": 4}), ("cuda:0", {"num_warps": 4})]
