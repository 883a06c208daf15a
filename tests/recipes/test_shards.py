"""Tests shards of a corpus: reading in any order, the same training as from the corpus, and exact resumption."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mmdec.training.__main__ import main
from mmdec.training.checkpoints import read_checkpoint
from mmdec.training.daspeech import shards
from mmdec.training.daspeech.corpus import Shards, SpeechTranslationData
from mmdec.types import InputError
from tests.support.killed import train_until_killed
from tests.support.small_recipes import MARKS
from tests.support.tiny_corpus import TinyCorpus, write_corpus
from tests.support.tiny_translator import tiny_sizes

ROOT = Path(__file__).parents[2]
pytest.importorskip("litdata", reason="litdata is not installed: mmdec[shards]")
pytestmark = MARKS


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def written(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "out"
    where = ["--common-voice", str(corpus.common_voice), "--cvss", str(corpus.cvss), "--out", str(out)]
    shards.main([*where, "--jobs", "1", "--megabytes", "0.1"])
    return out


def options(corpus: TinyCorpus, written: Path | None, *more: str) -> list[str]:
    """The first stage's recipe on the corpus, or on its shards."""
    kind = "daspeech.corpus.SpeechTranslationData" if written is None else "daspeech.shards.ShardedData"
    places = {"common_voice": corpus.common_voice, "cvss": corpus.cvss, "jobs": 1}
    own = places if written is None else {"shards": written}
    data = {**own, "batch_size": 2, "steps_per_epoch": 3, "upsample": 0.25, "min_vertices": 24}
    trainer = {
        "accelerator": "cpu",
        "devices": 1,
        "strategy": "auto",
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
    }
    recipe = ROOT / "recipes/daspeech/phrasebook/units.yaml"
    return [
        "fit",
        f"--config={recipe}",
        f"--data=mmdec.training.{kind}",
        *(f"--data.init_args.{name}={value}" for name, value in data.items()),
        *(f"--trainer.{name}={value}" for name, value in trainer.items()),
        f"--model.init_args.model={json.dumps(tiny_sizes())}",
        *more,
    ]


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["python"])
    return tmp_path


def test_shards_are_read_in_any_order(corpus: TinyCorpus, written: Path) -> None:
    data = SpeechTranslationData(str(corpus.common_voice), str(corpus.cvss), jobs=1)
    data.setup("fit")
    assert data.train_set is not None
    found = Shards(written / "train")
    assert len(list((written / "train").glob("chunk-*.bin"))) > 1
    stored = {pair.name: number for number, pair in enumerate(found.pairs)}
    for index in torch.randperm(len(data.train_set), generator=torch.Generator().manual_seed(0)).tolist():
        item = data.train_set[(index,)]
        row = data.train_set.rows[index]
        number = stored[row.name]
        assert torch.equal(found[number], item.features)
        assert (found.pairs[number].units, found.pairs[number].source_text) == (row.units, row.source_text)


def weights(folder: Path) -> dict[str, Any]:
    return read_checkpoint(folder / "runs/units/checkpoints/last.ckpt")["state_dict"]


def test_a_killed_run_on_shards_ends_as_one_on_the_corpus(
    corpus: TinyCorpus, written: Path, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, broken = workplace / "whole", workplace / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    monkeypatch.chdir(whole)
    four = ("--trainer.max_epochs=4",)
    main(options(corpus, None, *four))
    train_until_killed(options(corpus, written, *four), 8, broken)
    monkeypatch.chdir(broken)
    main(options(corpus, written, *four, "--ckpt_path=last"))
    one, other = weights(whole), weights(broken)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_what_is_wrong_is_told(written: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must hold rows\.jsonl"):
        Shards(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"name": "a"}\n', encoding="utf-8")
    (tmp_path / "index.json").write_bytes((written / "train" / "index.json").read_bytes())
    with pytest.raises(InputError, match="line 1"):
        Shards(tmp_path)
    with pytest.raises(InputError, match="`acoustic` must be false"):
        shards.ShardedData(str(written), acoustic=True)
