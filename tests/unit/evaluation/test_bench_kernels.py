"""The operators' benchmark: it runs where there is no GPU, and times nothing that is wrong."""

from __future__ import annotations

import json

import pytest
import torch

from mmdec.evaluation import bench_kernels
from mmdec.types import MmdecError


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(bench_kernels, "HEADS", {"small": (4, 2, 8)})
    monkeypatch.setattr(bench_kernels, "SHAPES", {"cpu": ((5, 24),)})
    monkeypatch.setattr(bench_kernels, "GRAPHS", {"cpu": ((2, 6, 20),)})
    monkeypatch.setattr(bench_kernels, "LAYERS", {"cpu": 2})
    torch.set_num_threads(threads)


def test_a_cpu_gets_its_rows() -> None:
    report = bench_kernels.bench_kernels(repeats=2)
    json.dumps(report)
    assert report["why_not"]
    (attention,) = report["tree_attention"]
    assert set(attention["against"]) == {"SDPA, dense mask, heads repeated", "SDPA, dense mask, FORCE_GQA"}
    rows = [*attention["against"].values(), *report["kv_gather"]["against"].values()]
    assert [row["what"] for row in report["dag"]] == ["forward", "forward and backward"]
    kinds = [(row["dtype"], row["batch"]) for row in (attention, report["kv_gather"], *report["dag"])]
    assert kinds == [("float32", 1), ("float32", 1), ("float32", 2), ("float32", 2)]
    assert report["hardware"]["batch"] == [1, 2]
    for row in report["dag"]:
        assert row["least_cpu_ms"] > 0
        rows += row["against"].values()
    assert all(row["n"] == 2 and row["ratio"] > 0 for row in rows)


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench_kernels.dag_marginal
    monkeypatch.setattr(bench_kernels, "dag_marginal", lambda *given: right(*given) + 0.1)
    with pytest.raises(MmdecError, match="log P: the two sides must agree"):
        bench_kernels.bench_kernels(repeats=1)
