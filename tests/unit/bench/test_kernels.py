"""Tests the operators' benchmark: it runs without a GPU, and stops before timing if results differ."""

from __future__ import annotations

import pytest
import torch

from mmdec.bench import kernels as bench_kernels
from mmdec.errors import MmdecError
from tests.support.bench_reports import check_form


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(bench_kernels, "ATTENTION_SHAPES", {"small": (4, 2, 8)})
    monkeypatch.setattr(bench_kernels, "TREE_SHAPES", {"cpu": ((5, 24),)})
    monkeypatch.setattr(bench_kernels, "GRAPHS", {"cpu": ((2, 6, 20),)})
    monkeypatch.setattr(bench_kernels, "LAYERS", {"cpu": 2})
    torch.set_num_threads(threads)


def test_a_cpu_gets_its_rows() -> None:
    result = bench_kernels.bench_kernels(repeats=2)
    check_form(result)
    assert {row.baseline for row in result.comparisons if row.subject == "tree attention"} == {
        "SDPA, dense mask, heads repeated",
        "SDPA, dense mask, FORCE_GQA",
    }
    assert [row.timed for row in result.comparisons] == ["call", "call", "call", "forward", "forward and backward"]
    assert all(row.pairs == 2 and row.times > 0 for row in result.comparisons)
    assert (result.hardware["dtype"], result.hardware["batch"]) == ("float32", [1, 2])
    assert result.not_measured.keys() == {"GPU kernels"}


def test_wrong_kernels_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench_kernels.dag_marginal
    monkeypatch.setattr(bench_kernels, "dag_marginal", lambda *given: right(*given) + 0.1)
    with pytest.raises(MmdecError, match="log P: the two sides must agree"):
        bench_kernels.bench_kernels(repeats=1)


def test_a_gpu_that_is_not_the_current_one_is_timed_on_its_own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--device cuda:1`: events, memory and waiting name it. There is no GPU here: torch's calls are stand-ins."""
    asked: list[object] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self, stream: object = "the current GPU's") -> None:
            asked.append(stream)

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: object) -> float:
            return 20.0

    def number(device: object = "the current GPU") -> int:
        asked.append(device)
        return 0

    second = torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, number)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device="the current GPU": device)
    assert bench_kernels._seconds(lambda: None, 3, second) == pytest.approx(1e-3)
    bench_kernels._peak(lambda: None, second)
    assert len(asked) == 2 * 4 + 3
    assert set(asked) == {second}
