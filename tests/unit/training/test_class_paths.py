"""Class paths of earlier releases: recipes, options and checkpoints that name them are read, with a warning."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule

from mmdec.training.__main__ import TrainingCLI
from mmdec.training.class_paths import MOVED, renamed, renamed_in
from mmdec.training.daspeech.vocoder import VocoderData, VocoderModule
from tests.support.quiet import LIGHTNING

pytestmark = LIGHTNING
OLD_MODEL, OLD_DATA = "mmdec.training.vocoder.VocoderModule", "mmdec.training.vocoder.VocoderData"


def parse(*args: str) -> TrainingCLI:
    return TrainingCLI(
        LightningModule, LightningDataModule, subclass_mode_model=True, subclass_mode_data=True, args=list(args)
    )


@pytest.mark.parametrize("path", MOVED.values())
def test_new_paths_are_there(path: str):
    module, _, name = path.rpartition(".")
    assert isinstance(getattr(import_module(module), name), type)


@pytest.mark.parametrize("path", MOVED)
def test_old_paths_are_not(path: str):
    module, _, name = path.rpartition(".")
    with pytest.raises((ImportError, AttributeError)):
        getattr(import_module(module), name)


def test_only_whole_paths_are_renamed(recwarn: pytest.WarningsRecorder):
    same = f"my{OLD_MODEL} {OLD_MODEL}2 {OLD_MODEL}.part other.{OLD_MODEL} mmdec.training.callbacks.PlainProgress"
    assert renamed(same, "a recipe") == same
    assert not recwarn
    with pytest.warns(FutureWarning, match=f"a recipe names {OLD_MODEL}"):
        assert renamed(f"class_path: {OLD_MODEL}\n", "a recipe") == f"class_path: {MOVED[OLD_MODEL]}\n"


def test_nested_values_are_renamed():
    value: dict[str, Any] = {"a": [{"class_path": OLD_DATA, "n": 3}], "b": None}
    with pytest.warns(FutureWarning):
        assert renamed_in(value, "it") == {"a": [{"class_path": MOVED[OLD_DATA], "n": 3}], "b": None}


@pytest.mark.parametrize("on_command_line", [False, True])
def test_old_recipes_and_checkpoints_are_read(on_command_line: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["train"])
    monkeypatch.setattr(TrainingCLI, "_run_subcommand", lambda self, name: None)  # parsed and built, not trained
    trainer = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_progress_bar": False}
    trainer |= {"enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": str(tmp_path)}
    recipe: dict[str, Any] = {"seed_everything": 1, "trainer": trainer}
    given = [f"--model={OLD_MODEL}", f"--data={OLD_DATA}"] if on_command_line else []
    if not on_command_line:
        recipe |= {"model": {"class_path": OLD_MODEL}, "data": {"class_path": OLD_DATA, "init_args": {"limit": 7}}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    kept = {"state_dict": {}, "hyper_parameters": {"_class_path": OLD_MODEL, "judged": 3, "_instantiator": "x"}}
    torch.save(kept, tmp_path / "old.ckpt")
    with pytest.warns(FutureWarning, match="the next release does not read"):
        made = parse("fit", f"--config={tmp_path / 'recipe.yaml'}", *given, f"--ckpt_path={tmp_path / 'old.ckpt'}")
    assert isinstance(made.model, VocoderModule)
    assert isinstance(made.datamodule, VocoderData)
    assert made.model.judged == 3
    assert made.datamodule.limit == (2000 if on_command_line else 7)
