"""Tokens a round by epoch: a table and a plot of several seeds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from PIL import Image

from mmdec.evaluation.quality.drafter_epochs import epochs_of, main
from mmdec.types import InputError


def run(folder: Path, values: list[float], name: str = "dev/decoded") -> Path:
    """A run's folder as Lightning's CSVLogger leaves it."""
    rows = [f"{step * 10},{value}," if step % 2 else f"{step * 10},,{value}" for step, value in enumerate([1.0] * 2)]
    rows += [f"{100 + step},{value}," for step, value in enumerate(values)]
    (folder / "log").mkdir(parents=True)
    (folder / "log" / "metrics.csv").write_text("\n".join([f"step,{name},train/loss", *rows[:1], *rows[2:]]))
    return folder


def test_seeds_are_set_beside_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = run(tmp_path / "a-1", [2.0, 3.0, 4.0]), run(tmp_path / "a-2", [3.0, 3.0])
    other, plot = run(tmp_path / "b-1", [1.0]), tmp_path / "epochs.png"
    assert epochs_of(one) == [2.0, 3.0, 4.0]
    monkeypatch.setattr(sys, "argv", ["drafter_epochs", f"eagle={one},{two}", f"msd={other}", "--plot", str(plot)])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "| `eagle` | 2 | 2.50 (2.00 to 3.00) | 3.00 (3.00 to 3.00) | 4.00 (4.00 to 4.00) |"
    assert lines[3] == "| `msd` | 1 | 1.00 (1.00 to 1.00) |  |  |"
    with Image.open(plot) as picture:
        assert picture.width > 300


def test_runs_that_logged_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="must have logged dev/decoded"):
        epochs_of(run(tmp_path / "a", [1.0], "dev/loss"))
    with pytest.raises(InputError, match="metrics"):
        epochs_of(tmp_path / "none")
