"""The drafter's part of `make train`: trains the small vision-language model's drafter further in the time there is.

The model is a better one of an earlier run, or the shipped one; its weights do not change. A drafter that gives more
tokens per round on the development split is put beside it in runs/.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from mmdec.hub.publish import CARD, whole_folder
from mmdec.training.checkpoints import last_checkpoint, read_checkpoint
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
from mmdec.training.vlm_drafters.eagle import EagleModule
from mmdec.training.vlm_drafters.regenerate import draft_data

SYSTEM = "eagle"
RECIPE = Path(f"recipes/vlm_drafters/scenes/{SYSTEM}.yaml")
NAME, MODEL = "drafter that sees", "vlm-scenes"
CORPUS = Path("data/scenes")
RUN = Path(f"runs/vlm_drafters/{SYSTEM}")
COMPARISON = 40.0  # seconds reserved for the score at the end, if none was taken before
SECONDS_A_STEP = 0.6  # on the processor of the recipe, the target's answers and features not counted


def missing() -> str:
    """Why there is nothing to train: "" where there is."""
    base = start_model(MODEL)
    if not (base / "model.safetensors").is_file():
        return f"{base} is missing: no drafter is trained."
    if not (CORPUS / "train.json").is_file() or not (CORPUS / "dev.json").is_file():
        return f"{CORPUS} is missing: no drafter is trained. Run: python data/build/scenes.py --out {CORPUS}"
    return ""


def train(time: Allowance, runner: Runner, fresh: bool = False) -> Outcome:
    """Train a drafter until `time`, both scores included, and put it beside its model in runs/ if it is better.

    A run that was cut off is resumed, if it was for this very model. `fresh` renames it, and begins with new weights.
    """
    if fresh:
        set_run_aside(RUN)
    base, resumed = start_model(MODEL), begin()
    shipped = base / SYSTEM
    has_drafter = (shipped / "config.json").is_file()
    plain = configuration(time, resumed, fresh)
    stage = TimedStage(
        "drafter",
        1.0,
        RUN,
        f"from {shipped}" if has_drafter and not fresh else "from a new network",
        lambda part: configuration(part, resumed, fresh),
        (RUN / "finished").touch,
    )
    score = (lambda: tokens_per_round(shipped, plain)) if has_drafter else None
    return TimedRun(NAME, score, COMPARISON, [stage], lambda recipe, before: export(base, recipe, before)).train(
        time, runner
    )


def begin() -> bool:
    """Whether a run that was cut off can go on; else make way for a new one."""
    last = RUN / "checkpoints" / "last.ckpt"
    found = last_checkpoint([last.parent])
    if found is not None:
        base = draft_data(yaml.safe_load(RECIPE.read_text(encoding="utf-8")), base=str(start_model(MODEL)))
        if read_checkpoint(found)["base"] == base.teacher.name and not (RUN / "finished").is_file():
            return True
        shutil.rmtree(RUN / "checkpoints")
    for name in ("drafter", "drafter.part", "drafter.old"):
        shutil.rmtree(RUN / name, ignore_errors=True)
    (RUN / "finished").unlink(missing_ok=True)
    return False


def configuration(time: Allowance, resumed: bool, fresh: bool) -> dict[str, Any]:
    """The recipe, fitted to the time and the machine."""
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    trainer, data, model = recipe["trainer"], recipe["data"]["init_args"], recipe["model"]["init_args"]
    base, seconds = start_model(MODEL), time.left
    data |= {"base": str(base), "corpus": str(CORPUS)}
    if resumed:  # epochs of the length, and the samples, that it was begun with
        before = yaml.safe_load((RUN / "schedule.yaml").read_text(encoding="utf-8"))
        data |= {name: before["data"]["init_args"][name] for name in ("steps_per_epoch", "samples")}
        model |= {name: before["model"]["init_args"].get(name) for name in ("start", "network")}
    else:
        # A third of the time is for the target's answers and features: some six samples a second.
        data["samples"] = max(32, min(data["samples"], int(seconds / 3 * 6)))
        data["steps_per_epoch"] = epoch_steps(seconds / 2, SECONDS_A_STEP, 2, data["steps_per_epoch"])
        shipped = base / SYSTEM
        model["start"] = str(shipped) if (shipped / "config.json").is_file() and not fresh else None
    model |= {"decay_from": None, "warmup": min(model["warmup"], data["steps_per_epoch"])}
    trainer |= {"max_steps": -1, "max_epochs": 1_000_000, "check_val_every_n_epoch": 2}
    trainer["log_every_n_steps"] = min(trainer["log_every_n_steps"], data["steps_per_epoch"])
    set_deadline(recipe, "drafter", time.end, decay=True)
    fit_machine(recipe)
    return recipe


def export(base: Path, recipe: dict[str, Any], before: float | None) -> Outcome:
    """Put a better drafter beside its model, in runs/."""
    drafter = RUN / "drafter"
    after = tokens_per_round(drafter, recipe)
    better = before is None or after > before
    steps = json.loads((drafter / "provenance.json").read_text(encoding="utf-8"))["training"]["step"]
    outcome = Outcome(NAME, f"best at step {steps}", "tokens per round", before, after, better, drafter)
    if not better:
        return outcome
    with whole_folder(RUNS / MODEL) as fresh:
        shutil.copytree(base, fresh, dirs_exist_ok=True, ignore=shutil.ignore_patterns(CARD, SYSTEM))
        shutil.copytree(drafter, fresh / SYSTEM)
    return write_outcome(replace(outcome, folder=RUNS / MODEL))


def tokens_per_round(drafter: Path, recipe: dict[str, Any]) -> float:
    """Of chains that this drafter drafts for the recipe's model, on its development split."""
    data = draft_data(recipe)
    model = {**recipe["model"]["init_args"], "start": str(drafter), "decoded": 0}
    return validate(EagleModule(**model), data)["dev/chain"]
