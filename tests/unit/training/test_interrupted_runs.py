"""Tests training runs that end early, and their continuation, with training's command line and a tiny linear model."""

from __future__ import annotations

import csv
import signal
from pathlib import Path

import fsspec
import pytest
import torch
from lightning.pytorch.utilities import rank_zero_only

from mmdec.errors import InputError, MmdecError
from mmdec.training.checkpoints import read_checkpoint
from mmdec.training.processes import EXIT_CODE_TERMINATED, lock_folder
from tests.support.grid import sample
from tests.support.lightning_warnings import LIGHTNING
from tests.unit.training.tiny_run import fit, recipe

pytestmark = LIGHTNING


def steps(folder: Path) -> dict[str, str]:
    """Step -> loss, digit for digit."""
    with open(folder / "log" / "metrics.csv", encoding="utf-8", newline="") as file:
        return {line["step"]: line["train/loss"] for line in csv.DictReader(file) if line["train/loss"]}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").glob("*"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs of four steps, in peace."""
    folder = tmp_path_factory.mktemp("whole")
    fit(recipe(folder))
    assert names(folder) == ["last.ckpt", "step=12.ckpt", "step=4.ckpt", "step=8.ckpt"]
    return folder


ENDS = (("batch", 4), ("batch", 6), ("validation", 8))
RUNS = [(*end, data) for end in ENDS for data in ("Numbers", "WholeBatches")]
TELLING = (("batch", 4, "Numbers"), ("batch", 6, "WholeBatches"), ("validation", 8, "Numbers"))


@pytest.mark.parametrize(("hook", "ends", "data"), sample(RUNS, TELLING))
def test_a_terminated_run_resumes_at_its_next_step(hook: str, ends: int, data: str, whole: Path, tmp_path: Path):
    path, handler = recipe(tmp_path, data=data), signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        fit(path, callback="Asked", hook=hook, at=ends)
    assert ended.value.code == EXIT_CODE_TERMINATED == 143
    assert signal.getsignal(signal.SIGTERM) == handler
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert read_checkpoint(last)["global_step"] == ends
    fit(path, "--ckpt_path=last")
    wanted = steps(whole)
    assert steps(tmp_path) == {str(step): wanted[str(step)] for step in range(ends, 12)}
    expected = read_checkpoint(whole / "checkpoints" / "last.ckpt")["state_dict"]
    for name, value in read_checkpoint(last)["state_dict"].items():
        assert torch.equal(value, expected[name])


def test_a_limit_in_steps_within_an_epoch_loses_no_batch(whole: Path, tmp_path: Path):
    path = recipe(tmp_path)
    fit(path, "--trainer.max_steps=6")
    fit(path, "--ckpt_path=last")
    expected = steps(whole)
    assert steps(tmp_path) == {str(step): expected[str(step)] for step in range(6, 12)}


def test_a_run_terminated_before_its_first_step_saves_nothing(tmp_path: Path):
    with pytest.raises(SystemExit) as ended:
        fit(recipe(tmp_path), callback="Asked", hook="setup")
    assert ended.value.code == EXIT_CODE_TERMINATED
    assert names(tmp_path) == []


def test_a_run_terminated_in_its_last_validation_finishes(tmp_path: Path):
    fit(recipe(tmp_path), callback="Asked", hook="validation", at=12)
    assert read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"] == 12


@pytest.mark.parametrize(
    ("manual", "at", "gradient", "message", "files"),
    [
        (False, 1, False, "after step 2, .*loss is nan", []),
        (True, 1, True, "after step 3, .*loss is nan", []),
        (True, 4, False, "after step 4, 1 of 2 weights", []),
        (False, 11, True, "after step 12, 2 of 2 weights", ["last.ckpt", "step=4.ckpt", "step=8.ckpt"]),
    ],
)
def test_a_loss_that_is_not_finite_ends_the_run(
    manual: bool, at: int, gradient: bool, message: str, files: list, tmp_path: Path
):
    path = recipe(tmp_path, lr=0.25, manual=manual)
    with pytest.raises(MmdecError, match=rf"{message}.*Lower `model\.init_args\.lr`, which is 0\.25\."):
        fit(path, callback="Spoilt", at=at, gradient=gradient)
    assert names(tmp_path) == files


