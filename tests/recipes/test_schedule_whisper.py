"""Tests the small Whisper in `make train`: its start and continuation, and that no worse model is shipped."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import seed_everything

from mmdec.hub.medusa import load_heads
from mmdec.hub.whisper import load_whisper
from mmdec.training.checkpoints import read_checkpoint
from mmdec.training.make_train import WHISPER
from mmdec.training.timed_run import Allowance, Outcome, Runner, System
from mmdec.training.whisper.module import Shape, WhisperModule
from mmdec.types import InputError
from tests.support.quiet import LIGHTNING
from tests.support.small_schedules import enter, make_small, train_for
from tests.support.tiny_english import write_english

MADE = Path("runs/whisper-phrasebook")
CONFIGURE = System.configuration  # as it is, not made small
LAST = WHISPER.run / "checkpoints" / "last.ckpt"
SHAPE = {"width": 16, "attention_heads": 2, "encoder_layers": 1, "encoder_ffn": 16, "decoder_layers": 2}
pytestmark = [
    *LIGHTNING,
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.. before .optimizer.step"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


def prepare(checkout: Path, patch: pytest.MonkeyPatch) -> None:
    """A checkout with a corpus, and a recipe for a tiny model."""
    write_english(checkout / "data" / "english")
    enter(checkout, patch)
    patch.setattr("os.cpu_count", lambda: 1)
    data = {"batch_seconds": 12, "dev_windows": 2, "pieces": 300, "steps_per_epoch": 2}
    model = {"shape": {**SHAPE, "decoder_ffn": 16}, "guided": [[1, 0]], "warmup": 1}
    make_small(patch, data, model, check_val_every_n_epoch=1000)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """runs/ of a checkout in which a model was truly trained from random weights, and what came of it."""
    root = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        prepare(root, patch)
        return root / "runs", train_for(WHISPER, 30.0)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    prepare(tmp_path, monkeypatch)
    yield tmp_path
    seed_everything(0, verbose=False)


@pytest.fixture
def made(checkout: Path, trained: tuple[Path, Outcome]) -> Outcome:
    """What came of the training, in this test's own checkout."""
    shutil.copytree(trained[0], "runs")
    return trained[1]


@pytest.fixture
def replayed(trained: tuple[Path, Outcome]) -> Runner:
    """Leaves behind the checkpoints of that training, whatever is asked for."""

    def run(name: str, *arguments: str) -> None:
        assert name == "mmdec.training"
        shutil.copytree(trained[0].parent / WHISPER.run / "checkpoints", WHISPER.run / "checkpoints")

    return run


def test_a_new_model_then_a_better_one_then_none(made: Outcome, replayed: Runner, capsys: pytest.CaptureFixture[str]):
    """Truly trained: random weights, then from those of before; what is no better takes nobody's place."""
    assert (made.folder, made.before, made.better) == (MADE, None, True)
    first = load_whisper(str(MADE), "cpu").model
    assert first.generation_config.alignment_heads == [[1, 0]]
    assert load_heads(MADE / "medusa", first).heads.config.heads == 8
    scores = iter((2.0, 1.0, 1.0, 1.0))
    system = replace(WHISPER, score=lambda *_: next(scores))
    made = train_for(system, 30.0)
    assert (made.before, made.after, made.better, made.folder) == (2.0, 1.0, True, MADE)
    said = capsys.readouterr().out
    assert f"from {MADE}" in said
    assert re.search(r"whisper \[#+-*\] +\d+ %  step \d+  loss \d+\.\d+  (done|\d+:\d\d left)", said)  # no terminal
    recipe = yaml.safe_load((WHISPER.run / "schedule.yaml").read_text(encoding="utf-8"))
    assert recipe["model"]["init_args"]["start"] == str(MADE)
    assert recipe["data"]["init_args"]["lengths"] == [[0, 30]]
    assert Path("runs/whisper-before-1/finished").is_file()
    second = (MADE / "model.safetensors").read_bytes()
    made = train_for(system, 30.0, replayed)
    assert (made.better, made.folder) == (False, Path("runs/whisper-phrasebook-not-better"))
    assert (MADE / "model.safetensors").read_bytes() == second
    assert not Path("models").exists()


def test_what_was_cut_off_is_gone_on_with(made: Outcome, replayed: Runner):
    before = read_checkpoint(LAST)["global_step"]
    Path("runs/whisper/finished").unlink()
    train_for(WHISPER, 30.0)
    assert read_checkpoint(LAST)["global_step"] > before
    assert not Path("runs/whisper-before-1").exists()
    train_for(WHISPER, 30.0, replayed, fresh=True)
    recipe = yaml.safe_load((WHISPER.run / "schedule.yaml").read_text(encoding="utf-8"))
    assert recipe["model"]["init_args"]["start"] is None


def test_a_resumed_run_keeps_its_batches_on_any_machine(checkout: Path):
    first = CONFIGURE(WHISPER, Allowance(300.0, lambda: 0.0), False, False)
    WHISPER.run.mkdir(parents=True)
    (WHISPER.run / "schedule.yaml").write_text(yaml.safe_dump(first), encoding="utf-8")
    for _ in range(2):
        again = CONFIGURE(WHISPER, Allowance(900.0, lambda: 0.0), True, False)
        assert again["data"] == first["data"]
        assert again["model"] == first["model"]
    assert first["data"]["init_args"]["batch_seconds"] == 90  # of two processes, in one


def test_a_start_of_another_shape_is_refused(made: Outcome):
    units = [f"unit {number}" for number in range(40)] + ["<|endoftext|>", "<|startoftranscript|>"]
    with pytest.raises(InputError, match="`start` must fit"):
        WhisperModule(units, Shape(**SHAPE, decoder_ffn=16), guided=(), start=str(MADE))


def test_a_missing_corpus_is_built_or_named(checkout: Path, monkeypatch: pytest.MonkeyPatch):
    assert WHISPER.missing() == ""
    shutil.rmtree("data/english")
    monkeypatch.setattr("shutil.which", lambda program: None)
    assert "espeak-ng and flite" in WHISPER.missing()
    monkeypatch.setattr("shutil.which", lambda program: program)
    builder = Path("builder.py")
    builder.write_text(
        "import sys, pathlib\nout = pathlib.Path(sys.argv[2])\nout.mkdir(parents=True, exist_ok=True)\n"
        "[(out / name).mkdir(exist_ok=True) for name in ('train', 'train_everyday', 'dev')]\n"
        "sys.exit(not pathlib.Path('whole').exists())\n"
    )
    whisper = replace(WHISPER, builder=builder)
    assert "failed with 1" in whisper.missing()
    assert not Path("data/english").exists()
    Path("whole").touch()
    assert whisper.missing() == ""
    assert Path("data/english/train").is_dir()
    kept = Path("data/english/dev/kept")
    kept.touch()
    shutil.rmtree("data/english/train_everyday")  # a corpus of before there was any
    assert whisper.missing() == ""
    assert kept.is_file()
    assert Path("data/english/train_everyday").is_dir()
