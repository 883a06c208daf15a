"""The small vision-language model's part of `make train`: trains an earlier model further in the time there is.

Models are compared by how many questions of the development split they answer right, the mean of the tasks. What the
patches show is not taught again to a model that was exported: the heads that tell it are not kept with the weights.
"""

from __future__ import annotations

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
from mmdec.training.vlm.data import SceneData
from mmdec.training.vlm.export import export as export_model
from mmdec.training.vlm.export import load_module
from mmdec.training.vlm.module import VlmModule
from mmdec.training.vlm.network import Shape

RECIPE = Path("recipes/vlm/scenes.yaml")
NAME, MODEL = "pictures", "vlm-scenes"
CORPUS = Path("data/scenes")
BUILDER = Path("data/build/scenes.py")
RUN = Path("runs/vlm")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
COMPARISON = 60.0  # seconds reserved for the score at the end, if none was taken before
SETTLED = 3.0  # divides the recipe's learning rate for weights that are trained already
SECONDS_A_STEP = 1.5  # on the processors of the recipe
VISION = 0.15  # of the time, for the phase that teaches the encoder alone, where training begins with random weights
SECONDS_A_VISION_STEP = 0.4


def prepare() -> str:
    """Draw the corpus if it is missing (resumable). Returns why there is nothing to train on: "" where there is."""
    if all((CORPUS / name).is_file() for name in ("train.json", "train.cells.npy", "dev.json")):
        return ""
    print(f"building {CORPUS} first; this is done once and not counted", flush=True)
    code = run_builder(BUILDER, CORPUS)
    if code:
        return f"{BUILDER} failed with {code}, see above: the model of pictures is not trained. Run again to go on."
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
    keep_tokenizer(base if shipped and not fresh else None)
    plain = configuration(time, resumed, fresh)
    stage = TimedStage(
        "pictures",
        1.0,
        RUN,
        f"from {base}" if shipped and not fresh else "from random weights",
        lambda part: configuration(part, resumed, fresh),
        (RUN / "finished").touch,
    )
    score = (lambda: share_right(base, plain)) if shipped else None
    return TimedRun(NAME, score, COMPARISON, [stage], lambda recipe, before: export(recipe, before)).train(time, runner)


def begin() -> bool:
    """Whether a run that was cut off can go on; else make way for a new one."""
    last = RUN / "checkpoints" / "last.ckpt"
    if last.is_file() and (RUN / "schedule.yaml").is_file() and not (RUN / "finished").is_file():
        return True
    if RUN.is_dir():
        set_run_aside(RUN)
    return False


def keep_tokenizer(base: Path | None) -> None:
    """The tokens of the model that is trained further; without one, training learns its own."""
    folder = RUN / "tokenizer"
    if base is None or (folder / "tokenizer.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER:
        if (base / name).is_file():
            shutil.copy(base / name, folder / name)


def configuration(time: Allowance, resumed: bool, fresh: bool) -> dict[str, Any]:
    """The recipe, fitted to the time and the machine."""
    recipe = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))
    trainer, data, model = recipe["trainer"], recipe["data"]["init_args"], recipe["model"]["init_args"]
    data |= {"corpus": str(CORPUS), "tokenizer": str(RUN / "tokenizer")}
    if resumed:  # as the run began; what depends on the machine is set anew
        before = yaml.safe_load((RUN / "schedule.yaml").read_text(encoding="utf-8"))
        data["steps_per_epoch"] = before["data"]["init_args"]["steps_per_epoch"]
        model |= {name: before["model"]["init_args"].get(name) for name in STARTED}
    else:
        base = start_model(MODEL)
        model["start"] = str(base) if (base / "model.safetensors").is_file() and not fresh else None
        model["cell_weight"] = 0.3
        if model["start"] is not None:
            model |= {"lr": model["lr"] / SETTLED, "vision_steps": 0, "cell_weight": 0.0}
        else:
            most = int(time.left * VISION / SECONDS_A_VISION_STEP)
            model["vision_steps"] = max(1, min(model["vision_steps"], most))
        steps = epoch_steps(time.left, SECONDS_A_STEP, 2, data["steps_per_epoch"])
        data["steps_per_epoch"] = steps
        model["warmup"] = min(model["warmup"], steps)
    model["decay_from"] = None
    trainer |= {"max_steps": -1, "max_epochs": 1_000_000}
    trainer["log_every_n_steps"] = min(trainer["log_every_n_steps"], data["steps_per_epoch"])
    set_deadline(recipe, "pictures", time.end, decay=True)
    fit_machine(recipe, "rows")
    return recipe


STARTED = ("start", "lr", "vision_steps", "cell_weight", "warmup")  # a resumed run goes on as it was begun


def export(recipe: dict[str, Any], before: float | None) -> Outcome:
    """Write the model to runs/, with its scores."""
    checkpoint = newest(RUN / "checkpoints", 1)
    after = share_right(checkpoint[0], recipe)
    better = before is None or after > before
    folder = export_model(checkpoint, RUN / "tokenizer", run_folder(MODEL, better))
    steps = read_checkpoint(checkpoint[0])["global_step"]
    return write_outcome(Outcome(NAME, f"{steps} steps", "share right, mean of tasks", before, after, better, folder))


def share_right(model: Path, recipe: dict[str, Any]) -> float:
    """Of the development split's questions, by a checkpoint or a model's folder; the mean of the tasks."""
    data = SceneData(**recipe["data"]["init_args"])
    if not model.is_dir():
        module = load_module([model])[0]
    else:
        options = {**recipe["model"]["init_args"], "units": data.units, "start": str(model), "compiled": False}
        shape = options.get("shape")
        module = VlmModule(**{**options, "shape": None if shape is None else Shape(**shape)})
    module.hparams["vision_steps"] = 0  # a phase that answers nothing
    return validate(module, data)["dev/mean"]
