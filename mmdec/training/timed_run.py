"""Training with a time limit, for `make train`: the remaining time, the stages, their processes and results.

Everything is written to runs/. Suppose that a new model scores better than the model that its training began from. Then
the next training begins from the new model, and `mmdec promote` may copy it to models/.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from mmdec.checks.files import write_whole
from mmdec.hub.publish import CARD, whole_folder
from mmdec.training.callbacks import lightning_says
from mmdec.training.checkpoints import last_checkpoint, newest, read_checkpoint
from mmdec.training.processes import TERMINATED, started_here
from mmdec.types import MmdecError

RUNS, MODELS = Path("runs"), Path("models")
LEAST = 20.0  # seconds; a stage is not started if less time is left
EXPORT = 4.0  # seconds that are reserved for writing a model; writing takes no longer
COMPARED = "compared"  # key under which provenance.json stores a training's Outcome

Runner = Callable[..., None]  # runs a Python module with command-line arguments in a child process
Recipe = dict[str, Any]  # the options of a training for LightningCLI, as nested dicts


@dataclass(frozen=True)
class Allowance:
    """A time limit. end: in seconds since 1970. now: the clock, in seconds since 1970, too."""

    end: float
    now: Callable[[], float] = time.time

    @property
    def left(self) -> float:
        return self.end - self.now()

    def part(self, share: float) -> Allowance:
        """Return a time limit that ends after this share (0 to 1) of the remaining time."""
        return Allowance(self.now() + self.left * share, self.now)

    def less(self, seconds: float) -> Allowance:
        """Return a time limit that ends `seconds` earlier than this one."""
        return Allowance(self.end - seconds, self.now)

    def spent_on(self, work: Callable[[], float]) -> tuple[float, float]:
        """Call `work`. Returns its result, and the seconds that it took."""
        begun = self.now()
        return work(), self.now() - begun


@dataclass(frozen=True)
class Outcome:
    """The result of training one model or drafter, which becomes a line of the table that `make train` prints."""

    system: str  # name of the model or drafter in this table
    trained: str  # words for the table: what was trained, or why nothing was
    measure: str = ""  # name of the score, which is measured on the development split
    before: float | None = None  # score of the old model, which the new one would replace
    after: float | None = None  # score of the new model
    better: bool = False  # whether the new model scored better
    folder: Path | None = None  # folder in runs/ with the new model; None if nothing was written


@dataclass(frozen=True)
class TimedStage:
    """One stage of the training of a model or drafter: a recipe that is adapted to the stage's share of the time."""

    name: str
    share: float  # this stage's part of the time, relative to the sum of the shares of all stages
    folder: Path  # output folder of the training
    origin: str  # words for the log: where the initial weights come from
    configure: Callable[[Allowance], Recipe]  # makes the recipe for a given time limit
    finish: Callable[[], None]  # called when the training has ended normally

    def run(self, time: Allowance, runner: Runner) -> Recipe:
        """Train until `time` ends. An interrupted training is resumed from its last undamaged checkpoint. Returns the
        recipe that was used. runner: runs a Python module in a child process."""
        recipe = self.configure(time)
        written = self.folder / "schedule.yaml"
        write_whole(written, yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).encode())
        resumed = last_checkpoint([self.folder / "checkpoints"])
        print(f"{self.name}: {time.left / 60:.1f} minutes, {'resumed' if resumed else self.origin}", flush=True)
        checkpoint = ("--ckpt_path", str(resumed)) if resumed else ()
        runner("mmdec.training", "fit", "--config", str(written), *checkpoint)
        self.finish()
        return recipe


def train_stages(
    system: str,
    score_before: Callable[[], float] | None,
    score_seconds: float,
    stages: Sequence[TimedStage],
    export: Callable[[Recipe, float | None], Outcome],
    time: Allowance,
    runner: Runner,
) -> Outcome:
    """Score the old model, train stage by stage, then score and write the new model. All of this ends at `time`.

    system: name of what is trained, for the table.
    score_before: scores the old model; None if there is none.
    score_seconds: seconds to reserve for scoring the new model if there is no old one. Otherwise, 1.2 times the time
        that scoring the old model took is reserved.
    export: scores and writes the new model. It gets the last stage's recipe and the old model's score.
    runner: runs a Python module in a child process.
    Returns: the outcome; without scores if the time is too short for a stage.
    """
    before, reserved = None, score_seconds
    if score_before is not None:
        before, seconds = time.spent_on(score_before)
        reserved = 1.2 * seconds
    training = time.less(reserved + EXPORT)
    recipe: Recipe = {}
    for number, stage in enumerate(stages):
        rest = stages[number:]
        if training.left < LEAST:
            names = ", ".join(other.name for other in rest)
            return Outcome(system, f"time was too short to train {names}; finished stages are kept in {RUNS}/")
        recipe = stage.run(training.part(stage.share / sum(other.share for other in rest)), runner)
    return export(recipe, before)


