"""Tests DASpeech in `make train`: the stages that run, their starting weights and times, with a runner that does not
train."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from mmdec.training.corpora.cvss import read_pairs, vocabulary
from mmdec.training.daspeech import timed
from mmdec.training.daspeech.compare import phone_errors
from mmdec.training.timed_run import EXPORT, Allowance
from mmdec.types import InputError, MmdecError
from tests.support.pretended_training import BATCHES, MADE, SHIPPED, STAGES, Checkout, module, weights
from tests.support.tiny_corpus import read_table, write_table

RESERVE = timed.COMPARISON + EXPORT  # seconds


def test_from_nothing_all_stages_share_the_time(checkout: Checkout):
    made = checkout.train(100)
    assert (made.folder, made.better, made.before) == (MADE, True, None)
    assert (MADE / "model.safetensors").is_file()
    assert not SHIPPED.exists()  # that is for `mmdec promote`
    assert checkout.stages == STAGES
    assert [resumed for _, _, resumed in checkout.calls] == [None] * 4
    ends = [checkout.deadline(config)["at"] - 1000 for _, config, _ in checkout.calls]
    assert ends == pytest.approx([share * (6000 - RESERVE) for share in (0.55, 0.63, 0.75, 1.0)])
    assert weights(checkout.config("joint"))["files"] == ["runs/units/network.safetensors"]
    assert set(load_file("runs/units/network.safetensors")) == set(module(checkout.units, 0.0).network.state_dict())


def test_the_configurations_fit_the_time(checkout: Checkout):
    checkout.train(25)
    units, acoustic, vocoder, joint = (checkout.config(stage) for stage in STAGES)
    for config in (units, joint):
        assert config["trainer"]["max_steps"] == -1
        assert config["trainer"]["max_epochs"] > 1000
    assert "decay" not in checkout.deadline(units)
    for config in (units, acoustic, vocoder, joint):
        kept = next(c for c in config["trainer"]["callbacks"] if c["class_path"].endswith("ModelCheckpoint"))[
            "init_args"
        ]
        assert (kept["every_n_epochs"], kept["save_on_train_epoch_end"]) == (1, True)
    assert checkout.deadline(joint)["decay"]
    assert joint["model"]["init_args"]["decay_from"] is None
    assert units["data"]["init_args"]["steps_per_epoch"] == int((1500 - RESERVE) * 0.055)  # ten epochs, a second a step
    assert acoustic["data"]["init_args"]["steps_per_epoch"] == 11
    recipe = yaml.safe_load(Path("recipes/daspeech/phrasebook/acoustic.yaml").read_text(encoding="utf-8"))
    for config in (acoustic, vocoder):
        assert checkout.deadline(config)["epochs"] == config["trainer"]["max_epochs"]
    assert acoustic["trainer"]["max_epochs"] == -(-recipe["trainer"]["max_steps"] // 11)


def test_what_has_begun_goes_on(checkout: Checkout):
    checkout.train(100)
    first = {stage: config["data"]["init_args"]["steps_per_epoch"] for stage, config, _ in checkout.calls}
    checkout.calls.clear()
    shutil.rmtree(MADE)
    checkout.now = 0.0
    checkout.train(3)
    assert checkout.stages == STAGES  # voice and vocoder had ten steps of their thousands
    resumed = {stage: checkpoint for stage, _, checkpoint in checkout.calls}
    for stage in STAGES[:3]:
        assert resumed[stage] == f"runs/{stage}/checkpoints/last.ckpt"
        steps = checkout.config(stage)["data"]["init_args"]["steps_per_epoch"]
        assert steps == first[stage] > 20  # as before, though time is short
    assert resumed["joint"] is None
    assert weights(checkout.config("joint"))["files"] == [
        "runs/joint/before.safetensors",
        "runs/units/network.safetensors",
    ]
    assert any(name.startswith("tts.") for name in load_file("runs/joint/before.safetensors"))


def test_a_finished_voice_is_left_alone(checkout: Checkout):
    for stage in STAGES[:3]:
        checkout.checkpoint(Path("runs") / stage, stage, batches=10**6)
    checkout.vocoder(Path("runs/vocoder"))
    save_file({"x": torch.zeros(1)}, Path("runs/acoustic/tts.safetensors"))
    checkout.train(10)
    assert checkout.stages == ["units", "joint"]
    shares = [checkout.deadline(config)["at"] - 1000 for _, config, _ in checkout.calls]
    assert shares == pytest.approx([(600 - RESERVE) * 0.55 / 0.8, 600 - RESERVE])


def test_the_time_of_the_comparison_is_kept_back(checkout: Checkout, monkeypatch: pytest.MonkeyPatch):
    """Both models are measured within the time: as long as the first one took is kept for the second."""
    checkout.ship()

    def slow(model: Path, data: object) -> float:
        checkout.now += 100
        return 0.5

    monkeypatch.setattr(timed, "phone_errors", slow)
    begun = checkout.now
    checkout.train(25)
    assert checkout.deadline(checkout.config("joint"))["at"] - begun == pytest.approx(1500 - 120 - EXPORT)
    assert checkout.now - begun <= 1500


def test_features_that_are_not_there_are_computed_for_some(checkout: Checkout, monkeypatch: pytest.MonkeyPatch):
    asked: list[float] = []

    def few(data: object, time: Allowance, acoustic: bool) -> int:
        asked.append(time.left)
        return 8

    monkeypatch.setattr(timed, "affordable_rows", few)
    checkout.train(10)
    assert asked == [pytest.approx(150)]  # a quarter of the time
    assert [checkout.config(stage)["data"]["init_args"].get("limit") for stage in STAGES] == [8, 8, 8, 8]


def test_fresh_means_from_random_weights_and_keeps_the_old(checkout: Checkout):
    checkout.ship()
    for stage in STAGES:
        checkout.checkpoint(Path("runs") / stage, stage)
    made = checkout.train(60, fresh=True)
    assert checkout.stages == STAGES
    assert [resumed for _, _, resumed in checkout.calls] == [None] * 4
    assert sorted(path.name for path in Path("runs/before-1").iterdir()) == sorted(STAGES)
    assert (made.before, made.better) == (50, False)  # compared all the same
    checkout.train(60, fresh=True)
    assert Path("runs/before-2/joint/checkpoints/last.ckpt").is_file()


def test_too_short_a_time_says_what_is_missing(checkout: Checkout):
    def slow(name: str, *arguments: str) -> None:
        checkout.runner(name, *arguments)
        checkout.now += 300

    checkout.ship()
    before = (SHIPPED / "model.safetensors").read_bytes()
    made = checkout.train(3, fresh=True, runner=slow)
    assert (made.folder, made.after) == (None, None)
    assert checkout.stages == ["units"]
    assert (SHIPPED / "model.safetensors").read_bytes() == before
    assert "too short to train acoustic, vocoder, joint;" in made.trained


def test_a_gpu_takes_the_place_of_both_processes(checkout: Checkout, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    checkout.train(25)
    recipe = yaml.safe_load(Path("recipes/daspeech/phrasebook/units.yaml").read_text(encoding="utf-8"))
    for stage in STAGES:
        trainer = checkout.config(stage)["trainer"]
        assert (trainer["accelerator"], trainer["devices"], trainer["strategy"]) == ("gpu", 1, "auto")
    both = recipe["trainer"]["devices"] * recipe["data"]["init_args"]["batch_size"]
    assert checkout.config("units")["data"]["init_args"]["batch_size"] == both


def test_one_core_runs_one_process(checkout: Checkout, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    checkout.train(25)
    trainer = checkout.config("units")["trainer"]
    assert (trainer["accelerator"], trainer["devices"]) == ("cpu", 1)


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


def test_without_corpus_and_synthesisers_it_says_what_to_install(checkout: Checkout, monkeypatch: pytest.MonkeyPatch):
    checkout.corpus.lexicon.unlink()  # the tables are there, but the corpus is not finished
    monkeypatch.setenv("PATH", "")
    with pytest.raises(InputError, match="espeak-ng and flite"):
        timed.missing()


def test_a_corpus_without_its_lexicon_is_built_to_its_end(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    lexicon = checkout.corpus.lexicon.read_text(encoding="utf-8")
    calls: list[list[str]] = []

    def build(finishes: bool, code: int) -> Callable[..., SimpleNamespace]:
        def built(command: list[str], env: dict[str, str], check: bool) -> SimpleNamespace:
            assert env["MMDEC_PARENT"] == str(os.getpid())  # it ends with this process
            calls.append(command)
            if finishes:
                checkout.corpus.lexicon.write_text(lexicon, encoding="utf-8")
            return SimpleNamespace(returncode=code)

        return built

    monkeypatch.setattr("shutil.which", lambda program: program)
    timed.missing()
    assert not calls  # finished
    checkout.corpus.lexicon.unlink()
    monkeypatch.setattr("subprocess.run", build(finishes=False, code=1))
    with pytest.raises(MmdecError, match=r"phrasebook\.py --out .* failed with 1"):
        timed.missing()
    monkeypatch.setattr("subprocess.run", build(finishes=True, code=1))  # single recordings failed
    timed.missing()
    assert "training goes on without them" in capsys.readouterr().out
    assert [command[1:] for command in calls] == 2 * [["data/build/phrasebook.py", "--out", "data/corpus"]]
