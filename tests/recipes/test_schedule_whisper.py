"""The small Whisper's part of `make train`: what it begins from and goes on with; no worse model is shipped."""

import re
import shutil
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import seed_everything

from mmdec.hub.medusa import load_heads
from mmdec.hub.whisper import load_whisper
from mmdec.training import timed_run
from mmdec.training.__main__ import main as train
from mmdec.training.timed_run import Allowance, Outcome
from mmdec.training.whisper import timed as whisper_run
from mmdec.training.whisper.module import Shape, WhisperModule
from mmdec.types import InputError
from tests.support.quiet import LIGHTNING
from tests.support.replayed_training import Replay
from tests.support.tiny_english import write_english

ROOT = Path(__file__).parents[2]
MADE = Path("runs/whisper-phrasebook")
CONFIGURE = whisper_run.configuration  # as it is, not made small
SHAPE = {"width": 16, "attention_heads": 2, "encoder_layers": 1, "encoder_ffn": 16, "decoder_layers": 2}
pytestmark = [
    *LIGHTNING,
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.. before .optimizer.step"),
]


def enter(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Work in a checkout, with a recipe for a tiny model."""
    patch.chdir(folder)
    patch.setattr("sys.argv", ["train"])
    patch.setattr("os.cpu_count", lambda: 1)
    patch.setattr(timed_run, "LEAST", 0.0)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        patch.delenv(name, raising=False)

    def small(*arguments: Any) -> dict[str, Any]:
        recipe = CONFIGURE(*arguments)
        recipe["data"]["init_args"] |= {"batch_seconds": 12, "dev_windows": 2, "pieces": 300, "steps_per_epoch": 2}
        recipe["model"]["init_args"] |= {"shape": {**SHAPE, "decoder_ffn": 16}, "guided": [[1, 0]], "warmup": 1}
        recipe["trainer"]["check_val_every_n_epoch"] = 1000
        return recipe

    patch.setattr(whisper_run, "configuration", small)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with a corpus, in which nothing was trained."""
    write_english(tmp_path / "data" / "english")
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    enter(tmp_path, monkeypatch)
    return tmp_path


@dataclass(frozen=True)
class Trained:
    """The checkout of the one true training, its result, and what it printed."""

    folder: Path
    made: Outcome
    said: str


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder, said = tmp_path_factory.mktemp("trained"), StringIO()
    write_english(folder / "data" / "english")
    (folder / "recipes").symlink_to(ROOT / "recipes")

    def runner(name: str, *arguments: str) -> None:
        assert name == "mmdec.training"
        train(arguments)

    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said):
        enter(folder, patch)
        made = train_for(30.0, runner)
    seed_everything(0, verbose=False)
    return Trained(folder, made, said.getvalue())