def test_an_enormous_learning_rate_ends_the_run(tmp_path: Path):
    with pytest.raises(MmdecError, match=r"Lower `model\.init_args\.lr`, which is 1e\+30\."):
        fit(recipe(tmp_path, lr=1e30))
    assert names(tmp_path) == []


def test_two_runs_in_one_folder_are_refused(tmp_path: Path):
    path = recipe(tmp_path / "one")
    elsewhere = f"--trainer.default_root_dir={tmp_path / 'two'}"  # but checkpoints in the first
    with lock_folder(tmp_path / "one", "python -m mmdec.training fit"):
        for more in ((), (elsewhere,)):
            with pytest.raises(InputError, match=r"must be the only process in .*one', but .* \(process \d+\) uses it"):
                fit(path, *more)
    half = tmp_path / "one" / "checkpoints" / ".mmdec-0.part"
    half.parent.mkdir()
    half.touch()  # as a run that was killed leaves it
    fit(path, "--trainer.max_steps=1")
    assert not half.exists()


def test_addresses_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, address = recipe(tmp_path), "http://127.0.0.1:9/x"
    with pytest.raises(InputError, match=f"`ckpt_path` must be a path of this machine, but is '{address}'"):
        fit(path, f"--ckpt_path={address}")
    with pytest.raises(InputError, match="`dirpath` must be a path of this machine, but is 'memory://x'"):
        fit(path, "--trainer.callbacks.dirpath=memory://x")
    fsspec.filesystem("memory").pipe("/recipe.yaml", path.read_bytes())
    with pytest.raises(SystemExit) as ended:
        fit("memory://recipe.yaml")
    assert ended.value.code == 2
    path.write_text(f"{path.read_text()}ckpt_path: {address}\n")
    with pytest.raises(InputError, match=f"`ckpt_path` must be a path of this machine, but is '{address}'"):
        fit(path)
    assert "File does not exist: 'memory://recipe.yaml'" in capsys.readouterr().err


def test_a_checkpoint_of_another_recipe_is_refused(whole: Path, tmp_path: Path):
    last = whole / "checkpoints" / "last.ckpt"
    with pytest.raises(InputError, match=r"`ckpt_path` must be .*\.Other.*, but '.*last.ckpt' is of .*\.Line\."):
        fit(recipe(tmp_path, model="Other"), f"--ckpt_path={last}")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.ckpt").write_bytes(last.read_bytes())
    with pytest.raises(
        InputError, match=r"last\.ckpt' does not fit it \(RuntimeError: .*size mismatch for line"
    ) as caught:
        fit(recipe(tmp_path, width=3), "--ckpt_path=last")
    assert "\n" not in str(caught.value)


def test_a_damaged_last_checkpoint_is_replaced_by_the_newest_good_one(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path, last = recipe(tmp_path), tmp_path / "checkpoints" / "last.ckpt"
    fit(path, "--ckpt_path=last", "--trainer.max_epochs=2")  # there is none: it begins anew
    assert list(steps(tmp_path)) == [str(step) for step in range(8)]
    last.write_bytes(last.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"last.ckpt' does not .*newest good one there is '.*step=8\.ckpt'"):
        fit(path, f"--ckpt_path={last}")
    fit(path, "--ckpt_path=last")
    assert list(steps(tmp_path)) == [str(step) for step in range(8, 12)]


def test_only_the_first_process_locks_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    with lock_folder(tmp_path, "python -m mmdec.training fit"):
        fit(recipe(tmp_path), "--trainer.max_steps=1", "--trainer.callbacks.save_last=false")
