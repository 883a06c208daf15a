"""Tests the recipes of drafters for vision-language models, on a tiny target and corpus: each system, a killed run, two
processes; and that the drafters do not change the target's text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import mmdec
from mmdec.drafters.networks.training.regenerate import draft_data, import_class
from mmdec.drafters.networks.training.samples import PromptBuilder, Questions, read_samples
from mmdec.drafters.networks.training.teacher import load_teacher_model
from mmdec.training.__main__ import main
from mmdec.training.checkpoints import read_checkpoint
from tests.recipes.kill_callback import train_until_killed
from tests.recipes.small_recipes import logged_at_each_step
from tests.recipes.tiny_squares import write_squares, write_target
from tests.support import grid
from tests.support.lightning_warnings import FITTING

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "vlm_drafters"
SYSTEMS = ("eagle", "msd", "specvlm", "vispec", "flash", "eagle3", "dflash", "heads")
SMALL = {
    "eagle": {"intermediate_size": 16},
    "msd": {"intermediate_size": 16},
    "specvlm": {"intermediate_size": 16, "grid": [2, 2], "pool_ratio": 2, "prune_ratio": 2},
    "vispec": {"intermediate_size": 16},
    "flash": {"intermediate_size": 16, "slots": 3, "latents": 2},
    "eagle3": {"intermediate_size": 16, "draft_vocab_size": 40},
    "dflash": {"intermediate_size": 16, "num_hidden_layers": 2, "block_size": 4},
    "heads": {"kind": "hydra", "heads": 3, "prefix_layer": True},
}
FOLDERS = ("librispeech", "mix665k", "ultrachat")
LARGE = [path for folder in FOLDERS for path in sorted((RECIPES / folder).glob("*.yaml"))]
pytestmark = [
    pytest.mark.slow,
    *FITTING,
    pytest.mark.usefixtures("workplace"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_squares(tmp_path_factory.mktemp("squares"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("models") / "base")


def options(recipe: str, base: Path, corpus: Path, *more: str) -> list[str]:
    """Return a recipe as written, but small and in one process."""
    system = Path(recipe).name
    return [
        "fit",
        f"--config={RECIPES.parent / 'base.yaml'}",
        f"--config={RECIPES / recipe}.yaml",
        "--trainer.accelerator=cpu",
        "--trainer.devices=1",
        "--trainer.strategy=auto",
        "--trainer.precision=32-true",
        "--trainer.log_every_n_steps=1",
        "--trainer.check_val_every_n_epoch=1",
        "--trainer.max_epochs=2",
        f"--model.init_args.network={json.dumps(SMALL[system])}",
        "--model.init_args.warmup=1",
        *(() if system in ("flash", "dflash") else ("--model.init_args.unroll=2", "--model.init_args.unroll_from=3")),
        "--model.init_args.tree_nodes=6",
        "--model.init_args.chain=3",
        "--model.init_args.decoded=2",
        f"--data.init_args.base={base}",
        f"--data.init_args.corpus={corpus}",
        "--data.init_args.samples=12",
        "--data.init_args.dev_samples=4",
        "--data.init_args.batch_size=4",
        "--data.init_args.steps_per_epoch=2",
        "--data.init_args.max_tokens=12",
        "--data.init_args.base_dtype=float32",
        "--data.init_args.workers=0",
        *more,
    ]


def described(base: Path, corpus: Path, drafter: Any) -> list[list[int]]:
    """Tokens of some answers."""
    model, prompting = load_teacher_model(base, torch.float32), PromptBuilder(base)
    samples = read_samples(corpus, "dev", Questions())[:3]
    result = []
    for sample in samples:
        made = mmdec.generate(model.eval(), prompting(sample), drafter=drafter, max_new_tokens=16)
        result.append(made.sequences[0].tolist())
    return result


# "msd" and "eagle" are trained below
@pytest.mark.parametrize("system", grid.sample(SYSTEMS, ("specvlm", "vispec", "flash", "eagle3", "dflash", "heads")))
def test_each_system_trains_and_decodes_without_loss(system: str, base: Path, corpus: Path, workplace: Path) -> None:
    main(options(f"scenes/{system}", base, corpus))
    run = workplace / "runs" / "vlm_drafters" / system
    known = logged_at_each_step(run / "log")
    assert {step for step, name in known if name == "train/loss"} == set(range(4))
    assert {name for _, name in known} >= {"dev/chain", "dev/tree", "dev/decoded", "dev/loss", "train/right"}
    assert all(np.isfinite(float(value)) for value in known.values())
    settings = json.loads((run / "drafter" / "config.json").read_text(encoding="utf-8"))
    assert settings["system"] == system
    assert settings["target"] == base.name
    checkpoint = read_checkpoint(run / "checkpoints" / "last.ckpt")
    assert settings["base"] == checkpoint["base"]
    card = (run / "drafter" / "README.md").read_text(encoding="utf-8")
    assert f"# {system} drafter for {base.name} ({checkpoint['base']})\n" in card
    assert all(name.startswith("network.") for name in checkpoint["state_dict"])  # the target is not in it
    first = described(base, corpus, None)
    assert described(base, corpus, str(run / "drafter")) == first


@pytest.mark.parametrize("head", grid.sample(("vanilla", "gated", "rnn", "dflash2", "domino"), ("rnn", "dflash2")))
def test_the_recipe_of_dflash_trains_its_heads(head: str, base: Path, corpus: Path, workplace: Path) -> None:
    """DSpark, DFlash 2 and Domino: one option more, and the text is the target's."""
    network = {**SMALL["dflash"], "head": head, "head_rank": 8, "head_state": 8, "convolution_group": 4}
    network |= {"confidence": True} if head == "rnn" else {}
    main(options("scenes/dflash", base, corpus, f"--model.init_args.network={json.dumps(network)}"))
    run = workplace / "runs" / "vlm_drafters" / "dflash"
    assert all(np.isfinite(float(value)) for value in logged_at_each_step(run / "log").values())
    settings = json.loads((run / "drafter" / "config.json").read_text(encoding="utf-8"))
    assert (settings["system"], settings["head"], settings["confidence"]) == ("dflash", head, head == "rnn")
    assert described(base, corpus, str(run / "drafter")) == described(base, corpus, None)


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_options_of_large_recipes_exist(path: Path) -> None:
    """Their models are not available here, so only the options are read."""
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert f"fit --config recipes/base.yaml --config {path.relative_to(ROOT)}" in path.read_text(encoding="utf-8")
    module = import_class(recipe["model"]["class_path"])(**recipe["model"]["init_args"])
    assert module.system == path.stem.partition("-")[0]
    assert draft_data(recipe).base == recipe["data"]["init_args"]["base"]
    assert recipe["trainer"]["default_root_dir"] == f"runs/vlm_drafters/{path.stem}"


