"""DASpeech's part of `make train`: resumes the runs in runs/, or trains an earlier model further.

There are four stages: speech to phones, voice, vocoder, and the joint stage, whose learning rate falls to zero as the
time ends. Runs in runs/ are resumed. If there are none but there is a model, all the time goes to the joint stage,
which starts from its weights and trains everything but the vocoder.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mmdec.checks.errors import InputError, MmdecError
from mmdec.training.checkpoints import last_checkpoint, newest, read_checkpoint
from mmdec.training.corpora.cvss import read_pairs, vocabulary
from mmdec.training.daspeech.affordable import affordable_rows
from mmdec.training.daspeech.compare import phone_errors
from mmdec.training.daspeech.export import assemble, load_module, save_network
from mmdec.training.timed_run import (
    RUNS,
    Allowance,
    Outcome,
    Runner,
    TimedRun,
    TimedStage,
    epoch_steps,
    fit_machine,
    numbered,
    run_builder,
    run_folder,
    set_deadline,
    start_model,
    write_outcome,
)

NAME, MODEL = "speech translation", "daspeech-phrasebook"
RECIPES = Path("recipes/daspeech/phrasebook")
CORPUS = Path("data/corpus")
BUILDER = Path("data/build/phrasebook.py")
PREPARED = 0.25  # share of the time for the corpus's features, if they are missing
COMPARISON = 20.0  # seconds reserved for the scores at the end, if none were taken before


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


def train(time: Allowance, runner: Runner, fresh: bool = False) -> Outcome:
    """Run the stages until `time`, export the model to runs/ and compare it with the one that it began from.

    `fresh` trains from random weights: the runs in runs/ are renamed, and no earlier weights are used.
    """
    data = read_recipe(JOINT)["data"]["init_args"]
    if fresh:
        set_aside()
    earlier = known_model()
    start = None if fresh or UNITS.last.is_file() else earlier
    stages = [JOINT] if start else unfinished()
    limit = affordable_rows(data, time.part(PREPARED), acoustic=True)
    if limit is not None:
        print(f"features of {limit} training rows are computed first: there is no time for more", flush=True)
    return TimedRun(
        NAME,
        (lambda: phone_errors(earlier, data)) if earlier else None,
        COMPARISON,
        [timed(stage, start, limit) for stage in stages],
        lambda _, before: export(before, data, stages),
    ).train(time, runner)


def timed(stage: Stage, start: Path | None, limit: int | None) -> TimedStage:
    """start: the model that the joint stage begins from. limit: training rows whose features there is time for."""

    def configure(time: Allowance) -> dict[str, Any]:
        if stage is JOINT:
            begin_joint(start)
        recipe = configuration(stage, time, start)
        if limit is not None:
            recipe["data"]["init_args"]["limit"] = min(limit, recipe["data"]["init_args"].get("limit") or limit)
        return recipe

    def finish() -> None:
        if stage is JOINT:
            (stage.folder / "finished").touch()
        if stage is UNITS:
            save_network(load_module(newest(stage.folder / "checkpoints", 1))[0].network, units_network())

    origin = f"from {start}" if start else "from random weights"
    return TimedStage(stage.name, stage.share, stage.folder, origin, configure, finish)


def units_network() -> Path:
    return UNITS.folder / "network.safetensors"


def known_model() -> Path | None:
    """The model to compare with: a better one of an earlier run, or the shipped one. None if its phones are not those
    of the corpus."""
    folder = start_model(MODEL)
    if not (folder / "model.safetensors").is_file():
        return None
    rows, _ = read_pairs(CORPUS / "cv" / "fr", CORPUS / "cvss_c", "train")
    if json.loads((folder / "units.json").read_text(encoding="utf-8")) != vocabulary(rows):
        print(f"The phones of {folder} differ from those of {CORPUS}: training begins from random weights.", flush=True)
        return None
    return folder


def unfinished() -> list[Stage]:
    """The stages to run: voice and vocoder only until their recipe's number of steps is done."""
    stages = [UNITS]
    for stage in (ACOUSTIC, VOCODER):
        result = (stage.folder / stage.result).is_file()
        found = last_checkpoint([stage.last.parent]) if result else None
        if not result or (found is not None and batches_done(found) < total_batches(read_recipe(stage))):
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


def configuration(stage: Stage, time: Allowance, start: Path | None) -> dict[str, Any]:
    """A stage's recipe, fitted to the time and the machine."""
    recipe = read_recipe(stage)
    total = total_batches(recipe)
    trainer, data, model = recipe["trainer"], recipe["data"]["init_args"], recipe["model"]["init_args"]
    written = data["steps_per_epoch"]
    steps = epoch_steps(time.left, 1.0, 2, written)
    if stage.last.is_file():  # schedules count in epochs: a run that goes on keeps its own
        steps = steps_before(stage, written)
    data["steps_per_epoch"] = steps
    trainer["check_val_every_n_epoch"] = max(1, trainer["check_val_every_n_epoch"] * written // steps)
    deadline: dict[str, Any] = {}
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
    trainer["log_every_n_steps"] = min(trainer["log_every_n_steps"], steps)
    set_deadline(recipe, stage.name, time.end, **deadline)
    fit_machine(recipe)
    return recipe


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


def export(before: float | None, data: dict[str, Any], stages: list[Stage]) -> Outcome:
    """Assemble the model in runs/, with its scores."""
    checkpoint = newest(JOINT.folder / "checkpoints", 1)
    after = phone_errors(checkpoint[0], data)
    better = before is None or after < before
    vocoder = vocoder_folder()
    out = run_folder(MODEL, better)
    folder = assemble(checkpoint, vocoder, CORPUS / "cv" / "fr", CORPUS / "cvss_c", CORPUS / "lexicon.tsv", out)
    steps = read_checkpoint(checkpoint[0])["global_step"]
    trained = f"{', '.join(stage.name for stage in stages)}; {steps} joint steps"
    return write_outcome(Outcome(NAME, trained, "phone errors, %", percent(before), percent(after), better, folder))


def percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def vocoder_folder() -> Path:
    """The vocoder trained here, or the shipped one in the same form."""
    if (VOCODER.folder / VOCODER.result).is_file():
        return VOCODER.folder
    shipped = start_model(MODEL)
    if not (shipped / "vocoder.safetensors").is_file():
        raise InputError(f"`{VOCODER.folder}` must hold a vocoder, but does not. Train with --fresh.")
    folder = RUNS / "shipped"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(shipped / "vocoder.safetensors", folder)
    described = json.loads((shipped / "config.json").read_text(encoding="utf-8"))["vocoder"]
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


def missing() -> str:
    """Build the corpus if it is missing. There is always something to train."""
    prepare_corpus()
    return ""


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
    code = run_builder(BUILDER, CORPUS)
    if not finished.is_file():
        raise MmdecError(f"`{BUILDER} --out {CORPUS}` failed with {code}. See above; run again to go on.")
    if code:
        print("The recordings named above failed; training goes on without them.", flush=True)
