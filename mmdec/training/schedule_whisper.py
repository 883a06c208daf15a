"""The small Whisper's part of `make train`: the shipped model, trained on for as long as there is time.

A shipped model is replaced only by one that tells the next token of the development split better, and with it its
heads, which `schedule_heads` then trains on the new model's own text.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from mmdec.training import whisper_export
from mmdec.training.export import newest, read_checkpoint
from mmdec.training.judge import validate
from mmdec.training.schedule import LEAST, Runner, fit_machine, run_recipe, set_run_aside
from mmdec.training.whisper import Shape, WhisperModule
from mmdec.training.window_data import WindowData, data_options
from mmdec.training.windows import SECONDS

RECIPE = Path("recipes/whisper/phrasebook.yaml")
SHIPPED = Path("models/whisper-phrasebook")
CORPUS = Path("data/english")
BUILDER = Path("data/build/english.py")
RUN = Path("runs/whisper")
ROUSED = 3.0  # by this the recipe's rate is divided for weights that have settled


def prepare() -> str:
    """Build the corpus if it is missing (resumable). Returns why there is nothing to train on: "" where there is."""
    if all((CORPUS / split).is_dir() for split in ("train", "train_everyday", "dev")):
        return ""
    missing = [program for program in ("espeak-ng", "flite") if shutil.which(program) is None]
    if missing:
        return f"{CORPUS} is missing, and {' and '.join(missing)} to build it: no Whisper is trained."
    print(f"building {CORPUS} first; this is done once and not counted", flush=True)
    whole = CORPUS.with_name(f"{CORPUS.name}.part")  # renamed when it is whole
    made = CORPUS if CORPUS.exists() else whole  # an older one lacks a split: the builder goes on with it
    done = subprocess.run([sys.executable, str(BUILDER), "--out", str(made)], check=False)
    if done.returncode:
        return f"{BUILDER} failed with {done.returncode}, see above: no Whisper is trained. Run again to go on."
    if made == whole:
        made.rename(CORPUS)
    return ""


def train(seconds: float, runner: Runner, fresh: bool = False) -> Path | None:
    """Train the model for `seconds`, the comparison at the end not counted. Returns its folder: the shipped one's if it
    is better, else one in runs/; None where the time was too short.

    What was cut off is gone on with. `fresh` sets it aside, and begins with random weights.
    """
    if seconds < LEAST:
        print(f"{seconds:.0f} seconds are too short: the small Whisper stays as it is.", flush=True)
        return None
    if fresh:
        set_run_aside(RUN)
    resumed = begin()
    recipe = configuration(time.time() + seconds, seconds, resumed, fresh)
    origin = "from the shipped weights" if recipe["model"]["init_args"]["start"] else "new"
    run_recipe(f"whisper: {seconds / 60:.1f} minutes", recipe, RUN, last() if resumed else None, origin, runner)
    (RUN / "finished").touch()
    return ship(recipe)


def last() -> Path:
    return RUN / "checkpoints" / "last.ckpt"


def begin() -> bool:
    """Whether a run that was cut off can go on; else make way for a new one."""
    if last().is_file() and (RUN / "schedule.yaml").is_file() and not (RUN / "finished").is_file():
        return True
    if RUN.is_dir():
        set_run_aside(RUN)
    return False


def configuration(at: float, seconds: float, resumed: bool, fresh: bool) -> dict[str, Any]:
    """The recipe, fitted to the time and the machine."""
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    trainer, data, model = recipe["trainer"], recipe["data"]["init_args"], recipe["model"]["init_args"]
    if resumed:  # as it was begun; what fits the machine is found anew
        before = yaml.safe_load((RUN / "schedule.yaml").read_text(encoding="utf-8"))
        data |= {name: before["data"]["init_args"][name] for name in ("steps_per_epoch", "tokenizer", "lengths")}
        model |= {name: before["model"]["init_args"][name] for name in ("start", "lr")}
    else:
        # A run can end only where an epoch does: ten of them or so in the time there is, at a second a step.
        steps = min(max(int(seconds / 10), 2), data["steps_per_epoch"])
        known = (SHIPPED / "model.safetensors").is_file() and not fresh
        model["start"] = str(SHIPPED) if known else None
        if known:
            model["lr"] = model["lr"] / ROUSED
            data |= {"tokenizer": str(SHIPPED), "lengths": [[0, SECONDS]]}
        else:
            epochs = data["steps_per_epoch"] / steps
            data["lengths"] = [[round(begin * epochs), length] for begin, length in data["lengths"]]
        data["steps_per_epoch"] = steps
    model["decay_from"] = None
    trainer |= {"max_steps": -1, "max_epochs": 1_000_000}
    deadline = {"class_path": "mmdec.training.callbacks.Deadline", "init_args": {"at": at, "decay": True}}
    trainer["callbacks"].append(deadline)
    fit_machine(recipe, "batch_seconds")
    return recipe


def ship(recipe: dict[str, Any]) -> Path:
    """Put the model in the shipped one's place if it is better."""
    checkpoint = newest(RUN / "checkpoints", 1)
    tokenizer, out = Path(recipe["data"]["init_args"]["tokenizer"]), SHIPPED
    alignment = [list(pair) for pair in read_checkpoint(checkpoint[0])["hyper_parameters"]["guided"]]
    if (SHIPPED / "model.safetensors").is_file():
        old, new = next_token_loss(None, recipe), next_token_loss(checkpoint[0], recipe)
        print(f"loss of the next token on the development split: {old:.3f} shipped, {new:.3f} now")
        out = SHIPPED if new < old else RUN / SHIPPED.name
    made = whisper_export.export(checkpoint, tokenizer, out, alignment)
    print(f"written: {made}" + ("" if out == SHIPPED else f"; {SHIPPED} is as it was"))
    if out == SHIPPED and (made / "README.md").is_file():
        print("Its card gives the numbers of before: python -m mmdec eval asr measures those of now.")
    return made


def next_token_loss(checkpoint: Path | None, recipe: dict[str, Any]) -> float:
    """Of a checkpoint, or of the shipped model; infinite where the shipped one has other tokens."""
    data = WindowData(**data_options(recipe))
    if checkpoint is not None:
        return validate(whisper_export.load_module([checkpoint])[0], data)["dev/next"]
    kept, own = (
        json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        for folder in (SHIPPED, Path(recipe["data"]["init_args"]["tokenizer"]))
    )
    if kept != own:
        return float("inf")
    shape = recipe["model"]["init_args"].get("shape")
    module = WhisperModule(
        **{
            **recipe["model"]["init_args"],
            "units": data.units,
            "start": str(SHIPPED),
            "shape": None if shape is None else Shape(**shape),
        }
    )
    return validate(module, data)["dev/next"]
