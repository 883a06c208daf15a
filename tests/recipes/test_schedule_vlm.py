"""The small vision-language model's part of `make train`: truly trained, judged, exported; what it begins from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lightning.pytorch import seed_everything
from transformers import LlavaForConditionalGeneration

from mmdec.training import timed_run
from mmdec.training.__main__ import main
from mmdec.training.timed_run import Allowance, Outcome
from mmdec.training.vlm import timed
from tests.support.quiet import LIGHTNING
from tests.support.replayed_training import Replay
from tests.support.tiny_squares import write_squares, write_target

ROOT = Path(__file__).parents[2]
CONFIGURE = timed.configuration  # as it is, not made small
SHIPPED, TRAINED = Path("models/vlm-scenes"), Path("runs/vlm-scenes")
SHAPE = {"image": 32, "vision_width": 16, "vision_layers": 1, "vision_heads": 2, "vision_ffn": 16}
SHAPE |= {"width": 16, "layers": 2, "heads": 2, "head_dim": 8, "ffn": 16, "positions": 512}
pytestmark = [
    *LIGHTNING,
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.. before .optimizer.step"),
    pytest.mark.filterwarnings("ignore:LightningCLI.s args parameter"),  # pytest has arguments of its own
]


def write_checkout(folder: Path) -> None:
    """A corpus, and the recipes."""
    corpus = write_squares(folder / "data" / "scenes")
    for split, count in (("train", 12), ("dev", 4)):
        rows = json.loads((corpus / f"{split}.json").read_text(encoding="utf-8"))
        for row in rows:
            colour = row["conversations"][3]["value"].removesuffix(".")
            described = {"task": "describe", "expected": "", "claims": [[colour, "square"]]}
            row["turns"] = [described, {"task": "colour", "expected": colour, "claims": []}]
        (corpus / f"{split}.json").write_text(json.dumps(rows), encoding="utf-8")
        np.save(corpus / f"{split}.cells.npy", np.ones((count, 4, 8, 2), np.uint8))
    (folder / "recipes").symlink_to(ROOT / "recipes")


def enter(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Work in a checkout, with a recipe for a tiny model."""
    patch.chdir(folder)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        patch.delenv(name, raising=False)
    patch.setattr(timed_run, "LEAST", 0.0)

    def small(*arguments: Any) -> dict[str, Any]:
        recipe = CONFIGURE(*arguments)
        recipe["trainer"] |= {"devices": 1, "strategy": "auto"}
        recipe["data"]["init_args"] |= {"rows": 2, "length": 60, "image": 32, "patches": 4, "pieces": 300}
        recipe["data"]["init_args"]["dev_questions"] = 2
        recipe["model"]["init_args"] |= {"shape": SHAPE, "compiled": False, "half": False}
        return recipe

    patch.setattr(timed, "configuration", small)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write_checkout(tmp_path)
    enter(tmp_path, monkeypatch)
    yield tmp_path
    seed_everything(0, verbose=False)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A checkout in which a model of random weights was truly trained."""
    folder = tmp_path_factory.mktemp("trained")
    write_checkout(folder)
    with pytest.MonkeyPatch.context() as patch:
        enter(folder, patch)
        assert timed.prepare() == ""
        made = train_for(90.0)
    seed_everything(0, verbose=False)
    return folder, made


@pytest.fixture
def trained(once: tuple[Path, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it to work in."""
    shutil.copytree(once[0], tmp_path, symlinks=True, dirs_exist_ok=True)
    enter(tmp_path, monkeypatch)
    return tmp_path


def run_here(name: str, *arguments: str) -> None:
    main(arguments)


def train_for(seconds: float, runner: Any = run_here) -> Outcome:
    """By a clock that stands still at 1000: one epoch is run, and no more."""
    return timed.train(Allowance(1000 + seconds, lambda: 1000.0), runner)


def test_a_model_is_trained_judged_and_trained_further(trained: Path, once: tuple[Path, Outcome]) -> None:
    folder, first = once
    assert first.before is None
    assert first.after is not None
    assert 0.0 <= first.after <= 1.0
    assert first.folder == TRAINED
    assert first.better
    LlavaForConditionalGeneration.from_pretrained(TRAINED)
    further = train_for(90.0, Replay(timed.RUN, folder / timed.RUN, "tokenizer"))  # from that model, judged first
    assert further.before == pytest.approx(first.after)
    tokens = [json.loads((place / "tokenizer.json").read_text()) for place in (TRAINED, timed.RUN / "tokenizer")]
    assert tokens[0]["model"] == tokens[1]["model"]
    assert list(trained.glob("runs/vlm-before-*"))  # the finished run is set aside


def test_the_shipped_model_is_where_training_begins(checkout: Path) -> None:
    write_target(SHIPPED)
    before = {path.name: path.read_bytes() for path in SHIPPED.iterdir()}
    recipe = timed.configuration(Allowance(1600.0, lambda: 1000.0), False, False)
    assert recipe["model"]["init_args"]["start"] == str(SHIPPED)
    assert recipe["model"]["init_args"]["vision_steps"] == 0
    assert recipe["model"]["init_args"]["cell_weight"] == 0.0
    outcome = train_for(90.0)
    assert outcome.before is not None
    assert outcome.folder is not None
    assert before == {path.name: path.read_bytes() for path in SHIPPED.iterdir()}
    assert timed.configuration(Allowance(1600.0, lambda: 1000.0), False, True)["model"]["init_args"]["start"] is None


def test_a_run_that_was_cut_off_goes_on_as_it_began(trained: Path) -> None:
    (timed.RUN / "finished").unlink()
    assert timed.begin()
    began = timed.configuration(Allowance(1060.0, lambda: 1000.0), True, False)
    assert began["model"]["init_args"]["start"] is None  # though runs/ has a better model by now
    assert began["data"]["init_args"]["steps_per_epoch"] >= 2