@dataclass(frozen=True)
class System:
    """How `make train` trains a system, that is, a model or a drafter of a model, in one stage.

    share: share of the time, relative to the sum of the shares of all trained systems. least: seconds; with less time,
        the system is skipped.
    needs: files that the corpus must have. builder: script that builds the corpus. programs: commands that it calls.
    untrained: words for messages: what is not trained. new: words for the log: what training without a start model
        begins from.
    stage: name of the stage. model: name of the model's folder. run: output folder of the training.
    kept: names of options that a resumed training keeps. size: name of the option for the batch size.
    fit: changes options in place. It gets the data options, the model options, the start model's folder (or None) and
        the number of seconds to train.
    measure: name of the score. score: computes this score on the development split, for a checkpoint or a folder.
    comparison: seconds to reserve for scoring the new model if there is no old one.
    export: for a model: writes its folder from a checkpoint.
    part: for a drafter: its folder inside the model's folder; "" for a model. fits: for a drafter: takes the entry
        `base` of a resumable checkpoint; returns whether the checkpoint belongs to the current model.
    """

    name: str
    share: float
    least: float
    stage: str
    model: str
    recipe: Path
    run: Path
    corpus: Path
    needs: Sequence[str]
    builder: Path
    untrained: str
    new: str
    kept: Sequence[str]
    fit: Callable[[Recipe, Recipe, Path | None, float], None]
    measure: str
    score: Callable[[Path, Recipe], float]
    comparison: float
    lower: bool = False  # whether a lower score is better
    size: str = "batch_size"
    validated: int | None = None  # number of epochs between validations; None: as in the recipe
    programs: Sequence[str] = ()
    export: Callable[[Path, Recipe, Path], Path] | None = None
    part: str = ""
    fits: Callable[[str], bool] | None = None

    def missing(self) -> str:
        """Build the corpus if it is missing, or continue an interrupted build. The corpus of a drafter belongs to its
        model and is not built here. Returns "" or, if training is impossible, the reason in words."""
        base = start_model(self.model)
        if self.part and not (base / "model.safetensors").is_file():
            return f"{base} is missing: {self.untrained}."
        if all((self.corpus / name).exists() for name in self.needs):
            return ""
        if self.part:
            return f"{self.corpus} is missing: {self.untrained}. Run: python {self.builder} --out {self.corpus}"
        if lacking := [program for program in self.programs if shutil.which(program) is None]:
            return f"{self.corpus} is missing, and {' and '.join(lacking)} to build it: {self.untrained}."
        print(f"building {self.corpus} first; this is done once and not counted", flush=True)
        # the folder into which a missing corpus is written; it is renamed when complete
        whole = self.corpus.with_name(f"{self.corpus.name}.part")
        # if the corpus exists, only its missing files are added
        folder = self.corpus if self.corpus.exists() else whole
        if code := run_builder(self.builder, folder):
            return f"{self.builder} failed with {code}, see above: {self.untrained}. Run again to go on."
        if folder == whole:
            folder.rename(self.corpus)
        return ""

    def earlier(self) -> Path | None:
        """Return the folder of the model or drafter that training continues from: an earlier result in runs/ if it was
        an improvement, else the shipped one. None if there is none."""
        folder = start_model(self.model) / self.part
        return folder if (folder / ("config.json" if self.part else "model.safetensors")).is_file() else None

    def train(self, time: Allowance, runner: Runner, fresh: bool = False) -> Outcome:
        """Score the old model, train, score the new model and write it to runs/, all until `time` ends.

        An interrupted training is resumed. A new drafter is written only if it is better than the old one.

        runner: runs a Python module in a child process.
        fresh: begin with random weights. The folder of an earlier training is then renamed, not resumed.
        """
        if fresh:
            set_run_aside(self.run)
        earlier, resumed = self.earlier(), self.begin()
        plain = self.configuration(time, resumed, fresh)
        stage = TimedStage(
            self.stage,
            1.0,
            self.run,
            f"from {self.new if fresh else earlier or self.new}",
            lambda part: self.configuration(part, resumed, fresh),
            (self.run / "finished").touch,
        )
        score = None if earlier is None else lambda: self.score(earlier, plain)
        return train_stages(self.name, score, self.comparison, [stage], self.judged, time, runner)

    def begin(self) -> bool:
        """Return whether an interrupted training can be resumed. If not, make room for a new one: rename the output
        folder or, for a drafter, delete the checkpoints in it."""
        finished, checkpoints = self.run / "finished", self.run / "checkpoints"
        # False: there is no training yet, or a user has started one with another recipe
        scheduled = (self.run / "schedule.yaml").is_file()
        if scheduled and not finished.is_file():
            found = last_checkpoint([checkpoints])
            if found is not None and (self.fits is None or self.fits(read_checkpoint(found)["base"])):
                return True
        if not (self.part and scheduled):  # a drafter's folder also has its target's stored outputs, which are kept
            set_run_aside(self.run)
            return False
        for left in (checkpoints, *(self.run / f"{self.stage}{end}" for end in ("", ".part", ".old"))):
            shutil.rmtree(left, ignore_errors=True)
        finished.unlink(missing_ok=True)
        return False

    def configuration(self, time: Allowance, resumed: bool, fresh: bool) -> Recipe:
        """Return the recipe, adapted to the time and to this machine's processors and GPU.

        resumed: keep the options of the interrupted training. fresh: begin with random weights.
        """
        recipe = read_recipe(self.recipe)
        trainer, data, model = recipe["trainer"], recipe["data"]["init_args"], recipe["model"]["init_args"]
        if self.part:
            data["base"] = str(start_model(self.model))
        # If an earlier training is resumed, the options in `kept` are read from its recipe; all others are new.
        if resumed:
            before = read_recipe(self.run / "schedule.yaml")
            for name, options in (("data", data), ("model", model)):
                options |= {key: value for key, value in before[name]["init_args"].items() if key in self.kept}
        else:
            start = None if fresh else self.earlier()
            model["start"] = None if start is None else str(start)
            self.fit(data, model, start, time.left)
        model["decay_from"] = None
        trainer |= {"max_steps": -1, "max_epochs": 1_000_000}
        trainer["check_val_every_n_epoch"] = self.validated or trainer["check_val_every_n_epoch"]
        trainer["log_every_n_steps"] = min(trainer["log_every_n_steps"], data["steps_per_epoch"])
        set_deadline(recipe, self.stage, time.end, decay=True)
        fit_machine(recipe, self.size)
        return recipe

    def judged(self, recipe: Recipe, before: float | None) -> Outcome:
        """Score the trained model or drafter, and write it to runs/. A drafter is put into a copy of its model's folder
        there, but only if it scores better than the old drafter, or if there is no old one.

        before: score of the old model or drafter; None if there is no old one.
        """
        made = self.run / self.stage if self.part else newest(self.run / "checkpoints", 1)[0]
        after = self.score(made, recipe)
        better = before is None or (after < before if self.lower else after > before)
        if before == float("inf"):  # the losses of models with different vocabularies cannot be compared
            before = None
        if self.export is not None:
            folder = self.export(made, recipe, run_folder(self.model, better))
            trained = f"{read_checkpoint(made)['global_step']} steps"
            return write_outcome(Outcome(self.name, trained, self.measure, before, after, better, folder))
        step = json.loads((made / "provenance.json").read_text(encoding="utf-8"))["training"]["step"]
        outcome = Outcome(self.name, f"best at step {step}", self.measure, before, after, better, made)
        if not better:
            return outcome
        with whole_folder(RUNS / self.model) as fresh:
            base, others = start_model(self.model), shutil.ignore_patterns(CARD, self.part)
            shutil.copytree(base, fresh, dirs_exist_ok=True, ignore=others)
            shutil.copytree(made, fresh / self.part)
        return write_outcome(replace(outcome, folder=RUNS / self.model))