@pytest.fixture
def trained(once: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    """A copy of it to work in."""
    shutil.copytree(once.folder, tmp_path, symlinks=True, dirs_exist_ok=True)
    enter(tmp_path, monkeypatch)
    return once


def train_for(seconds: float, runner: Any, fresh: bool = False) -> Outcome:
    """By a clock that stands still, long ago: one epoch is run, and no more."""
    return whisper_run.train(Allowance(1000 + seconds, lambda: 1000.0), runner, fresh)


def test_a_model_of_random_weights_is_trained_and_exported(trained: Trained):
    assert (trained.made.folder, trained.made.before, trained.made.better) == (MADE, None, True)
    model = load_whisper(str(MADE), "cpu").model
    assert model.generation_config.alignment_heads == [[1, 0]]
    assert load_heads(MADE / "medusa", model).heads.config.heads == 8
    bar = r"whisper \[#+-*\] +\d+ %  step \d+  loss \d+\.\d+  (done|\d+:\d\d left)"
    assert re.search(bar, trained.said)  # no terminal


def test_a_better_model_takes_the_place_and_a_worse_one_does_not(
    trained: Trained, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    runner = Replay(whisper_run.RUN, trained.folder / whisper_run.RUN)
    first = (MADE / "model.safetensors").read_bytes()
    scores = iter((2.0, 1.0, 1.0, 1.0))
    monkeypatch.setattr(whisper_run, "next_token_loss", lambda *_: next(scores))
    made = train_for(30.0, runner)
    assert (made.before, made.after, made.better, made.folder) == (2.0, 1.0, True, MADE)
    assert f"from {MADE}" in capsys.readouterr().out
    recipe = yaml.safe_load((whisper_run.RUN / "schedule.yaml").read_text(encoding="utf-8"))
    assert recipe["model"]["init_args"]["start"] == str(MADE)
    assert recipe["data"]["init_args"]["lengths"] == [[0, 30]]
    assert Path("runs/whisper-before-1/finished").is_file()
    second = (MADE / "model.safetensors").read_bytes()
    assert second != first
    made = train_for(30.0, runner)
    assert (made.better, made.folder) == (False, Path("runs/whisper-phrasebook-not-better"))
    assert (MADE / "model.safetensors").read_bytes() == second
    assert not Path("models").exists()


def test_what_was_cut_off_is_gone_on_with(trained: Trained):
    runner = Replay(whisper_run.RUN, trained.folder / whisper_run.RUN)
    Path("runs/whisper/finished").unlink()
    train_for(30.0, runner)
    assert runner.calls[-1][3:] == ("--ckpt_path", str(whisper_run.last()))
    assert not Path("runs/whisper-before-1").exists()
    train_for(30.0, runner, fresh=True)
    assert "--ckpt_path" not in runner.calls[-1]
    recipe = yaml.safe_load((whisper_run.RUN / "schedule.yaml").read_text(encoding="utf-8"))
    assert recipe["model"]["init_args"]["start"] is None


def test_a_resumed_run_keeps_its_batches_on_any_machine(checkout: Path):
    first = CONFIGURE(Allowance(300.0, lambda: 0.0), False, False)
    whisper_run.RUN.mkdir(parents=True)
    (whisper_run.RUN / "schedule.yaml").write_text(yaml.safe_dump(first), encoding="utf-8")
    for _ in range(2):
        again = CONFIGURE(Allowance(900.0, lambda: 0.0), True, False)
        assert again["data"] == first["data"]
        assert again["model"] == first["model"]
    assert first["data"]["init_args"]["batch_seconds"] == 90  # of two processes, in one


def test_a_start_of_another_shape_is_refused(trained: Trained):
    units = [f"unit {number}" for number in range(40)] + ["<|endoftext|>", "<|startoftranscript|>"]
    with pytest.raises(InputError, match="`start` must fit"):
        WhisperModule(units, Shape(**SHAPE, decoder_ffn=16), guided=(), start=str(MADE))


def test_a_missing_corpus_is_built_or_named(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    assert whisper_run.prepare() == ""
    shutil.rmtree("data/english")
    monkeypatch.setattr("shutil.which", lambda program: None)
    assert "espeak-ng and flite" in whisper_run.prepare()
    monkeypatch.setattr("shutil.which", lambda program: program)
    builder = Path("builder.py")
    builder.write_text(
        "import sys, pathlib\nout = pathlib.Path(sys.argv[2])\nout.mkdir(parents=True, exist_ok=True)\n"
        "[(out / name).mkdir(exist_ok=True) for name in ('train', 'train_everyday', 'dev')]\n"
        "sys.exit(not pathlib.Path('whole').exists())\n"
    )
    monkeypatch.setattr(whisper_run, "BUILDER", builder)
    assert "failed with 1" in whisper_run.prepare()
    assert not Path("data/english").exists()
    Path("whole").touch()
    assert whisper_run.prepare() == ""
    assert Path("data/english/train").is_dir()
    kept = Path("data/english/dev/kept")
    kept.touch()
    shutil.rmtree("data/english/train_everyday")  # a corpus of before there was any
    assert whisper_run.prepare() == ""
    assert kept.is_file()
    assert Path("data/english/train_everyday").is_dir()
