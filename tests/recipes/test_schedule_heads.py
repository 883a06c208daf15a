"""Tests the Medusa heads in `make train`: their start and continuation, and that worse heads are never shipped."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import seed_everything

from mmdec.hub.medusa import load_heads, save_heads
from mmdec.hub.provenance import weights
from mmdec.hub.whisper import load_whisper
from mmdec.nn.medusa import MedusaConfig, MedusaHeads
from mmdec.training import timed_run
from mmdec.training.checkpoints import read_checkpoint
from mmdec.training.make_train import MEDUSA
from mmdec.training.medusa.data import fingerprint
from tests.support.quiet import LIGHTNING
from tests.support.small_schedules import enter, make_small, train_for
from tests.support.tiny_english import write_english
from tests.support.tiny_whisper import write

LAST = MEDUSA.run / "checkpoints" / "last.ckpt"
SHIPPED, MADE = Path("models/whisper-tiny.en/medusa"), Path("runs/whisper-tiny.en")
pytestmark = LIGHTNING


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout with a model and a corpus."""
    root = tmp_path_factory.mktemp("checkout")
    write_english(root / "data" / "english")
    write(root / "models" / "whisper-tiny.en", with_heads=False, seconds=30)
    return root


@pytest.fixture
def checkout(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copytree(written, tmp_path, dirs_exist_ok=True)
    enter(tmp_path, monkeypatch)
    yield tmp_path
    seed_everything(0, verbose=False)


def heads(folder: Path, bias: float, count: int = 3) -> Path:
    model = load_whisper("models/whisper-tiny.en", "cpu").model
    made = MedusaHeads(MedusaConfig(model.config.d_model, model.config.vocab_size, heads=count))
    for weight in made.parameters():
        torch.nn.init.constant_(weight, bias)
    shutil.rmtree(folder, ignore_errors=True)
    return save_heads(folder, made)


class Runner:
    """Leaves behind what a run would: heads, and a checkpoint of this model's."""

    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, Any], str | None]] = []

    def __call__(self, name: str, *arguments: str) -> None:
        assert (name, *arguments[:2]) == ("mmdec.training", "fit", "--config")
        recipe = yaml.safe_load(Path(arguments[2]).read_text(encoding="utf-8"))
        self.calls.append((recipe, arguments[4] if len(arguments) > 3 else None))
        made = heads(Path("runs/medusa/heads"), 0.1)
        (made / "provenance.json").write_text('{"training": {"step": 3}}')
        Path("runs/medusa/checkpoints").mkdir(exist_ok=True)
        mark = fingerprint(load_whisper("models/whisper-tiny.en", "cpu").model)
        torch.save({"base": mark, "state_dict": {}}, LAST)


@pytest.mark.parametrize(("old", "new", "taken"), [(2.0, 2.5, True), (2.0, 2.0, False), (2.5, 2.0, False)])
def test_only_better_heads_are_shipped(checkout: Path, old: float, new: float, taken: bool):
    heads(SHIPPED, 0.5)
    scores = {SHIPPED: old, Path("runs/medusa/heads"): new}
    before = weights(Path("models"))
    runner = Runner()
    made = train_for(replace(MEDUSA, score=lambda folder, recipe: scores[folder]), 60, runner)
    assert (made.before, made.after, made.better) == (old, new, taken)
    assert weights(Path("models")) == before  # that is for `mmdec promote`
    assert made.folder == (MADE if taken else Path("runs/medusa/heads"))
    if taken:
        assert (MADE / "medusa" / "heads.safetensors").read_bytes() != (SHIPPED / "heads.safetensors").read_bytes()
        assert weights(MADE)["model.safetensors"] == before["whisper-tiny.en/model.safetensors"]
    recipe, resumed = runner.calls[0]
    assert resumed is None
    assert recipe["model"]["init_args"]["start"] == str(SHIPPED)
    assert recipe["model"]["init_args"]["heads"] == 3  # as many as are shipped
    assert recipe["data"]["init_args"]["steps_per_epoch"] == 2
    assert recipe["trainer"]["callbacks"][-1]["init_args"]["at"] == 1060 - timed_run.EXPORT


def test_a_run_goes_on_unless_it_was_finished_or_the_model_is_another(checkout: Path):
    train = partial(train_for, replace(MEDUSA, score=lambda folder, recipe: 1.0))
    runner = Runner()
    assert train(60, runner).folder == MADE  # there were none
    assert runner.calls[-1][0]["model"]["init_args"]["start"] is None
    train(60, runner)
    assert runner.calls[-1][1] is None  # it was finished
    assert runner.calls[-1][0]["model"]["init_args"]["start"] == str(MADE / "medusa")
    assert runner.calls[-1][0]["data"]["init_args"]["base"] == str(MADE)
    Path("runs/medusa/finished").unlink()
    train(600, runner)
    recipe, resumed = runner.calls[-1]
    assert resumed == str(LAST)
    assert recipe["data"]["init_args"]["steps_per_epoch"] == 2  # as it was begun with
    Path("runs/medusa/finished").unlink()
    shutil.rmtree(MADE)
    shutil.rmtree("models/whisper-tiny.en")
    write(Path("models/whisper-tiny.en"), seed=6, with_heads=False, seconds=30)
    train(60, runner)
    assert runner.calls[-1][1] is None
    train(60, runner, fresh=True)
    assert runner.calls[-1][0]["model"]["init_args"]["start"] is None
    assert Path("runs/medusa-before-1").is_dir()


def test_a_run_begun_by_hand_is_set_aside(checkout: Path):
    Path("runs/medusa/checkpoints").mkdir(parents=True)
    assert not MEDUSA.begin()
    assert Path("runs/medusa-before-1/checkpoints").is_dir()


def test_the_recipe_runs_in_the_time_it_gets(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    """Truly trained, judged, and put beside the model: a second run begins from the first one's heads."""
    heads(SHIPPED, 0.5)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    make_small(monkeypatch, {"batch_size": 2, "dev_batches": 1}, {"max_tokens": 8, "warmup": 1})
    made = train_for(MEDUSA, 30.0)  # on a clock that stands still: one epoch is run, and no more
    assert made.folder in (MADE, Path("runs/medusa/heads"))
    assert made.after is not None
    assert made.better == (made.before is not None and made.after > made.before)
    last = read_checkpoint(LAST)
    assert last["global_step"] >= 2
    model = load_whisper("models/whisper-tiny.en", "cpu").model
    assert load_heads(Path("runs/medusa/heads"), model).heads.config.heads == 3
    recipe = yaml.safe_load(Path("runs/medusa/schedule.yaml").read_text(encoding="utf-8"))
    better = MEDUSA.score(Path("runs/medusa/heads"), recipe)
    assert better == pytest.approx(last["best"], rel=0.05)  # kept in half precision


def test_without_a_corpus_no_heads_are_trained(checkout: Path):
    shutil.rmtree("data/english/dev")
    assert "data/english is missing" in MEDUSA.missing()
