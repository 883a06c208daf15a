"""Tests `mmdec promote`: only a better model is promoted, completely, with a card of the new measurements."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import soundfile
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from mmdec import cli
from mmdec.evaluation.release import promotion
from mmdec.evaluation.release.promotion import SYSTEMS, promote
from mmdec.hub.provenance import weights
from mmdec.training.processes import only_one
from mmdec.types import InputError, MmdecError
from tests.conftest import buzz
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


@pytest.mark.parametrize("force", [False, True])
def test_what_has_other_tests_replaces_nothing(
    place: Path, corpus: TinyCorpus, tiny_heard_model: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    """A translator of the phrasebook is not measured on what people say."""
    scored(monkeypatch, 0.1, 0.25)
    shutil.rmtree(PLACE)
    shutil.copytree(tiny_heard_model, PLACE)
    before = weights(PLACE)
    with pytest.raises(InputError, match=r"measured on the tests of .* layout 'pieces', but .* has 'phones'"):
        promote(RUN, corpus=corpus.root, threads=1, force=force)
    assert weights(PLACE) == before


def test_a_translator_that_hears_is_measured_on_natural_voices(tmp_path: Path, tiny_heard_model: Path) -> None:
    data, run = tmp_path / "data", tmp_path / "runs" / "hears"
    shutil.copytree(tiny_heard_model, run)
    rows = ["path\tsplit\ttext\n"]
    for number, split in enumerate(("dev", "dev", "test")):
        path = data / "natural" / f"everyday-{number}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, buzz(1.0, seed=number), 16_000)
        rows.append(f"{path.name}\t{split}\tOù est la gare ?\n")
    (data / "natural" / "manifest.tsv").write_text("".join(rows), encoding="utf-8")
    (data / "everyday").mkdir()
    for split, names in (("dev", "01"), ("test", "2")):
        lines = [f"{name}\tg{name}\tOù est la gare ?\tHello there.\tLow there.\n" for name in names]
        (data / "everyday" / f"{split}.tsv").write_text("".join(lines), encoding="utf-8")
    promoted = promote(run, models=tmp_path / "models", corpus=data / "natural", threads=1)
    assert weights(promoted) == weights(run)
    known = json.loads((promoted / "provenance.json").read_text(encoding="utf-8"))
    assert [(report["split"], report["n"]) for report in known["measured"]] == [("dev", 2), ("test", 1)]
    card = (promoted / "README.md").read_text(encoding="utf-8")
    assert "| split | decoding | n | BLEU | chrF | exact sentences |" in card
    assert "| lookahead | 2 |" in card
    assert re.search(r"Chosen by chrF \d+\.\d\d on dev, n = 2\.", card)
    assert "Copyright (c) 2022 OpenAI" in card
    assert "tatoeba.org" in card
    with pytest.raises(InputError, match="must be better"):
        promote(run, models=tmp_path / "models", corpus=data / "natural", threads=1)


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
