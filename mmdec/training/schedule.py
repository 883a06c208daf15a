"""`make train MINUTES=25`: trains, or goes on training, every shipped model by priority within the time given.

DASpeech has four stages: speech to phones, voice, vocoder, and the joint stage, whose learning rate falls to zero as
the time ends. What has begun in runs/ is gone on with. Where nothing has begun but a model is shipped, all the time
goes to the joint stage, which starts from the shipped weights and trains everything but the vocoder. A shipped model is
replaced only by one that makes no more errors on the development split.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from mmdec.training.export import assemble, load_module, newest, read_checkpoint, save_network
from mmdec.training.judge import phone_errors
from mmdec.training.layout import read_rows, vocabulary
from mmdec.types import InputError, MmdecError

RECIPES = Path("recipes/daspeech/phrasebook")
RUNS = Path("runs")
CORPUS = Path("data/corpus")
BUILDER = Path("data/build/phrasebook.py")
SHIPPED = Path("models/daspeech-phrasebook")
LEAST = 20.0  # seconds, below which a stage is not begun

Runner = Callable[..., None]


@dataclass(frozen=True)
class Stage:
    """One recipe and its share of the time."""

    name: str
    share: float
    result: str = ""  # what a finished run leaves in its folder

    @property
    def folder(self) -> Path:
        return RUNS / self.name

    @property
    def last(self) -> Path:
        return self.folder / "checkpoints" / "last.ckpt"


UNITS = Stage("units", 0.55)
ACOUSTIC = Stage("acoustic", 0.08, "tts.safetensors")
VOCODER = Stage("vocoder", 0.12, "vocoder.safetensors")
JOINT = Stage("joint", 0.25)


def main(minutes: float, fresh: bool = False, runner: Runner | None = None) -> Path | None:
    """Build the corpus if it is missing (its time is not counted), run the stages, export the model.

    `fresh` trains from random weights: what is in runs/ is set aside, the shipped weights are not looked at. Returns
    the directory of the new model, or None where the time was too short to finish one.
    """
    if not minutes > 0:
        raise InputError(f"`minutes` must be positive, but is {minutes}. Try 25.")
    runner = runner or run
    check_checkout()
    prepare_corpus()
    if fresh:
        set_aside()
    reserve = min(60.0, 6 * minutes)  # for the export and the comparison
    end = time.time() + 60 * minutes - reserve
    shipped = shipped_model()
    start = None if fresh or UNITS.last.is_file() else shipped
    stages = [JOINT] if start else unfinished()
    for number, stage in enumerate(stages):
        now = time.time()
        seconds = (end - now) * stage.share / sum(other.share for other in stages[number:])
        if end - now < LEAST:
            names = ", ".join(other.name for other in stages[number:])
            print(f"{minutes:g} minutes were too short: not trained were {names}. What was trained is kept in {RUNS}/;")
            print(f"{SHIPPED} is as it was. Run again to go on, or give more minutes.")
            return None
        if stage is JOINT:
            begin_joint(start)
        run_stage(stage, now + seconds, seconds, runner, start)
        if stage is UNITS:
            save_network(load_module(newest(stage.folder / "checkpoints", 1))[0].network, units_network())
    return export(shipped)


def units_network() -> Path:
    return UNITS.folder / "network.safetensors"


def shipped_model() -> Path | None:
    """The shipped model, if there is one whose phones are those of the corpus."""
    if not (SHIPPED / "model.safetensors").is_file():
        return None
    rows, _ = read_rows(CORPUS / "cv" / "fr", CORPUS / "cvss_c", "train")
    if json.loads((SHIPPED / "units.json").read_text(encoding="utf-8")) != vocabulary(rows):
        print(f"{SHIPPED} knows other phones than {CORPUS}: it is left as it is.")
        return None
    return SHIPPED


def unfinished() -> list[Stage]:
    """The stages to run: voice and vocoder only until their recipe's number of steps is done."""
    stages = [UNITS]
    for stage in (ACOUSTIC, VOCODER):
        result = (stage.folder / stage.result).is_file()
        if not result or (stage.last.is_file() and batches_done(stage.last) < total_batches(read_recipe(stage))):
            stages.append(stage)
    return [*stages, JOINT]


def read_recipe(stage: Stage) -> dict[str, Any]:
    return yaml.safe_load((RECIPES / f"{stage.name}.yaml").read_text(encoding="utf-8"))


def total_batches(recipe: dict[str, Any]) -> int:
    """How many steps a recipe takes in all."""
    trainer, steps = recipe["trainer"], recipe["data"]["init_args"]["steps_per_epoch"]
    return trainer["max_steps"] if trainer.get("max_steps", -1) > 0 else trainer["max_epochs"] * steps


