"""The drafter's part of `make train`: truly trained and judged; what it begins from and goes on with."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import seed_everything

from mmdec.training import timed_run
from mmdec.training.__main__ import main
from mmdec.training.timed_run import Allowance, Outcome
from mmdec.training.vlm_drafters import timed
from tests.support.quiet import LIGHTNING
from tests.support.replayed_training import Replay
from tests.support.tiny_squares import write_squares, write_target

ROOT = Path(__file__).parents[2]
SHIPPED, MADE = Path("models/vlm-scenes"), Path("runs/vlm-scenes")
pytestmark = [
    *LIGHTNING,
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:LightningCLI.s args parameter"),
]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write_squares(tmp_path / "data" / "scenes")
    write_target(tmp_path / SHIPPED)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(timed_run, "LEAST", 0.0)
    configure = timed.configuration

    def small(*arguments: Any) -> dict[str, Any]:
        recipe = configure(*arguments)
        recipe["data"]["init_args"] |= {"batch_size": 2, "dev_samples": 2, "samples": 6, "max_tokens": 8}
        recipe["model"]["init_args"] |= {"network": {"intermediate_size": 16}, "decoded": 0, "chain": 3}
        return recipe

    monkeypatch.setattr(timed, "configuration", small)
    yield tmp_path
    seed_everything(0, verbose=False)


def run_here(name: str, *arguments: str) -> None:
    main(arguments)


def train_for(seconds: float, runner: Any, fresh: bool = False) -> Outcome:
    """By a clock that stands still at 1000: one epoch is run, and no more."""
    return timed.train(Allowance(1000 + seconds, lambda: 1000.0), runner, fresh)


def test_a_drafter_is_trained_judged_and_goes_on(checkout: Path) -> None:
    assert timed.missing() == ""
    made = train_for(60.0, run_here)
    assert made.better
    assert made.before is None
    assert made.after is not None
    assert made.after >= 1.0
    assert made.folder == MADE
    assert (MADE / "eagle" / "model.safetensors").is_file()
    assert (MADE / "model.safetensors").read_bytes() == (SHIPPED / "model.safetensors").read_bytes()
    assert not (SHIPPED / "eagle").exists()
    trained = shutil.copytree(timed.RUN, checkout / "trained")
    replay = Replay(timed.RUN, trained)
    again = train_for(60.0, replay)  # from the drafter of before, which is judged first
    assert again.before == pytest.approx(made.after)
    assert "--ckpt_path" not in replay.calls[-1]  # the run before was finished
    (timed.RUN / "finished").unlink()
    assert timed.begin()  # a run that was cut off goes on
    (timed.RUN / "finished").touch()
    assert not timed.begin()


def test_what_is_missing_is_said(checkout: Path) -> None:
    shutil.rmtree("data/scenes")
    assert "data/build/scenes.py" in timed.missing()
    shutil.rmtree(SHIPPED)
    assert "no drafter is trained" in timed.missing()