@pytest.mark.parametrize("system", grid.sample(("msd", "eagle3"), ("msd",)))
def test_a_killed_run_resumes_identically(
    system: str, base: Path, corpus: Path, workplace: Path, monkeypatch: Any
) -> None:
    unbroken, broken = workplace / "unbroken", workplace / "broken"
    unbroken.mkdir()
    broken.mkdir()
    common = ("--trainer.max_epochs=4", "--data.init_args.ramp.epochs=4", "--model.init_args.noise=0.1")
    train_until_killed(options(f"scenes/{system}", base, corpus, *common), 5, broken)
    monkeypatch.chdir(unbroken)
    main(options(f"scenes/{system}", base, corpus, *common))
    monkeypatch.chdir(broken)
    torch.rand(11)
    main(options(f"scenes/{system}", base, corpus, *common, "--ckpt_path=last"))
    expected, result = (logged_at_each_step(place / f"runs/vlm_drafters/{system}/log") for place in (unbroken, broken))
    assert {step for step, name in expected if name == "train/loss"} == set(range(8))
    assert result == expected
    one, other = (
        read_checkpoint(place / f"runs/vlm_drafters/{system}/checkpoints/last.ckpt") for place in (unbroken, broken)
    )
    assert one["global_step"] == other["global_step"] == 8
    for name, value in one["state_dict"].items():
        assert torch.equal(value, other["state_dict"][name]), name


def test_two_processes_train_one_network(base: Path, corpus: Path, workplace: Path) -> None:
    """Over gloo: both see batches of their own, and answer their part of the development split."""
    main(options("scenes/eagle", base, corpus, "--trainer.devices=2", "--trainer.strategy=ddp_fork"))
    run = workplace / "runs" / "vlm_drafters" / "eagle"
    assert read_checkpoint(run / "checkpoints" / "last.ckpt")["global_step"] == 4
    assert {name for _, name in logged_at_each_step(run / "log")} >= {"dev/chain", "dev/decoded"}
    features = next((workplace / "runs/vlm_drafters/cache").glob("features-*/features"))
    assert {path.name for path in features.glob("*.f16")} == {"0.f16", "1.f16"}
