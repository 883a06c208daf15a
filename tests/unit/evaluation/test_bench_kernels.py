"""What the benchmark of the operators compares and reports; its seconds are not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from mmdec.cli.bench import app
from mmdec.evaluation import bench_kernels
from mmdec.types import InputError, MmdecError
from tests.support.naive_dag import naive_marginal


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_kernels, "PLACES", {"cpu": ((4, 20),)})
    monkeypatch.setattr(bench_kernels, "GRAPHS", {"cpu": ((2, 5, 12),)})
    monkeypatch.setattr(bench_kernels, "LAYERS", {"cpu": 1})


def test_every_operator_is_reported(tmp_path: Path) -> None:
    written = tmp_path / "kernels.json"
    done = CliRunner().invoke(app, ["kernels", "--repeats", "1", "--output", str(written)])
    assert done.exception is None, done.exception
    report = json.loads(written.read_text(encoding="utf-8"))
    assert [(row["heads"], row["nodes"], row["prefix"]) for row in report["tree_attention"]] == [
        (name, 4, 20) for name in bench_kernels.HEADS
    ]
    assert [(row["shape"], row["what"]) for row in report["dag"]] == [
        ([2, 5, 12], "forward"),
        ([2, 5, 12], "forward and backward"),
    ]
    for row in (*report["tree_attention"], *report["dag"], report["kv_gather"]):
        assert row["against"]
        assert all(against["n"] == 1 for against in row["against"].values())
    assert set(report["kernels"]) == set(bench_kernels.KERNELS)
    assert (report["why_not"] is None) == any(report["kernels"].values())


@pytest.mark.parametrize(("operator", "named"), [("tree_attention", "tree attention"), ("dag_marginal", "log P")])
def test_sides_that_differ_end_it(operator: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = getattr(bench_kernels, operator)
    monkeypatch.setattr(bench_kernels, operator, lambda *inputs: right(*inputs) + 0.01)
    with pytest.raises(MmdecError, match=rf"{named}.* differ by 0\.01"):
        bench_kernels.bench_kernels(repeats=1)


def test_the_dense_form_is_the_sum_over_paths() -> None:
    torch.manual_seed(0)
    match, links = torch.randn(2, 4, 7), torch.randn(2, 7, 7)
    links = links.masked_fill(torch.ones(7, 7, dtype=torch.bool).tril(), -torch.inf)
    naive = torch.stack([naive_marginal(*sample) for sample in zip(match, links, strict=True)])
    torch.testing.assert_close(bench_kernels.dense_marginal(match, links), naive)


def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match="`device` must be"):
        bench_kernels.bench_kernels(device="abacus")