def batches_done(checkpoint: Path) -> int:
    """Batches that a checkpoint's run has seen; steps of an optimizer count twice where there are two."""
    return read_checkpoint(checkpoint)["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"]


def configuration(stage: Stage, at: float, seconds: float, start: Path | None) -> dict[str, Any]:
    """A stage's recipe, fitted to the time and the machine."""
    recipe = read_recipe(stage)
    total = total_batches(recipe)
    trainer, data, model = recipe["trainer"], recipe["data"]["init_args"], recipe["model"]["init_args"]
    written = data["steps_per_epoch"]
    # A run can end only where an epoch does: ten of them or so in the time there is, at a second a step.
    steps = min(max(int(seconds / 10), 5), written)
    if stage.last.is_file():  # schedules count in epochs: a run that goes on keeps its own
        steps = steps_before(stage, written)
    data["steps_per_epoch"] = steps
    trainer["check_val_every_n_epoch"] = max(1, trainer["check_val_every_n_epoch"] * written // steps)
    deadline: dict[str, Any] = {"at": at}
    if stage in (ACOUSTIC, VOCODER):
        deadline["epochs"] = trainer["max_epochs"] = -(-total // steps)
        if model.get("adversarial_from") is not None:
            model["adversarial_from"] = model["adversarial_from"] * written // steps
    else:
        trainer["max_steps"], trainer["max_epochs"] = -1, 1_000_000
    if stage is JOINT:
        deadline["decay"] = True
        model["decay_from"] = None
        weights = next(entry for entry in trainer["callbacks"] if entry["class_path"].endswith("InitialWeights"))
        if start is not None:
            weights["init_args"] = {
                "files": [str(start / name) for name in ("encoder.safetensors", "model.safetensors")]
            }
            model["lr"] = model["lr"] / 3  # the weights have settled: a full rate would shake them
        elif (before := JOINT.folder / "before.safetensors").is_file():
            weights["init_args"] = {"files": [str(before), str(units_network())]}
    for entry in trainer["callbacks"]:
        if entry["class_path"].endswith("ModelCheckpoint"):  # only what is saved at an epoch's end goes on rightly
            entry["init_args"] |= {"every_n_epochs": 1, "save_on_train_epoch_end": True}
    trainer["callbacks"].append({"class_path": "mmdec.training.callbacks.Deadline", "init_args": deadline})
    fit_machine(recipe)
    return recipe


def run_recipe(what: str, recipe: dict[str, Any], folder: Path, last: Path | None, origin: str, runner: Runner) -> None:
    """Write a fitted recipe down in its run's folder, say what is done, and run it: from `last`, or from `origin`."""
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / "schedule.yaml"
    written.write_text(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True), encoding="utf-8")
    print(f"{what}, {'resumed' if last else origin}", flush=True)
    runner("mmdec.training", "fit", "--config", str(written), *(("--ckpt_path", str(last)) if last else ()))


def fit_machine(recipe: dict[str, Any], size: str = "batch_size") -> None:
    """One process on a GPU, or where the processors are too few; its batches are then as large as all of them were."""
    trainer, processes = recipe["trainer"], recipe["trainer"]["devices"]
    if torch.cuda.is_available() or (os.cpu_count() or 1) < processes:
        trainer |= {"accelerator": "gpu" if torch.cuda.is_available() else "cpu", "devices": 1, "strategy": "auto"}
        recipe["data"]["init_args"][size] *= processes


def numbered(stem: Path) -> Path:
    """The first of stem-1, stem-2, ... that is free."""
    number = 1
    while (path := stem.with_name(f"{stem.name}-{number}")).exists():
        number += 1
    return path


def set_run_aside(folder: Path) -> None:
    """Rename a run; nothing is thrown away."""
    if not folder.exists():
        return
    aside = numbered(folder.with_name(f"{folder.name}-before"))
    folder.rename(aside)
    print(f"the earlier run is set aside in {aside}")


def steps_before(stage: Stage, written: int) -> int:
    """Steps of an epoch in the run that goes on: as this schedule chose them, or the recipe's."""
    chosen = stage.folder / "schedule.yaml"
    if not chosen.is_file():
        return written
    return yaml.safe_load(chosen.read_text(encoding="utf-8"))["data"]["init_args"]["steps_per_epoch"]


def begin_joint(start: Path | None) -> None:
    """Make way for a new joint stage, which keeps the voice of the last one; on shipped weights one cut off goes on."""
    finished, checkpoints = JOINT.folder / "finished", JOINT.folder / "checkpoints"
    if JOINT.last.is_file() and (start is None or finished.is_file()):
        if start is None:
            save_network(load_module(newest(checkpoints, 1))[0].network, JOINT.folder / "before.safetensors")
        shutil.rmtree(checkpoints)
    finished.unlink(missing_ok=True)


def run_stage(stage: Stage, at: float, seconds: float, runner: Runner, start: Path | None) -> None:
    """One recipe until a time, from its last checkpoint where there is one."""
    last = stage.last if stage.last.is_file() else None
    recipe = configuration(stage, at, seconds, start)
    origin = "from the shipped weights" if start else "from the start"
    run_recipe(f"{stage.name}: {seconds / 60:.1f} minutes", recipe, stage.folder, last, origin, runner)
    if stage is JOINT:
        (stage.folder / "finished").touch()


def export(shipped: Path | None) -> Path:
    """Put the model together: in the shipped one's place if it is no worse, else in runs/."""
    checkpoint = newest(JOINT.folder / "checkpoints", 1)
    data = read_recipe(JOINT)["data"]["init_args"]
    out = SHIPPED
    if SHIPPED.is_dir():
        out = RUNS / SHIPPED.name
        if shipped is not None:
            old, new = phone_errors(shipped, data), phone_errors(checkpoint[0], data)
            print(f"phone errors on the development split: {old:.2%} shipped, {new:.2%} now")
            if new <= old:
                out = SHIPPED
    made = assemble(checkpoint, vocoder_folder(), CORPUS / "cv" / "fr", CORPUS / "cvss_c", CORPUS / "lexicon.tsv", out)
    kept = "" if out == SHIPPED else f"; {SHIPPED} is as it was"
    print(f"written: {made}{kept}")
    if out == SHIPPED and (made / "README.md").is_file():
        print("Its card gives the numbers of before, and says so: python -m mmdec eval speech measures those of now.")
    return made


def vocoder_folder() -> Path:
    """The vocoder trained here, or the shipped one in the same form."""
    if (VOCODER.folder / VOCODER.result).is_file():
        return VOCODER.folder
    if not (SHIPPED / "vocoder.safetensors").is_file():
        raise InputError(f"`{VOCODER.folder}` must hold a vocoder, but does not. Train with --fresh.")
    folder = RUNS / "shipped"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(SHIPPED / "vocoder.safetensors", folder)
    described = json.loads((SHIPPED / "config.json").read_text(encoding="utf-8"))["vocoder"]
    (folder / "vocoder.json").write_text(json.dumps({"config": described}), encoding="utf-8")
    return folder


def set_aside() -> None:
    """Rename the stages' runs; nothing is thrown away."""
    folders = [stage.folder for stage in (UNITS, ACOUSTIC, VOCODER, JOINT) if stage.folder.exists()]
    if not folders:
        return
    aside = numbered(RUNS / "before")
    aside.mkdir()
    for folder in folders:
        folder.rename(aside / folder.name)
    print(f"earlier runs are set aside in {aside}")


def check_checkout() -> None:
    """Recipes, corpus builder and runs lie in a checkout: an installed package has none of them."""
    if not RECIPES.is_dir():
        raise InputError(
            f"`make train` needs a checkout, but '{Path.cwd()}' has no {RECIPES}. Clone the repository, run it there."
        )


def prepare_corpus() -> None:
    """The phrasebook's corpus, begun or gone on with; needs espeak-ng and flite, once."""
    finished = CORPUS / "lexicon.tsv"  # what the builder writes last
    if finished.is_file():
        return
    missing = [program for program in ("espeak-ng", "flite") if shutil.which(program) is None]
    if missing:
        raise InputError(
            f"`{CORPUS}` must be finished, or {' and '.join(missing)} installed to build it, but neither is so: "
            f"'{finished}' does not exist. Install Debian's packages espeak-ng and flite, or copy a whole corpus there."
        )
    print("building the corpus first, or the rest of it; this is done once and not counted", flush=True)
    done = subprocess.run([sys.executable, str(BUILDER), "--out", str(CORPUS)], check=False)
    if not finished.is_file():
        raise MmdecError(f"`{BUILDER} --out {CORPUS}` failed with {done.returncode}. See above; run again to go on.")
    if done.returncode:
        print("The recordings named above failed; training goes on without them.", flush=True)


def run(module: str, *arguments: str) -> None:
    """Another process of this Python."""
    threads = max(1, min(4, (os.cpu_count() or 1) // 2))  # two processes average their gradients
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, "-m", module, *arguments], env=environment, check=False)
    if done.returncode:
        raise MmdecError(f"`python -m {module} {' '.join(arguments)}` failed with {done.returncode}. See above.")
