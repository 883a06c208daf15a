"""Tests the small vision-language model in `make train` with real training: start, evaluation and export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from lightning.pytorch import seed_everything
from transformers import LlavaForConditionalGeneration

from mmdec.training.make_train import VLM
from mmdec.training.timed_run import Allowance, Outcome
from tests.support.quiet import LIGHTNING
from tests.support.small_schedules import enter, make_small, train_for
from tests.support.tiny_squares import write_squares, write_target

SHIPPED, TRAINED = Path("models/vlm-scenes"), Path("runs/vlm-scenes")
SHAPE = {"image": 32, "vision_width": 16, "vision_layers": 1, "vision_heads": 2, "vision_ffn": 16}
SHAPE |= {"width": 16, "layers": 2, "heads": 2, "head_dim": 8, "ffn": 16, "positions": 512}
pytestmark = [
    *LIGHTNING,
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.. before .optimizer.step"),
]


def prepare(checkout: Path, patch: pytest.MonkeyPatch) -> None:
    """A checkout with a corpus, and a recipe for a tiny model."""
    corpus = write_squares(checkout / "data" / "scenes")
    for split, count in (("train", 12), ("dev", 4)):
        rows = json.loads((corpus / f"{split}.json").read_text(encoding="utf-8"))
        for row in rows:
            colour = row["conversations"][3]["value"].removesuffix(".")
            described = {"task": "describe", "expected": "", "claims": [[colour, "square"]]}
            row["turns"] = [described, {"task": "colour", "expected": colour, "claims": []}]
        (corpus / f"{split}.json").write_text(json.dumps(rows), encoding="utf-8")
        np.save(corpus / f"{split}.cells.npy", np.ones((count, 4, 8, 2), np.uint8))
    enter(checkout, patch)
    data = {"rows": 2, "length": 60, "image": 32, "patches": 4, "pieces": 300, "dev_questions": 2}
    model = {"shape": SHAPE, "compiled": False, "half": False}
    make_small(patch, data, model, devices=1, strategy="auto")
    patch.setattr("mmdec.training.vlm.module.LONGEST", (8, 16))  # a tiny model's answers seldom end


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """runs/ of a checkout in which a model was truly trained from random weights, and what came of it."""
    root = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        prepare(root, patch)
        assert VLM.missing() == ""
        return root / "runs", train_for(VLM, 90.0)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    prepare(tmp_path, monkeypatch)
    yield tmp_path
    seed_everything(0, verbose=False)


@pytest.fixture
def first(checkout: Path, trained: tuple[Path, Outcome]) -> Outcome:
    """What came of the training, in this test's own checkout."""
    shutil.copytree(trained[0], "runs")
    return trained[1]


def test_a_model_is_trained_judged_and_trained_further(checkout: Path, first: Outcome) -> None:
    assert first.before is None
    assert first.after is not None
    assert 0.0 <= first.after <= 1.0
    assert first.folder == TRAINED
    assert first.better
    LlavaForConditionalGeneration.from_pretrained(TRAINED)
    further = train_for(VLM, 90.0)  # from that model, which is judged first, with its tokens
    assert further.before == pytest.approx(first.after)
    tokens = [json.loads((folder / "tokenizer.json").read_text()) for folder in (TRAINED, VLM.run / "tokenizer")]
    assert tokens[0]["model"] == tokens[1]["model"]
    assert list(checkout.glob("runs/vlm-before-*"))  # the finished run is set aside


def test_the_shipped_model_is_where_training_begins(checkout: Path) -> None:
    write_target(SHIPPED)
    before = {path.name: path.read_bytes() for path in SHIPPED.iterdir()}
    recipe = VLM.configuration(Allowance(1600.0, lambda: 1000.0), False, False)
    assert recipe["model"]["init_args"]["start"] == str(SHIPPED)
    assert recipe["model"]["init_args"]["vision_steps"] == 0
    assert recipe["model"]["init_args"]["cell_weight"] == 0.0
    outcome = train_for(VLM, 90.0)
    assert outcome.before is not None
    assert outcome.folder is not None
    assert before == {path.name: path.read_bytes() for path in SHIPPED.iterdir()}
    assert VLM.configuration(Allowance(1600.0, lambda: 1000.0), False, True)["model"]["init_args"]["start"] is None


def test_a_run_that_was_cut_off_goes_on_as_it_began(first: Outcome) -> None:
    (VLM.run / "finished").unlink()
    assert VLM.begin()
    began = VLM.configuration(Allowance(1060.0, lambda: 1000.0), True, False)
    assert began["model"]["init_args"]["start"] is None  # though runs/ has a better model by now
    assert began["data"]["init_args"]["steps_per_epoch"] >= 2
