"""Tests the drafter in `make train` with real training: its start, its continuation, and its evaluation."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch import seed_everything

from mmdec.training.make_train import EAGLE
from tests.support.quiet import LIGHTNING
from tests.support.small_schedules import enter, make_small, run_here, train_for
from tests.support.tiny_squares import write_squares, write_target

SHIPPED, MADE = Path("models/vlm-scenes"), Path("runs/vlm-scenes")
pytestmark = [
    *LIGHTNING,
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write_squares(tmp_path / "data" / "scenes")
    write_target(tmp_path / SHIPPED)
    enter(tmp_path, monkeypatch)
    make_small(
        monkeypatch,
        {"batch_size": 2, "dev_samples": 2, "samples": 6, "max_tokens": 8},
        {"network": {"intermediate_size": 16}, "decoded": 0, "chain": 3},
    )
    yield tmp_path
    seed_everything(0, verbose=False)


class Runner:
    """Runs a recipe here, and remembers what it was run with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []

    def __call__(self, name: str, *arguments: str) -> None:
        self.calls.append(arguments)
        run_here(name, *arguments)


def test_a_drafter_is_trained_judged_and_goes_on(checkout: Path) -> None:
    runner = Runner()
    assert EAGLE.missing() == ""
    made = train_for(EAGLE, 60.0, runner)
    assert made.better
    assert made.before is None
    assert made.after is not None
    assert made.after >= 1.0
    assert made.folder == MADE
    assert (MADE / "eagle" / "model.safetensors").is_file()
    assert (MADE / "model.safetensors").read_bytes() == (SHIPPED / "model.safetensors").read_bytes()
    assert not (SHIPPED / "eagle").exists()
    again = train_for(EAGLE, 60.0, runner)  # from the drafter of before, which is judged first
    assert again.before == pytest.approx(made.after)
    assert "--ckpt_path" not in runner.calls[-1]  # the run before was finished
    (EAGLE.run / "finished").unlink()
    assert EAGLE.begin()  # a run that was cut off goes on
    (EAGLE.run / "finished").touch()
    assert not EAGLE.begin()


def test_what_is_missing_is_said(checkout: Path) -> None:
    shutil.rmtree("data/scenes")
    assert "data/build/scenes.py" in EAGLE.missing()
    shutil.rmtree(SHIPPED)
    assert "no drafter is trained" in EAGLE.missing()
