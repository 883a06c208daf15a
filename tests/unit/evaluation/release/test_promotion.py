"""`mmdec promote`: a better model, whole, with a card of what was measured; no other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mmdec import cli
from mmdec.evaluation.release import promotion
from mmdec.evaluation.release.promotion import SYSTEMS, promote
from mmdec.provenance import weights
from mmdec.training.processes import only_one
from mmdec.types import InputError, MmdecError
from tests.support import promotions
from tests.support.tiny_corpus import TinyCorpus, write_corpus
from tests.support.tiny_whisper import write

PLACE = Path("models/daspeech-phrasebook")
RUN = Path("runs/daspeech-phrasebook")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_corpus(tmp_path_factory.mktemp("corpus"), recordings=1, dev=2)


@pytest.fixture
def place(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run, and a model of other bytes with a card."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model, RUN)
    shutil.copytree(tiny_model, PLACE)
    (RUN / "README.md").write_text("# an old card\n")
    (PLACE / "README.md").write_text("# the card of before: 99.9 %\n")
    other = PLACE / "vocoder.safetensors"
    save_file(load_file(other), other, {"written": "before"})
    return tmp_path


def scored(monkeypatch: pytest.MonkeyPatch, new: float, old: float) -> None:
    def write(report: Any, value: float) -> None:
        for scores in report["systems"].values():
            scores["phone_error_rate_nearest"]["value"] = value

    promotions.scored(monkeypatch, "daspeech", {RUN: new, PLACE: old}, write)


def test_a_better_model_comes_whole_with_a_card_of_its_own_numbers(
    place: Path, corpus: TinyCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored(monkeypatch, 0.123, 0.25)
    call = ["promote", str(RUN), "--corpus", str(corpus.root), "--threads", "1"]
    done = CliRunner().invoke(cli.app, call)
    assert done.exit_code == 0, done.output
    assert weights(PLACE) == weights(RUN)
    card = (PLACE / "README.md").read_text(encoding="utf-8")
    known = json.loads((PLACE / "provenance.json").read_text(encoding="utf-8"))
    assert known["weights"] == weights(PLACE)
    (report,) = known["measured"]
    assert (report["split"], report["n"]) == ("dev", 2)
    assert "| lookahead | 2 |" in card
    assert "12.3 %" in card
    assert "12.30 % phone errors on dev, n = 2, where the one in models had 25.00 % phone errors" in card
    assert "99.9" not in card
    assert "an old card" not in card
    assert [path.name for path in Path("models").iterdir()] == [PLACE.name]


@pytest.mark.parametrize("new", [0.25, 0.3])
def test_a_model_that_is_not_better_is_refused_with_both_numbers(
    place: Path, corpus: TinyCorpus, monkeypatch: pytest.MonkeyPatch, new: float
) -> None:
    scored(monkeypatch, new, 0.25)
    before = {path.name: path.read_bytes() for path in PLACE.iterdir()}
    with pytest.raises(InputError, match=rf"{100 * new:.2f} % phone errors on dev.*had 25.00 % phone errors.*--force"):
        promote(RUN, corpus=corpus.root, threads=1)
    assert {path.name: path.read_bytes() for path in PLACE.iterdir()} == before
    promote(RUN, corpus=corpus.root, threads=1, force=True)
    assert weights(PLACE) == weights(RUN)
    assert f"{100 * new:.1f} %" in (PLACE / "README.md").read_text(encoding="utf-8")


def test_nothing_changes_where_a_measurement_or_the_copy_fails(
    place: Path, corpus: TinyCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored(monkeypatch, 0.1, 0.25)
    before = {path.name: path.read_bytes() for path in PLACE.iterdir()}
    told = iter((weights(RUN), {"model.safetensors": "another"}))
    monkeypatch.setattr(promotion, "weights", lambda folder: next(told))
    with pytest.raises(MmdecError, match="changed while they were measured"):
        promote(RUN, corpus=corpus.root, threads=1)
    assert {path.name: path.read_bytes() for path in PLACE.iterdir()} == before
    assert [path.name for path in Path("models").iterdir()] == [PLACE.name]


def test_what_cannot_be_promoted_is_named(place: Path, corpus: TinyCorpus, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`run` must be a model that `make train` made"):
        promote(tmp_path)
    with pytest.raises(InputError, match="`run` must lie in runs/"):
        promote(PLACE, corpus=corpus.root)
    with pytest.raises(InputError, match="`corpus` must have a split dev"):
        promote(RUN, corpus=tmp_path)
    with only_one(RUN.parent, "make train"), pytest.raises(InputError, match=r"make train .* works there"):
        promote(RUN, corpus=corpus.root)


def test_of_equal_word_errors_better_heads_win() -> None:
    def report(errors: float, tokens: float) -> dict[str, Any]:
        return {"wer": {"value": errors}, "decoding": {"medusa": {"tokens_per_round": tokens}}}

    score = SYSTEMS["whisper"].score
    assert score(report(0.1, 2.0)) < score(report(0.2, 3.0))
    assert score(report(0.1, 3.0)) < score(report(0.1, 2.0))


def test_parameters_are_counted_by_file(tmp_path: Path) -> None:
    found = promotion.parameters(write(tmp_path / "tiny"))
    assert set(found) == {"model.safetensors", "medusa/heads.safetensors"}
    assert found["medusa/heads.safetensors"] == 3 * (32 * 32 + 32)
