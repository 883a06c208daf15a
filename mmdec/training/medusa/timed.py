"""The heads' part of `make train`: trains a Whisper's heads further in the time there is.

The model is a better one of an earlier run, or the shipped one; its weights do not change. Heads that give more tokens
per round on the development split are put beside it in runs/.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from mmdec.hub.medusa import load_heads
from mmdec.hub.publish import CARD, whole_folder
from mmdec.hub.whisper import HEADS, load_whisper
from mmdec.training.checkpoints import last_checkpoint, read_checkpoint
from mmdec.training.medusa.data import HeadData
from mmdec.training.medusa.module import MedusaModule
from mmdec.training.medusa.self_labels import fingerprint
from mmdec.training.timed_run import (
    RUNS,
    Allowance,
    Outcome,
    Runner,
    TimedRun,
    TimedStage,
    epoch_steps,
    fit_machine,
    set_deadline,
    set_run_aside,
    start_model,
    write_outcome,
)
from mmdec.training.validation import validate
from mmdec.training.whisper.window_data import data_options

RECIPE = Path("recipes/medusa/phrasebook.yaml")
NAME, MODEL = "heads that draft", "whisper-phrasebook"
CORPUS = Path("data/english")
RUN = Path("runs/medusa")
COMPARISON = 30.0  # seconds reserved for the score at the end, if none was taken before
SECONDS_A_STEP = 4.0  # of windows that are new, on the processors of the recipe


def missing() -> str:
    """Why there is nothing to train: "" where there is."""
    base = start_model(MODEL)
    if not (base / "model.safetensors").is_file():
        return f"{base} is missing: no heads are trained."
    if not (CORPUS / "train").is_dir() or not (CORPUS / "dev").is_dir():
        return f"{CORPUS} is missing: no heads are trained. Run: python data/build/english.py --out {CORPUS}"
    return ""


def train(time: Allowance, runner: Runner, fresh: bool = False) -> Outcome:
    """Train heads until `time`, both scores included, and put them beside their model in runs/ if they are better.

    A run that was cut off is resumed, if it was for this very model. `fresh` renames it, and begins with new heads.
    """
    if fresh:
        set_run_aside(RUN)
    base, resumed = start_model(MODEL), begin()
    plain = configuration(time, resumed, fresh)
    start = plain["model"]["init_args"]["start"]
    stage = TimedStage(
        "heads",
        1.0,
        RUN,
        f"from {start}" if start else "from new heads",
        lambda part: configuration(part, resumed, fresh),
        (RUN / "finished").touch,
    )
    score = (lambda: tokens_per_round(base / HEADS, plain)) if (base / HEADS).is_dir() else None
    return TimedRun(NAME, score, COMPARISON, [stage], lambda recipe, before: export(base, recipe, before)).train(
        time, runner
    )


def last() -> Path:
    return RUN / "checkpoints" / "last.ckpt"


def begin() -> bool:
    """Whether a run that was cut off can go on; else make way for a new one."""
    found = last_checkpoint([last().parent])
    if found is not None:
        model = load_whisper(start_model(MODEL), "cpu").model
        same = read_checkpoint(found)["base"] in {fingerprint(model), fingerprint(model, with_path=True)}
        if same and not (RUN / "finished").is_file():
            return True
        shutil.rmtree(RUN / "checkpoints")
    for left in ("heads", "heads.part", "heads.old"):
        shutil.rmtree(RUN / left, ignore_errors=True)
    (RUN / "finished").unlink(missing_ok=True)
    return False


def configuration(time: Allowance, resumed: bool, fresh: bool) -> dict[str, Any]:
    """The recipe, fitted to the time and the machine."""
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    trainer, data, model = recipe["trainer"], recipe["data"]["init_args"], recipe["model"]["init_args"]
    base, seconds = start_model(MODEL), time.left
    data["base"] = str(base)
    if resumed:  # epochs of the length, and the learning rate, that it was begun with
        before = yaml.safe_load((RUN / "schedule.yaml").read_text(encoding="utf-8"))
        data |= {name: before["data"]["init_args"][name] for name in ("steps_per_epoch", "repeat_after")}
        model |= {name: before["model"]["init_args"][name] for name in ("start", "kind", "heads")}
    else:
        data["steps_per_epoch"] = epoch_steps(seconds, 3.0, 2, data["steps_per_epoch"])
        shipped = base / HEADS
        shipped_heads = (shipped / "config.json").is_file() and not fresh
        model["start"] = str(shipped) if shipped_heads else None
        if shipped_heads:
            shape = json.loads((shipped / "config.json").read_text(encoding="utf-8"))["heads"]
            model |= {"kind": shape["kind"], "heads": shape["heads"]}
        # The windows are read once in the first half of the time; then only the heads have work.
        data["repeat_after"] = max(1, int(seconds / 2 / (SECONDS_A_STEP * data["steps_per_epoch"])))
    model |= {"decay_from": None, "keep_states": model["kind"] == "linear"}
    trainer |= {"max_steps": -1, "max_epochs": 1_000_000, "check_val_every_n_epoch": 1}
    trainer["log_every_n_steps"] = min(trainer["log_every_n_steps"], data["steps_per_epoch"])
    set_deadline(recipe, "heads", time.end, decay=True)
    fit_machine(recipe)
    return recipe


def export(base: Path, recipe: dict[str, Any], before: float | None) -> Outcome:
    """Put better heads beside their model, in runs/."""
    heads = RUN / "heads"
    after = tokens_per_round(heads, recipe)
    better = before is None or after > before
    steps = json.loads((heads / "provenance.json").read_text(encoding="utf-8"))["training"]["step"]
    outcome = Outcome(NAME, f"best at step {steps}", "tokens per round", before, after, better, heads)
    if not better:
        return outcome
    with whole_folder(RUNS / MODEL) as fresh:
        shutil.copytree(base, fresh, dirs_exist_ok=True, ignore=shutil.ignore_patterns(CARD, HEADS))
        shutil.copytree(heads, fresh / HEADS)
    return write_outcome(replace(outcome, folder=RUNS / MODEL))


def tokens_per_round(heads: Path, recipe: dict[str, Any]) -> float:
    """Of trees that these heads draft for the recipe's model, on its development split."""
    data = HeadData(**data_options(recipe))
    shape = load_heads(heads, data.whisper.model).heads.config
    model = {**recipe["model"]["init_args"], "kind": shape.kind, "heads": shape.heads, "start": str(heads)}
    module = MedusaModule(**{**model, "weights": "mean"})
    return validate(module, data)["dev/tree"]
