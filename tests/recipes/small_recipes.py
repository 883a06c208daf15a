"""Runs a training recipe with a small model and data: two epochs in this process, with its files in a test's folder."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mmdec.daspeech.model import DASpeech
from mmdec.daspeech.training.module import DASpeechModule
from mmdec.training.__main__ import main
from mmdec.training.checkpoints import read_checkpoint
from tests.support.lightning_warnings import FITTING
from tests.support.tiny_translator import tiny_sizes

RECIPES = Path(__file__).parents[2] / "recipes"
MARKS = [
    *FITTING,
]


def fit(recipe: str, out: Path, model: Mapping[str, Any], data: Mapping[str, Any], *more: str) -> None:
    """Train by a recipe whose options of model and data are changed; every checkpoint is kept."""
    main(
        [
            "fit",
            *(f"--config={RECIPES / name}.yaml" for name in ("base", recipe)),
            f"--trainer.default_root_dir={out}",
            "--trainer.callbacks.save_top_k=-1",
            "--trainer.max_epochs=2",
            "--trainer.check_val_every_n_epoch=1",
            *(f"--model.init_args.{name}={value}" for name, value in model.items()),
            *(f"--data.init_args.{name}={value}" for name, value in data.items()),
            *more,
        ]
    )


def checkpoint(out: Path, step: int) -> Path:
    """Return the path of the checkpoint that a run in `out` wrote after this step."""
    return out / "checkpoints" / f"step={step}.ckpt"


def check_same_weights(first: Path, second: Path) -> None:
    """Assert that two checkpoints have the same step and equal weights."""
    result = [read_checkpoint(path) for path in (first, second)]
    assert result[0]["global_step"] == result[1]["global_step"]
    one, other = (checkpoint["state_dict"] for checkpoint in result)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def logged(out: Path, name: str) -> list[dict[str, str]]:
    """Read the rows of a run's metrics.csv that have a value of this name."""
    with (out / "log" / "metrics.csv").open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row.get(name)]


def logged_at_each_step(log: Path) -> dict[tuple[int, str], str]:
    """Read all logged values as text: (step, name) -> value. It reads all metrics files, because a resumed run begins a
    new one."""
    result = {}
    for file in sorted(log.glob("metrics*.csv")):
        with open(file, encoding="utf-8", newline="") as lines:
            for line in csv.DictReader(lines):
                result |= {(int(line["step"]), name): value for name, value in line.items() if value and "/" in name}
    return result


def write_voice(folder: Path, units: list[str]) -> None:
    """Write the files of the text-to-speech stage, with random weights and another order of phones."""
    module = DASpeechModule(units, size="small", mu=1.0, model=tiny_sizes())
    assert isinstance(module.network, DASpeech)
    folder.mkdir(parents=True)
    state = {name: value.contiguous() for name, value in module.network.tts.state_dict().items()}
    save_file(state, folder / "tts.safetensors")
    (folder / "tts.json").write_text(json.dumps({"units": [*units[:4], *reversed(units[4:])]}), encoding="utf-8")
