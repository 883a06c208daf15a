"""Tests the reliability plot: a dot for each bin of each kind; a folder without test results gives one clear error."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmdec.evaluation.calibration import plot as calibration_plot
from mmdec.evaluation.calibration.plot import measured, plot_reliability
from mmdec.pipelines.confidence import FILE, Calibration, write_calibrations
from mmdec.types import InputError


def found(right: float) -> dict[str, Any]:
    bins = [{"count": 3, "said": 0.15, "right": 0.0}, {"count": 9, "said": 0.8, "right": right}]
    return {"calibration_error": 0.05, "reliability": bins}


def folder(path: Path, right: float, *kinds: str) -> Path:
    path.mkdir()
    write_calibrations(path, dict.fromkeys(kinds, Calibration({}, 0.0)), dict.fromkeys(kinds, found(right)))
    return path


def test_a_plot_is_drawn_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the extra mmdec[plots] is not installed")
    one = folder(tmp_path / "one", 0.8, "answer")
    path = tmp_path / "new" / "one.png"
    monkeypatch.setattr(sys, "argv", ["calibration_plot", str(one), "--output", str(path)])
    calibration_plot.main()
    with Image.open(path) as image:
        size = image.size
        assert min(size) > 250
        grey = np.asarray(image.convert("L"))
        assert grey.min() < 64 < 250 < grey.max()  # ink on paper
    assert path.stat().st_size < 60_000
    again = plot_reliability([one], tmp_path / "again.png")
    assert again.read_bytes() == path.read_bytes()
    other = plot_reliability([folder(tmp_path / "other", 0.2, "answer")], tmp_path / "other.png")
    assert other.read_bytes() != path.read_bytes()
    three = plot_reliability([one, folder(tmp_path / "two", 0.8, "graph", "autoregressive")], tmp_path / "three.png")
    with Image.open(three) as image:
        assert image.size == pytest.approx((2 * size[0], 2 * size[1]), abs=1)


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"measured": {}},
        {"measured": {"answer": {}}},
        {"measured": {"answer": found(float("nan"))}},
        {"measured": {"answer": found(0.5) | {"reliability": ["x"]}}},
    ],
)
def test_a_file_that_measured_nothing_is_refused(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / FILE).write_text(json.dumps({"format": "mmdec confidence 1", "calibrations": {}} | content))
    with pytest.raises(InputError, match="--write"):
        measured(tmp_path)


def test_a_folder_without_the_file_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--write"):
        plot_reliability([tmp_path], tmp_path / "new" / "plot.png")
    assert not (tmp_path / "new").exists()
