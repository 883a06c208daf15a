"""Tests plots of benchmarks, without a display; an invalid metrics.csv gives one clear error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from PIL import Image

from mmdec.bench.plots import check_plots, plot_run, training_curves
from mmdec.bench.report import BenchRun
from mmdec.errors import InputError
from tests.support import bench_reports as findings

CSV = "step,epoch,train/loss,dev/loss\n0,0,3.5,\n0,0,,3.6\n10,0,2.5,nan\n10,0,,2.75\n20,1,inf,\n,1,1.0,1.0\n"


def test_training_curves_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(CSV, encoding="utf-8")
    assert training_curves(path) == {
        "train/loss": [(0.0, 3.5), (10.0, 2.5)],
        "dev/loss": [(0.0, 3.6), (10.0, 2.75)],
    }


@pytest.mark.parametrize("text", ["", "step,epoch\n1,2\n", "epoch,loss\n1,2\n", "step,loss\n1,x\n", "\0"])
def test_what_is_no_metrics_csv_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match="`metrics` must"):
        training_curves(path)
    with pytest.raises(InputError, match="cannot be read"):
        training_curves(tmp_path / "none.csv")


def test_without_matplotlib_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'mmdec\[plots\]'"):
        check_plots()
    with pytest.raises(InputError, match=r"pip install 'mmdec\[plots\]'"):
        plot_run(findings.run("asr"), tmp_path / "plots")
    assert not (tmp_path / "plots").exists()


def test_plots_of_what_there_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra mmdec[plots] is not installed")
    metrics = tmp_path / "metrics.csv"
    metrics.write_text(CSV, encoding="utf-8")
    written = plot_run(findings.run("asr", "vlm", "kernels"), tmp_path / "plots", metrics)
    assert [path.name for path in written] == [
        "asr-speedup-by-length.png",
        "asr-tokens-per-round.png",
        "asr-time-by-stage.png",
        "vlm-speedup-by-length.png",
        "vlm-tokens-per-round.png",
        "vlm-time-by-stage.png",
        "training-curves.png",
    ]
    for path in written:
        with Image.open(path) as image:
            assert min(image.size) > 300
            low, high = image.convert("L").getextrema()
            assert low < 64 < 250 < high  # ink on paper
    again = plot_run(findings.run("asr"), tmp_path / "again")
    assert again[0].read_bytes() == written[0].read_bytes()
    assert plot_run(BenchRun(()), tmp_path / "nothing") == []


def test_two_runs_of_one_benchmark_have_a_plot_each(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra mmdec[plots] is not installed")
    run = findings.run("asr")
    names = [path.name for path in plot_run(BenchRun((*run.reports, *run.reports)), tmp_path)]
    assert sorted(names) == sorted(path.name for path in tmp_path.iterdir())
    assert "asr-speedup-by-length.png" in names
    assert "asr-2-speedup-by-length.png" in names
