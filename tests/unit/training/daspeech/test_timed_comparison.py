"""`make train` with a shipped DASpeech: it is trained further, and compared with what comes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from mmdec.training.corpora.cvss import read_pairs, vocabulary
from mmdec.training.daspeech import timed
from mmdec.training.daspeech.compare import phone_errors
from tests.support.pretended_training import BATCHES, MADE, SHIPPED, STAGES, Checkout, weights
from tests.support.tiny_corpus import read_table, write_table


def test_a_shipped_model_is_trained_on_in_the_joint_stage(checkout: Checkout, monkeypatch: pytest.MonkeyPatch):
    checkout.ship()
    before = (SHIPPED / "model.safetensors").read_bytes()
    monkeypatch.setattr(timed, "phone_errors", lambda model, data: 0.5 if model == SHIPPED else 0.4)
    made = checkout.train(25)
    assert checkout.stages == ["joint"]
    config = checkout.config("joint")
    assert weights(config) == {
        "files": [f"models/daspeech-phrasebook/{name}.safetensors" for name in ("encoder", "model")]
    }
    recipe = yaml.safe_load(Path("recipes/daspeech/phrasebook/joint.yaml").read_text(encoding="utf-8"))
    assert config["model"]["init_args"]["lr"] == pytest.approx(recipe["model"]["init_args"]["lr"] / 3)
    assert (made.folder, made.before, made.after, made.better) == (MADE, 50, 40, True)
    assert (SHIPPED / "model.safetensors").read_bytes() == before
    assert (MADE / "model.safetensors").read_bytes() != before
    known = json.loads((MADE / "provenance.json").read_text(encoding="utf-8"))
    assert known["training"]["step"] == BATCHES
    assert (known["compared"]["before"], known["compared"]["after"]) == (50, 40)

    better = (MADE / "model.safetensors").read_bytes()
    made = checkout.train(25)  # finished: it starts again, from the better one in runs/
    assert [resumed for _, _, resumed in checkout.calls] == [None, None]
    assert weights(checkout.config("joint"))["files"][0] == f"{MADE}/encoder.safetensors"
    assert (made.better, made.folder) == (False, Path("runs/daspeech-phrasebook-not-better"))
    assert (MADE / "model.safetensors").read_bytes() == better


def test_a_joint_stage_that_was_cut_off_goes_on(checkout: Checkout):
    checkout.ship()
    checkout.checkpoint(Path("runs/joint"), "joint", batches=4)
    checkout.train(25)
    assert [resumed for _, _, resumed in checkout.calls] == ["runs/joint/checkpoints/last.ckpt"]


def test_what_is_no_better_is_said_to_be(checkout: Checkout, monkeypatch: pytest.MonkeyPatch):
    checkout.ship()
    before = {path.name: path.read_bytes() for path in SHIPPED.iterdir()}
    monkeypatch.setattr(timed, "phone_errors", lambda model, data: 0.1 if model == SHIPPED else 0.11)
    made = checkout.train(25)
    assert (made.before, made.after, made.better) == (pytest.approx(10), pytest.approx(11), False)
    assert made.folder == MADE
    assert (MADE / "model.safetensors").is_file()
    assert {path.name: path.read_bytes() for path in SHIPPED.iterdir()} == before
    checkout.train(25)
    assert weights(checkout.config("joint"))["files"][0] == f"{SHIPPED}/encoder.safetensors"  # not from the worse one


def test_a_model_of_other_phones_is_left_as_it_is(checkout: Checkout, capsys: pytest.CaptureFixture[str]):
    checkout.ship()
    lines = read_table(checkout.corpus.cvss / "train.alignment.tsv")
    write_table(
        checkout.corpus.cvss / "train.alignment.tsv", [[name, line.replace("hh:", "h:")] for name, line in lines]
    )
    checkout.units = vocabulary(read_pairs(checkout.corpus.common_voice, checkout.corpus.cvss, "train")[0])
    made = checkout.train(60)
    assert checkout.stages == STAGES
    assert (made.folder, made.before) == (MADE, None)
    assert f"The phones of {SHIPPED} differ from those of" in capsys.readouterr().out


def test_directory_and_checkpoint_are_judged_alike(checkout: Checkout):
    checkout.ship()
    data = {"common_voice": str(checkout.corpus.common_voice), "cvss": str(checkout.corpus.cvss), "jobs": 1}
    data |= {"upsample": 0.25, "min_vertices": 24}
    shipped = phone_errors(SHIPPED, data)
    own = phone_errors(Path("scratch/checkpoints/step=7.ckpt"), data)
    assert shipped == pytest.approx(own, abs=0.3)  # half precision
    assert shipped > 0
