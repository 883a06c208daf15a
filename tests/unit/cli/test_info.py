"""Tests `mmdec info`: versions and devices, and for each kernel whether it runs or why not."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from mmdec.cli import app
from mmdec.kernels.availability import KERNELS, unavailable_reason


def test_each_kernel_is_active_or_says_why_not() -> None:
    result = CliRunner().invoke(app, ["info", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert [kernel["name"] for kernel in found["kernels"]] == list(KERNELS)
    assert all(kernel["active"] == (kernel["why_not"] is None) for kernel in found["kernels"])
    assert found["versions"]["torch"]
    assert bool(found["gpus"]) == torch.cuda.is_available()


def test_the_table_names_every_kernel() -> None:
    result = CliRunner().invoke(app, ["info"])
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in KERNELS)


def test_kernels_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMDEC_KERNELS", "0")
    unavailable_reason.cache_clear()
    try:
        assert unavailable_reason() == "MMDEC_KERNELS=0 keeps them off"
    finally:
        unavailable_reason.cache_clear()
