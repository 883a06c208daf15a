"""The heads' part of `make train`: the shipped Whisper's heads, trained on for as long as there is time.

They begin as the shipped ones and are drafted, verified and judged on the shipped model, which stays as it is. A folder
of heads is replaced only by one that gives more tokens per round on the development split.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import yaml

from mmdec.medusa import load_heads
from mmdec.training.export import read_checkpoint
from mmdec.training.judge import validate
from mmdec.training.medusa import MedusaModule
from mmdec.training.medusa_data import HeadData
from mmdec.training.own_labels import fingerprint
from mmdec.training.schedule import LEAST, Runner, fit_machine, run_recipe, set_run_aside
from mmdec.training.window_data import data_options
from mmdec.whispers import HEADS, load_whisper

RECIPE = Path("recipes/medusa/phrasebook.yaml")
SHIPPED = Path("models/whisper-phrasebook")
CORPUS = Path("data/english")
RUN = Path("runs/medusa")
SECONDS_A_STEP = 4.0  # of windows that are new, on the processors of the recipe


def ready() -> str:
    """Why there is nothing to train: "" where there is."""
    if not (SHIPPED / "model.safetensors").is_file():
        return f"{SHIPPED} is missing: no heads are trained."
    if not (CORPUS / "train").is_dir() or not (CORPUS / "dev").is_dir():
        return f"{CORPUS} is missing: no heads are trained. Run: python data/build/english.py --out {CORPUS}"
    return ""


def train(seconds: float, runner: Runner, fresh: bool = False) -> Path | None:
    """Train heads for `seconds`, the comparison at the end not counted. Returns their folder: the shipped model's if
    they are better than those there, else that in runs/; None where nothing could be trained.

    What was cut off is gone on with, if it was for this very model. `fresh` sets it aside, and begins with new heads.
    """
    missing = ready()
    if missing or seconds < LEAST:
        print(missing or f"{seconds:.0f} seconds are too short: no heads are trained.", flush=True)
        return None
    if fresh:
        set_run_aside(RUN)
    resumed = begin()
    at = time.time() + seconds
    recipe = configuration(at, seconds, resumed, fresh)
    origin = "from the shipped heads" if recipe["model"]["init_args"]["start"] else "new"
    run_recipe(f"heads: {seconds / 60:.1f} minutes", recipe, RUN, last() if resumed else None, origin, runner)
    (RUN / "finished").touch()
    return ship(recipe)


def last() -> Path:
    return RUN / "checkpoints" / "last.ckpt"


def begin() -> bool:
    """Whether a run that was cut off can go on; else make way for a new one."""
    if last().is_file():
        same = read_checkpoint(last())["base"] == fingerprint(load_whisper(SHIPPED, "cpu").model)
        if same and not (RUN / "finished").is_file():
            return True
        shutil.rmtree(RUN / "checkpoints")
    for left in ("heads", "heads.part", "heads.old"):
        shutil.rmtree(RUN / left, ignore_errors=True)
    (RUN / "finished").unlink(missing_ok=True)
    return False


def configuration(at: float, seconds: float, resumed: bool, fresh: bool) -> dict[str, Any]:
    """The recipe, fitted to the time and the machine."""
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    trainer, data, model = recipe["trainer"], recipe["data"]["init_args"], recipe["model"]["init_args"]
    if resumed:  # epochs of the length, and the learning rate, that it was begun with
        before = yaml.safe_load((RUN / "schedule.yaml").read_text(encoding="utf-8"))
        data |= {name: before["data"]["init_args"][name] for name in ("steps_per_epoch", "repeat_after")}
        model |= {name: before["model"]["init_args"][name] for name in ("start", "kind", "heads")}
    else:
        # A run can end only where an epoch does: ten of them or so in the time there is, at a few seconds a step.
        data["steps_per_epoch"] = min(max(int(seconds / 30), 2), data["steps_per_epoch"])
        shipped = SHIPPED / HEADS
        known = (shipped / "config.json").is_file() and not fresh
        model["start"] = str(shipped) if known else None
        if known:
            shape = json.loads((shipped / "config.json").read_text(encoding="utf-8"))["heads"]
            model |= {"kind": shape["kind"], "heads": shape["heads"]}
        # The windows are read once in the first half of the time; then only the heads have work.
        data["repeat_after"] = max(1, int(seconds / 2 / (SECONDS_A_STEP * data["steps_per_epoch"])))
    model |= {"decay_from": None, "keep_states": model["kind"] == "linear"}
    trainer |= {"max_steps": -1, "max_epochs": 1_000_000, "check_val_every_n_epoch": 1}
    deadline = {"class_path": "mmdec.training.callbacks.Deadline", "init_args": {"at": at, "decay": True}}
    trainer["callbacks"].append(deadline)
    fit_machine(recipe)
    return recipe


def ship(recipe: dict[str, Any]) -> Path:
    """Put the heads in the shipped ones' place if they are better."""
    made, shipped = RUN / "heads", SHIPPED / HEADS
    if shipped.is_dir():
        old, new = (tokens_per_round(folder, recipe) for folder in (shipped, made))
        print(f"tokens per round on the development split: {old:.3f} shipped, {new:.3f} now")
        if new <= old:
            print(f"written: {made}; {shipped} is as it was")
            return made
    fresh, aside = SHIPPED / f".{HEADS}.part", SHIPPED / f".{HEADS}.old"
    for left in (fresh, aside):
        shutil.rmtree(left, ignore_errors=True)
    shutil.copytree(made, fresh)
    if shipped.is_dir():
        shipped.rename(aside)
    fresh.rename(shipped)
    shutil.rmtree(aside, ignore_errors=True)
    print(f"written: {shipped}")
    return shipped


def tokens_per_round(heads: Path, recipe: dict[str, Any]) -> float:
    """Of trees that these heads draft for the recipe's model, on its development split."""
    data = HeadData(**data_options(recipe))
    shape = load_heads(heads, data.whisper.model).heads.config
    model = {**recipe["model"]["init_args"], "kind": shape.kind, "heads": shape.heads, "start": str(heads)}
    module = MedusaModule(**{**model, "weights": "mean"})
    return validate(module, data)["dev/tree"]
