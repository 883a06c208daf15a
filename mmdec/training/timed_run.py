"""Training in a given time, for all systems of `make train`: the time left, stages, their processes and results.

Everything is written to runs/. If a model there scored better than the one that its training started from, the next run
starts from it, and `mmdec promote` may put it into models/.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from mmdec.checks.errors import MmdecError
from mmdec.checks.files import write_whole
from mmdec.checks.processes import TERMINATED, started_here
from mmdec.training.checkpoints import last_checkpoint

RUNS, MODELS = Path("runs"), Path("models")
LEAST = 20.0  # seconds, below which a stage is not begun
EXPORT = 4.0  # seconds that writing a model takes, at most
COMPARED = "compared"  # in a run's provenance.json: what an Outcome says

Runner = Callable[..., None]  # runs a module of this package with arguments, in another process
Recipe = dict[str, Any]  # LightningCLI's configuration


@dataclass(frozen=True)
class Allowance:
    """Time until `end`, in seconds since 1970, by the clock `now`."""

    end: float
    now: Callable[[], float] = time.time

    @property
    def left(self) -> float:
        return self.end - self.now()

    def part(self, share: float) -> Allowance:
        """The first part of what is left."""
        return Allowance(self.now() + self.left * share, self.now)

    def less(self, seconds: float) -> Allowance:
        """The same, but for its last seconds."""
        return Allowance(self.end - seconds, self.now)

    def spent_on(self, work: Callable[[], float]) -> tuple[float, float]:
        """The result of some work, and the seconds that it took."""
        begun = self.now()
        return work(), self.now() - begun


@dataclass(frozen=True)
class Outcome:
    """The result of one system's training: a line of the table at the end."""

    system: str
    trained: str  # what was trained, or why nothing was
    measure: str = ""  # what `before` and `after` count, on the development split
    before: float | None = None  # of the model that it began from, or would replace
    after: float | None = None
    better: bool = False
    folder: Path | None = None  # in runs/


@dataclass(frozen=True)
class TimedStage:
    """One recipe, fitted to the part of the time that it gets."""

    name: str
    share: float  # of the time of all stages
    folder: Path  # of its run
    origin: str  # what a new run begins from, for the reader
    configure: Callable[[Allowance], Recipe]
    finish: Callable[[], None]  # called after the run

    @property
    def last(self) -> Path:
        return self.folder / "checkpoints" / "last.ckpt"

    def run(self, time: Allowance, runner: Runner) -> Recipe:
        """Train until `time`, from the last good checkpoint if there is one; the recipe as it was run."""
        recipe = self.configure(time)
        written = self.folder / "schedule.yaml"
        write_whole(written, yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).encode())
        resumed = last_checkpoint([self.last.parent])
        print(f"{self.name}: {time.left / 60:.1f} minutes, {'resumed' if resumed else self.origin}", flush=True)
        checkpoint = ("--ckpt_path", str(resumed)) if resumed else ()
        runner("mmdec.training", "fit", "--config", str(written), *checkpoint)
        self.finish()
        return recipe


@dataclass(frozen=True)
class TimedRun:
    """One system's training in a given time: score the model of before, train stage by stage, export and score."""

    system: str
    score_before: Callable[[], float] | None  # of the model to compare with; None if there is none
    score_seconds: float  # how long a score takes, if none was taken before
    stages: Sequence[TimedStage]
    export: Callable[[Recipe, float | None], Outcome]  # from the last stage's recipe and the score of before

    def train(self, time: Allowance, runner: Runner) -> Outcome:
        """Train until `time`; it holds both scores and the export."""
        before, reserved = None, self.score_seconds
        if self.score_before is not None:
            before, seconds = time.spent_on(self.score_before)
            reserved = 1.2 * seconds
        training = time.less(reserved + EXPORT)
        recipe: Recipe = {}
        for number, stage in enumerate(self.stages):
            rest = self.stages[number:]
            if training.left < LEAST:
                names = ", ".join(other.name for other in rest)
                return Outcome(self.system, f"time was too short to train {names}; finished stages are kept in {RUNS}/")
            recipe = stage.run(training.part(stage.share / sum(other.share for other in rest)), runner)
        return self.export(recipe, before)


def start_model(name: str) -> Path:
    """The model to start from: that of an earlier run if it was better, else the shipped one."""
    run = RUNS / name
    return run if better_run(run) else MODELS / name


def better_run(run: Path) -> bool:
    """Whether a model in runs/ was measured to be better than what it began from."""
    try:
        provenance = json.loads((run / "provenance.json").read_text(encoding="utf-8"))
        return bool(provenance[COMPARED]["better"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def run_folder(name: str, better: bool) -> Path:
    """The folder in runs/ for a model: a worse one does not replace one that was better."""
    run = RUNS / name
    return RUNS / f"{name}-not-better" if better_run(run) and not better else run


def write_outcome(outcome: Outcome) -> Outcome:
    """Write what was measured into the run's provenance."""
    assert outcome.folder is not None
    path = outcome.folder / "provenance.json"
    provenance = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    provenance[COMPARED] = {name: value for name, value in asdict(outcome).items() if name != "folder"}
    write_whole(path, (json.dumps(provenance, indent=2, ensure_ascii=False, default=str) + "\n").encode())
    return outcome


def set_deadline(recipe: Recipe, stage: str, at: float, **deadline: Any) -> None:
    """End a recipe's run at a time, and show its progress as a bar instead of lines."""
    callbacks = recipe["trainer"]["callbacks"]
    callbacks[:] = [entry for entry in callbacks if not entry["class_path"].endswith("PlainProgress")]
    bar = {"class_path": "mmdec.training.stage_bar.StageBar", "init_args": {"stage": stage, "at": at}}
    callbacks.append(bar)
    callbacks.append({"class_path": "mmdec.training.callbacks.Deadline", "init_args": {"at": at, **deadline}})


def fit_machine(recipe: Recipe, size: str = "batch_size") -> None:
    """One process on a GPU, or where the processors are too few; its batches are then as large as all of them were."""
    trainer, processes = recipe["trainer"], recipe["trainer"]["devices"]
    if torch.cuda.is_available() or (os.cpu_count() or 1) < processes:
        trainer |= {"accelerator": "gpu" if torch.cuda.is_available() else "cpu", "devices": 1, "strategy": "auto"}
        recipe["data"]["init_args"][size] *= processes


def epoch_steps(seconds: float, each: float, least: int, written: int) -> int:
    """Steps of an epoch: a run can end only where one does, and so there are some ten of them in the time there is, at
    `each` seconds a step."""
    return min(max(int(seconds / 10 / each), least), written)


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


def run(module: str, *arguments: str) -> None:
    """Another process of this Python, which ends with this one: after its checkpoint where SIGTERM ends this one."""
    threads = max(1, min(4, (os.cpu_count() or 1) // 2))  # two processes average their gradients
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **started_here()}
    with subprocess.Popen([sys.executable, "-m", module, *arguments], env=environment) as child:
        try:
            code = child.wait()
        except SystemExit:  # SIGTERM
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
    """A corpus builder as a process that ends with this one; its exit code."""
    command = [sys.executable, str(builder), "--out", str(out)]
    return subprocess.run(command, env={**os.environ, **started_here()}, check=False).returncode
