"""Tests the reader's recipe on a tiny text: it learns to translate it, and a resumed run gives the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmdec.daspeech.training.reader.module import load_module
from tests.recipes import small_recipes
from tests.recipes.small_recipes import MARKS, check_same_weights, checkpoint, logged
from tests.support.tiny_sentences import write_pairs

SIZES = {"d_model": 32, "ffn": 32, "heads": 2, "layers": 1, "decoder_layers": 1, "dropout": 0.0}
pytestmark = [pytest.mark.slow, *MARKS]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return two epochs of translation without a graph."""
    out = tmp_path_factory.mktemp("whole")
    fit(text, out)
    return out


def fit(text: Path, out: Path, *more: str) -> None:
    data = {
        "text": f"[{text / 'first'},{text / 'second'}]",
        "pieces": text / "pieces.json",
        "english": text / "english.json",
        "count": 60,
        "written": 80,
        "batch_pieces": 160,
        "steps_per_epoch": 6,
    }
    small_recipes.fit("reader/text", out, {**SIZES, "warmup": 2, "lr": "1e-2"}, data, *more)


def test_the_recipe_learns_and_resumes_to_the_same_weights(text: Path, whole: Path, tmp_path: Path) -> None:
    fit(text, tmp_path, f"--ckpt_path={checkpoint(whole, 5)}")
    check_same_weights(checkpoint(whole, 11), checkpoint(tmp_path, 11))
    rows = logged(whole, "dev/ar")
    assert float(rows[-1]["dev/ar"]) < 0.85 * float(rows[0]["dev/ar"])
    assert 0 <= float(rows[-1]["dev/ar_bleu"]) <= 100


def test_a_graph_is_added_to_what_was_trained_and_learns(text: Path, whole: Path, tmp_path: Path) -> None:
    """From the end of the first epoch, as a run of one epoch leaves it."""
    more = ["graph_layers=1", f"start={checkpoint(whole, 5)}", "glat_steps=12", "ar_weight=0.5"]
    fit(text, tmp_path, *(f"--model.init_args.{option}" for option in more))
    rows = logged(tmp_path, "dev/dag")
    assert float(rows[-1]["dev/dag"]) < 0.9 * float(rows[0]["dev/dag"])
    assert 0 <= float(rows[-1]["dev/dag_bleu"]) <= 100
    assert float(rows[-1]["dev/invalid"]) == 0
    assert load_module([tmp_path / "checkpoints" / "last.ckpt"])[0].network.decoder is not None
