"""The small Whisper's part of `make train`: trains an earlier model further in the time there is.

Models are compared by the loss of the next token on the development split. If the new model is better, its heads, which
were trained with it, are then trained on its own text by `medusa/timed.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from mmdec.training.checkpoints import newest, read_checkpoint
from mmdec.training.timed_run import (
    Allowance,
    Outcome,
    Runner,
    TimedRun,
    TimedStage,
    epoch_steps,
    fit_machine,
    run_builder,
    run_folder,
    set_deadline,
    set_run_aside,
    start_model,
    write_outcome,
)
from mmdec.training.validation import validate
from mmdec.training.whisper import export as whisper_export
from mmdec.training.whisper.module import Shape, WhisperModule
from mmdec.training.whisper.window_data import WindowData, data_options
from mmdec.training.whisper.windows import SECONDS

RECIPE = Path("recipes/whisper/phrasebook.yaml")
NAME, MODEL = "transcription", "whisper-phrasebook"
CORPUS = Path("data/english")
BUILDER = Path("data/build/english.py")
RUN = Path("runs/whisper")
COMPARISON = 20.0  # seconds reserved for the score at the end, if none was taken before
SETTLED = 3.0  # divides the recipe's learning rate for weights that are trained already


def prepare() -> str:
    """Build the corpus if it is missing (resumable). Returns why there is nothing to train on: "" where there is."""
    if all((CORPUS / split).is_dir() for split in ("train", "train_everyday", "dev")):
        return ""
    missing = [program for program in ("espeak-ng", "flite") if shutil.which(program) is None]
    if missing:
        return f"{CORPUS} is missing, and {' and '.join(missing)} to build it: no Whisper is trained."
    print(f"building {CORPUS} first; this is done once and not counted", flush=True)
    whole = CORPUS.with_name(f"{CORPUS.name}.part")  # renamed when it is whole
    folder = CORPUS if CORPUS.exists() else whole  # an older one lacks a split: the builder goes on with it
    code = run_builder(BUILDER, folder)
    if code:
        return f"{BUILDER} failed with {code}, see above: no Whisper is trained. Run again to go on."
    if folder == whole:
        folder.rename(CORPUS)
    return ""


def train(time: Allowance, runner: Runner, fresh: bool = False) -> Outcome:
    """Train the model until `time`, both scores included, and export it to runs/.

    A run that was cut off is resumed. `fresh` renames it, and begins with random weights.
    """
    base = start_model(MODEL)
    if fresh:
        set_run_aside(RUN)
    resumed = begin()
    shipped = (base / "model.safetensors").is_file()
    plain = configuration(time, resumed, fresh)
    stage = TimedStage(
        "whisper",
        1.0,
        RUN,
        f"from {base}" if shipped and not fresh else "from random weights",
        lambda part: configuration(part, resumed, fresh),
        (RUN / "finished").touch,
    )
    score = (lambda: next_token_loss(base, plain)) if shipped else None
    return TimedRun(NAME, score, COMPARISON, [stage], lambda recipe, before: export(recipe, before)).train(time, runner)


def last() -> Path:
    return RUN / "checkpoints" / "last.ckpt"


def begin() -> bool:
    """Whether a run that was cut off can go on; else make way for a new one."""
    if last().is_file() and (RUN / "schedule.yaml").is_file() and not (RUN / "finished").is_file():
        return True
    if RUN.is_dir():
        set_run_aside(RUN)
    return False


def configuration(time: Allowance, resumed: bool, fresh: bool) -> dict[str, Any]:
    """The recipe, fitted to the time and the machine."""
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    trainer, data, model = recipe["trainer"], recipe["data"]["init_args"], recipe["model"]["init_args"]
    if resumed:  # as the run began; what depends on the machine is set anew
        before = yaml.safe_load((RUN / "schedule.yaml").read_text(encoding="utf-8"))
        data |= {name: before["data"]["init_args"][name] for name in ("steps_per_epoch", "tokenizer", "lengths")}
        model |= {name: before["model"]["init_args"][name] for name in ("start", "lr")}
    else:
        steps = epoch_steps(time.left, 1.0, 2, data["steps_per_epoch"])
        start = start_model(MODEL)
        shipped = (start / "model.safetensors").is_file() and not fresh
        model["start"] = str(start) if shipped else None
        if shipped:
            model["lr"] = model["lr"] / SETTLED
            data |= {"tokenizer": str(start), "lengths": [[0, SECONDS]]}
        else:
            epochs = data["steps_per_epoch"] / steps
            data["lengths"] = [[round(begin * epochs), length] for begin, length in data["lengths"]]
        data["steps_per_epoch"] = steps
    model["decay_from"] = None
    trainer |= {"max_steps": -1, "max_epochs": 1_000_000}
    trainer["log_every_n_steps"] = min(trainer["log_every_n_steps"], data["steps_per_epoch"])
    set_deadline(recipe, "whisper", time.end, decay=True)
    fit_machine(recipe, "batch_seconds")
    return recipe


def export(recipe: dict[str, Any], before: float | None) -> Outcome:
    """Write the model to runs/, with its scores."""
    checkpoint = newest(RUN / "checkpoints", 1)
    kept = read_checkpoint(checkpoint[0])
    alignment = [list(pair) for pair in kept["hyper_parameters"]["guided"]]
    after = next_token_loss(checkpoint[0], recipe)
    better = before is None or after < before
    tokenizer = Path(recipe["data"]["init_args"]["tokenizer"])
    folder = whisper_export.export(checkpoint, tokenizer, run_folder(MODEL, better), alignment)
    if before == float("inf"):  # other tokens: nothing to compare
        before = None
    return write_outcome(
        Outcome(NAME, f"{kept['global_step']} steps", "loss of the next token", before, after, better, folder)
    )


def next_token_loss(model: Path, recipe: dict[str, Any]) -> float:
    """Of a checkpoint, or of a model's folder; infinite where that has other tokens than the recipe."""
    data = WindowData(**data_options(recipe))
    if not model.is_dir():
        return validate(whisper_export.load_module([model])[0], data)["dev/next"]
    kept, own = (
        json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        for folder in (model, Path(recipe["data"]["init_args"]["tokenizer"]))
    )
    if kept != own:
        return float("inf")
    shape = recipe["model"]["init_args"].get("shape")
    module = WhisperModule(
        **{
            **recipe["model"]["init_args"],
            "units": data.units,
            "start": str(model),
            "shape": None if shape is None else Shape(**shape),
        }
    )
    return validate(module, data)["dev/next"]
