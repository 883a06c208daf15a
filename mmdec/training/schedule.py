"""`make train MINUTES=25`: trains, or goes on training, every shipped model by priority within the time given.

The stages of DASpeech share the time: speech to phones first, then the voice, the vocoder, the joint stage whose
learning rate falls to zero, and the export. What is already trained (runs/, or the shipped weights) is gone on with.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mmdec.types import InputError, MmdecError

RECIPES = Path("recipes/daspeech/phrasebook")
RUNS = Path("runs")


@dataclass(frozen=True)
class Stage:
    """One recipe and its share of the minutes."""

    name: str
    share: float
    first: bool = False  # goes on with its own checkpoints; otherwise it starts anew each time


STAGES = (
    Stage("units", 0.55, first=True),
    Stage("acoustic", 0.08, first=True),
    Stage("vocoder", 0.12, first=True),
    Stage("joint", 0.25),
)


def main(minutes: float) -> None:
    """Build the corpus if it is missing, run the stages, export the model."""
    if not minutes > 0:
        raise InputError(f"`minutes` must be positive, but is {minutes}. Try 25.")
    started = time.monotonic()
    prepare_corpus()
    for number, stage in enumerate(STAGES):
        spent = (time.monotonic() - started) / 60
        left = max(minutes - spent, 1.0)
        share = stage.share / sum(other.share for other in STAGES[number:])
        run_stage(stage, left * share)
        if stage.name == "units":
            run("mmdec.training.export", "--joint", "runs/units/checkpoints", "--network-only", "runs/units/network.safetensors")
    run("mmdec.training.export", "--average", "1")


def prepare_corpus() -> None:
    """The phrasebook's corpus; needs espeak-ng and flite, once."""
    if Path("data/corpus/cvss_c/train.tsv").is_file():
        return
    missing = [program for program in ("espeak-ng", "flite") if shutil.which(program) is None]
    if missing:
        raise InputError(
            f"`data/corpus` must exist, or {' and '.join(missing)} to build it, but neither does. "
            "Install Debian's packages espeak-ng and flite, or copy a corpus there."
        )
    subprocess.run([sys.executable, "data/build/phrasebook.py", "--out", "data/corpus"], check=True)


def run_stage(stage: Stage, minutes: float) -> None:
    """One recipe for so many minutes, from its last checkpoint where there is one."""
    arguments = ["fit", "--config", str(RECIPES / f"{stage.name}.yaml"), "--trainer.max_time", _clock(minutes)]
    folder = RUNS / stage.name / "checkpoints"
    resumes = stage.first and (folder / "last.ckpt").is_file()
    if resumes:
        arguments += ["--ckpt_path", str(folder / "last.ckpt")]
    elif folder.is_dir():
        shutil.rmtree(folder)
    if torch.cuda.is_available():
        arguments += ["--trainer.accelerator", "gpu", "--trainer.devices", "1", "--trainer.strategy", "auto"]
    print(f"{stage.name}: {minutes:.1f} minutes, {'resumed' if resumes else 'from the start'}", flush=True)
    run("mmdec.training", *arguments)


def run(module: str, *arguments: str) -> None:
    """Another process of this Python; one thread each, for the processes average gradients."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", module, *arguments], env=environment, check=False)
    if done.returncode:
        raise MmdecError(f"`python -m {module} {' '.join(arguments)}` failed with {done.returncode}. See above.")


def _clock(minutes: float) -> str:
    seconds = max(int(minutes * 60), 30)
    return f"00:{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def commands(minutes: float) -> Sequence[str]:
    """What `main` would run, for people who want to see it first."""
    return [f"{stage.name}: {stage.share * minutes:.1f} minutes" for stage in STAGES]
