"""Tests DASpeech's recipes of the first and the joint stage on a tiny corpus: parsed, run, killed and resumed."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import seed_everything

from mmdec.daspeech.acoustic import FastSpeech2
from mmdec.daspeech.model import DASpeech
from mmdec.daspeech.training.data import SpeechTranslationData
from mmdec.daspeech.training.export import load_module, save_weights
from mmdec.daspeech.training.module import DASpeechModule
from mmdec.errors import InputError
from mmdec.training.__main__ import main
from mmdec.training.checkpoints import newest_checkpoints, read_checkpoint
from tests.recipes.kill_callback import ends_killed, training_to_be_killed
from tests.recipes.small_recipes import write_voice
from tests.support.lightning_warnings import LIGHTNING
from tests.support.tiny_corpus import TinyCorpus, write_corpus
from tests.support.tiny_translator import tiny_sizes

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "daspeech"
NAMES = ["phrasebook/units", "phrasebook/joint", "cvss/units", "cvss/joint"]
ONE_PROCESS = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.strategy=auto"]
pytestmark = [
    *LIGHTNING,
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:.*not supported by the model summary"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in a folder of the test: the recipes name folders relative to where they run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["python"])  # which Lightning would read
    return tmp_path


def arguments(name: str, corpus: TinyCorpus, *more: str) -> list[str]:
    """Return a recipe as written, but on the tiny corpus, with a tiny network, in one process."""
    return [
        "fit",
        *(f"--config={RECIPES / recipe}.yaml" for recipe in ("../base", name)),
        *ONE_PROCESS,
        f"--model.init_args.model={json.dumps(tiny_sizes())}",
        f"--data.init_args.common_voice={corpus.common_voice}",
        f"--data.init_args.cvss={corpus.cvss}",
        "--data.init_args.jobs=1",
        "--data.init_args.batch_size=2",
        *more,
    ]


def covers(parsed: Any, written: Any) -> bool:
    """Everything written was read; defaults may come on top."""
    if isinstance(written, dict) and isinstance(parsed, dict):
        if "class_path" not in parsed:  # a dataclass is printed without its name
            written = written.get("init_args", written)
        return all(key in parsed and covers(parsed[key], value) for key, value in written.items())
    return parsed == written


@pytest.mark.parametrize("name", NAMES)
def test_recipes_parse(name: str, workplace: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(["fit", *(f"--config={RECIPES / recipe}.yaml" for recipe in ("../base", name)), "--print_config"])
    assert stop.value.code == 0
    parsed = yaml.safe_load(capsys.readouterr().out)
    base, written = (
        yaml.safe_load((RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8")) for recipe in ("../base", name)
    )
    for part in ("model", "data"):
        assert parsed[part]["class_path"] == written[part]["class_path"]
        for key, value in written[part]["init_args"].items():
            assert covers(parsed[part]["init_args"][key], value), key
    for key in ("devices", "precision", "gradient_clip_val", "check_val_every_n_epoch"):
        assert parsed["trainer"][key] == {**base["trainer"], **written["trainer"]}[key]


@pytest.mark.parametrize("name", ["cvss/units", "cvss/joint"])
def test_the_recipes_at_paper_scale_run(name: str, corpus: TinyCorpus, workplace: Path):
    data = SpeechTranslationData(str(corpus.common_voice), str(corpus.cvss))
    network = DASpeechModule(data.units, size="paper", mu=0.0, model=tiny_sizes()).network
    save_weights(network, workplace / "runs/cvss-units/network.safetensors")
    write_voice(workplace / "runs/cvss-acoustic", data.units)
    cli = main(arguments(name, corpus, "--trainer.fast_dev_run=true"))
    assert isinstance(cli.trainer.callback_metrics["dev/dag_per"].item(), float)
    module = cli.model
    assert isinstance(module, DASpeechModule)
    assert isinstance(module.network, DASpeech) == ("joint" in name)
    assert module.config.dag.positions == "learned"
    assert not module.config.dag.link_prior
    assert not module.config.dag.copy_encoder
    assert module.network.ctc is None


def losses(log: Path, name: str = "metrics.csv") -> dict[int, dict[str, str]]:
    """Return the training losses of each step, digit for digit."""
    with open(log / name, encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["train/loss"]]
    return {
        int(line["step"]): {name: value for name, value in line.items() if name.startswith("train/")} for line in lines
    }


def recipe(corpus: TinyCorpus, epochs: int, *more: str) -> list[str]:
    options = (
        "--data.init_args.steps_per_epoch=3",
        "--data.init_args.concatenate=0.3",
        "--trainer.log_every_n_steps=1",
        "--trainer.check_val_every_n_epoch=2",
        "--model.init_args.warmup=4",
        "--model.init_args.glat_start=0.5",
        f"--trainer.max_epochs={epochs}",
    )
    return arguments("phrasebook/units", corpus, *options, *more)


@pytest.fixture(scope="module")
def first_epoch(corpus: TinyCorpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train one epoch. Returns its folder in runs/."""
    root = tmp_path_factory.mktemp("first")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr(sys, "argv", ["python"])
        main(recipe(corpus, 1))
    return root / "runs"