def read_recipe(path: Path) -> Recipe:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def start_model(name: str) -> Path:
    """Return the folder of the model to start from: the one in runs/ if it scored better than its start model, else the
    shipped one in models/."""
    run = RUNS / name
    return run if better_run(run) else MODELS / name


def better_run(run: Path) -> bool:
    """Return whether a model in runs/ scored better than the model that its training began from. run: the model's
    folder."""
    try:
        provenance = json.loads((run / "provenance.json").read_text(encoding="utf-8"))
        return bool(provenance[COMPARED]["better"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def run_folder(name: str, better: bool) -> Path:
    """Return the folder in runs/ for a new model. better: whether the new model scored better than the old one. If not,
    and runs/ already has a better model of this name, the folder gets another name."""
    run = RUNS / name
    return RUNS / f"{name}-not-better" if better_run(run) and not better else run


def write_outcome(outcome: Outcome) -> Outcome:
    """Write an outcome into provenance.json in the model's folder. Returns the outcome."""
    assert outcome.folder is not None
    path = outcome.folder / "provenance.json"
    provenance = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    provenance[COMPARED] = {name: value for name, value in asdict(outcome).items() if name != "folder"}
    write_whole(path, (json.dumps(provenance, indent=2, ensure_ascii=False, default=str) + "\n").encode())
    return outcome


def set_deadline(recipe: Recipe, stage: str, at: float, **deadline: Any) -> None:
    """Add a time limit to a recipe, in place, and show a progress bar instead of lines of progress.

    stage: the bar's name. at: the time limit, in seconds since 1970. deadline: further arguments of the callback
        `Deadline`.
    """
    callbacks = recipe["trainer"]["callbacks"]
    callbacks[:] = [entry for entry in callbacks if not entry["class_path"].endswith("PlainProgress")]
    bar = {"class_path": "mmdec.training.callbacks.StageBar", "init_args": {"stage": stage, "at": at}}
    callbacks.append(bar)
    callbacks.append({"class_path": "mmdec.training.callbacks.Deadline", "init_args": {"at": at, **deadline}})


def fit_machine(recipe: Recipe, size: str = "batch_size") -> None:
    """Change a recipe, in place, to one process if there is a GPU, or if there are fewer processors than processes. The
    batch size (the option `size`) is then multiplied by the recipe's number of processes."""
    trainer, processes = recipe["trainer"], recipe["trainer"]["devices"]
    if torch.cuda.is_available() or (os.cpu_count() or 1) < processes:
        trainer |= {"accelerator": "gpu" if torch.cuda.is_available() else "cpu", "devices": 1, "strategy": "auto"}
        recipe["data"]["init_args"][size] *= processes


def epoch_steps(seconds: float, each: float, written: int) -> int:
    """Return the number of steps in an epoch so that about ten epochs fit in `seconds`. (Training can only end after an
    epoch.)

    each: seconds of one step. written: the recipe's number of steps in an epoch, which is not exceeded.
    """
    return min(max(int(seconds / 10 / each), 2), written)


def numbered(stem: Path) -> Path:
    """Return the first path of stem-1, stem-2, ... that does not exist."""
    number = 1
    while (path := stem.with_name(f"{stem.name}-{number}")).exists():
        number += 1
    return path


def set_run_aside(folder: Path) -> None:
    """Rename a training's output folder, so that a new training can use its name. Nothing is deleted."""
    if not folder.exists():
        return
    aside = numbered(folder.with_name(f"{folder.name}-before"))
    folder.rename(aside)
    print(f"the earlier run is set aside in {aside}")


def run(module: str, *arguments: str) -> None:
    """Run a Python module with command-line arguments in a child process, which ends with this process. If this process
    gets SIGTERM, the child gets it, too, and writes a checkpoint first. Raises MmdecError if the child fails."""
    # half of the processors, because recipes train with two processes
    threads = max(1, min(4, (os.cpu_count() or 1) // 2))
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **started_here()}
    with subprocess.Popen([sys.executable, "-m", module, *arguments], env=environment) as child:
        try:
            code = child.wait()
        except SystemExit:  # this process got SIGTERM
            child.terminate()
            child.wait()
            raise
        except BaseException:
            child.kill()
            raise
    if code in (TERMINATED, -signal.SIGTERM):
        raise SystemExit(TERMINATED)
    if code:
        raise MmdecError(f"`python -m {module} {' '.join(arguments)}` failed with {code}. See above.")


def run_builder(builder: Path, out: Path) -> int:
    """Run the script that builds a corpus, in a child process that ends with this one. Returns its exit code. out: the
    corpus's folder."""
    command = [sys.executable, str(builder), "--out", str(out)]
    return subprocess.run(command, env={**os.environ, **started_here()}, check=False).returncode


def validate(module: LightningModule, data: LightningDataModule) -> Mapping[str, float]:
    """Run a module's validation on the CPU in one process, without files or output. Returns the logged values by
    name."""
    with lightning_says(logging.ERROR), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers")  # the batches are few
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        return trainer.validate(module, data, verbose=False)[0]