def test_a_killed_run_resumes_identically(corpus: TinyCorpus, workplace: Path, monkeypatch: pytest.MonkeyPatch):
    unbroken, broken = workplace / "unbroken", workplace / "broken"
    for folder in (unbroken, broken):
        folder.mkdir()
    child = training_to_be_killed(recipe(corpus, 4), 8, broken, broken / "log.txt")
    monkeypatch.chdir(unbroken)
    torch.rand(7)  # another state of the generator than the other process has
    main(recipe(corpus, 4))
    ends_killed(child, broken / "log.txt")
    checkpoints = Path("runs/units/checkpoints")
    assert sorted(path.name for path in (broken / checkpoints).iterdir()) == ["last.ckpt", "step=3.ckpt", "step=6.ckpt"]

    monkeypatch.chdir(broken)
    torch.rand(11)
    main(recipe(corpus, -1, "--trainer.max_steps=9", "--ckpt_path=last"))  # a limit in steps is as good as in epochs
    third = losses(broken / "runs/units/log")
    main(recipe(corpus, 4, "--ckpt_path=last"))  # resumed once more, now from a resumed run's checkpoint
    fourth = losses(broken / "runs/units/log")
    logs = sorted(path.name for path in (broken / "runs/units/log").glob("metrics-*.csv"))
    assert losses(broken / "runs/units/log", logs[-1]) == third  # a resumed run deletes no earlier log
    expected = losses(unbroken / "runs/units/log")
    assert sorted(expected) == list(range(12))
    assert sorted(third) == [6, 7, 8]
    assert sorted(fourth) == [9, 10, 11]
    for step, values in {**third, **fourth}.items():
        assert values == expected[step], step
    one, other = (read_checkpoint(folder / checkpoints / "last.ckpt") for folder in (unbroken, broken))
    assert one["global_step"] == other["global_step"] == 12
    for name, value in one["state_dict"].items():
        assert torch.equal(value, other["state_dict"][name]), name


def test_a_prolonged_run_takes_the_new_schedule(corpus: TinyCorpus, first_epoch: Path, workplace: Path):
    shutil.copytree(first_epoch, "runs")
    cli = main(
        recipe(corpus, 3, "--ckpt_path=last", "--model.init_args.decay_from=3", "--model.init_args.decay_steps=6")
    )
    assert cli.trainer.global_step == 9
    assert cli.trainer.optimizers[0].param_groups[0]["lr"] == 0.0


def test_the_stages_follow_one_another(corpus: TinyCorpus, first_epoch: Path, workplace: Path):
    """Speech to phones, its export, the joint stage on its weights and a voice's, its export."""
    shutil.copytree(first_epoch, "runs")
    units, step = load_module(newest_checkpoints(Path("runs/units/checkpoints"), 1))
    assert step == 3
    save_weights(units.network, Path("runs/units/network.safetensors"))
    write_voice(Path("runs/acoustic"), units.hparams["units"])
    args = ("--data.init_args.steps_per_epoch=2", "--trainer.max_steps=4", "--model.init_args.decay_steps=4")
    cli = main(arguments("phrasebook/joint", corpus, *args))
    assert cli.trainer.optimizers[0].param_groups[0]["lr"] == 0.0
    joint, step = load_module(newest_checkpoints(Path("runs/joint/checkpoints"), 2))
    assert step == 4
    assert isinstance(joint.network, DASpeech)
    assert isinstance(joint.network.tts, FastSpeech2)
    first = units.network.encoder.linear.weight
    assert (joint.network.encoder.linear.weight - first).abs().max() < 0.05  # it began where the first stage ended


def test_the_joint_stage_names_what_is_missing(corpus: TinyCorpus, workplace: Path):
    with pytest.raises(InputError, match="Train it first"):
        main(arguments("phrasebook/joint", corpus, "--trainer.fast_dev_run=true"))


def test_two_ranks_share_the_epoch_that_one_would_see(corpus: TinyCorpus):
    def rows(rank: int, world: int, batch_size: int, epoch: int) -> list[list[tuple[int, ...]]]:
        options = {"batch_size": batch_size, "steps_per_epoch": 3, "concatenate": 0.3, "jobs": 1, "seed": 5}
        data = SpeechTranslationData(str(corpus.common_voice), str(corpus.cvss), **options)
        data.setup("fit")
        data.trainer = SimpleNamespace(current_epoch=epoch, global_rank=rank, world_size=world)  # type: ignore[assignment]
        return [batch.rows for batch in data.train_dataloader()]

    for epoch in range(2):
        ranks = [rows(rank, 2, 2, epoch) for rank in range(2)]
        together = sorted(item for rank in ranks for batch in rank for item in batch)
        assert len(ranks[0]) == len(ranks[1]) == 3
        assert together == sorted(item for batch in rows(0, 1, 4, epoch) for item in batch)
    assert rows(0, 2, 2, 0) != rows(0, 2, 2, 1)


def test_data_for_another_size_of_graph_is_refused(corpus: TinyCorpus, workplace: Path):
    for wrong in ("--data.init_args.upsample=0.5", "--data.init_args.min_vertices=2"):
        with pytest.raises(InputError, match=r"of the data must be the model's, (0\.25|24), but is"):
            main(arguments("phrasebook/units", corpus, wrong, "--trainer.fast_dev_run=true"))


def test_the_random_numbers_of_a_step_do_not_depend_on_what_came_before():
    module = DASpeechModule(["<s>", "<pad>", "</s>", "<unk>"], size="small", model=tiny_sizes(), seed=3)
    drawn = []
    for other in (1, 2):
        seed_everything(other, verbose=False)
        module.on_train_batch_start(SimpleNamespace(), 4)  # type: ignore[arg-type]
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)
    module.on_train_batch_start(SimpleNamespace(), 5)  # type: ignore[arg-type]
    assert not torch.equal(drawn[0], torch.rand(3))
