"""`mmdec train drafter`: trains a drafter for a user's own model, on the user's questions or pictures.

The model first answers the questions, for a part of the time. Then the drafter is trained until the time is over. The
output folder holds all files of the run: `answers` (with features), `checkpoints`, `recipe.yaml`, `log` and `drafter`.
The same command continues the run: the model answers only new questions, and training continues from the last
checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from mmdec.checks.arguments import check_choice, check_finite
from mmdec.checks.files import write_whole
from mmdec.hub.find import find, names
from mmdec.training.__main__ import main
from mmdec.training.checkpoints import check_counts
from mmdec.training.corpora.chats import check_listed
from mmdec.training.corpora.image_text import asked_of
from mmdec.training.processes import only_one
from mmdec.training.timed_run import Recipe, set_deadline
from mmdec.training.vlm_drafters import dflash, eagle3, systems  # noqa: F401 # so that `modules` finds them
from mmdec.training.vlm_drafters.data import DraftData
from mmdec.training.vlm_drafters.module import DraftModule
from mmdec.types import InputError

NAMES = {"base": "model", "corpus": "data", "kept": "output"}  # option of a recipe -> option of the command, for errors
ASKING = 0.3  # share of the time for the model's answers
HELD_OUT = 0.1  # share of the questions that the drafter is measured on
MOST_HELD_OUT, MOST_STEPS = 64, 100  # the most held-out questions; the most steps between two measurements
STEPS_A_MINUTE = 4  # the most steps between two measurements for each minute of the run
MOST_KEPT = 4e9  # the most bytes of stored features; if there are more, the model computes them again in each step
# EAGLE-3 can draft every token of a vocabulary of up to ALL_TOKENS. Of a larger one it can draft MANY_TOKENS tokens, or
# 32,000 if the model has at least LARGE channels.
ALL_TOKENS, MANY_TOKENS, LARGE = 4096, 8192, 2048


@dataclass(frozen=True)
class DrafterRun:
    """Options of `mmdec train drafter`.

    system: kind of the drafter, a key of `modules()`.
    model: a shipped name, a folder or a hub id. data: a file of questions, see `read_chats`, or a folder of pictures.
    output: the run's folder. minutes: time limit, answers included. images: folder of the pictures that the file names;
    None: beside the file. prompt: the question about each picture of a folder. questions: the most questions that the
    model answers. max_tokens: the most tokens of an answer.
    """

    model: str
    data: Path
    output: Path
    system: str = "eagle3"
    minutes: float = 30.0
    images: Path | None = None
    prompt: str = "Describe this image."
    questions: int = 20_000
    max_tokens: int = 256

    def __post_init__(self) -> None:
        check_choice("system", self.system, tuple(modules()), "Take eagle3.")
        check_finite("minutes", self.minutes, "Give 30, for instance.")
        check_counts(questions=self.questions, max_tokens=self.max_tokens)
        if not self.minutes > 0:
            raise InputError(f"`minutes` must be positive, but is {self.minutes}. Give 30, for instance.")
        if not self.data.is_dir():
            check_listed(self.data)


def modules() -> dict[str, str]:
    """Map each drafter system to the path of its training class, as recipes name it."""
    return {kind.system: f"{kind.__module__}.{kind.__name__}" for kind in DraftModule.__subclasses__()}


def train_drafter(
    run: DrafterRun, shown: Callable[[int, int], None], told: Callable[[str], None], begun: float | None = None
) -> dict[str, Any]:
    """Train a drafter, or continue its training.

    shown: is called with the number of answered questions and the number of all. told: is called with lines of
        progress. begun: the time from which the minutes count, in seconds since 1970; None: now.
    Returns: the drafter's folder, its training step, and its scores on held-out answers.
    Raises: InputError if the model or the data cannot be used, or differ from those of the run in `output`.
    """
    begun = time.time() if begun is None else begun
    try:
        return _trained(run, shown, told, begun)
    except InputError as error:
        message = str(error)
        for inner, own in NAMES.items():
            message = message.replace(f"`{inner}`", f"`{own}`")
        raise InputError(message) from error


def _trained(
    run: DrafterRun, shown: Callable[[int, int], None], told: Callable[[str], None], begun: float
) -> dict[str, Any]:
    written = run.output / "recipe.yaml"
    with only_one(run.output, "mmdec train drafter"):
        data = _answered(run, begun + ASKING * 60 * run.minutes, shown)
        recipe = recipe_of(run, data, begun + 60 * run.minutes)
        write_whole(written, yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).encode())
    tokens = sum(len(data.tokens[one.name]) for one in data.parts["train"])
    told(f"{len(data.parts['train'])} answers of {tokens} tokens to train on, {len(data.parts['dev'])} held out")
    del data  # frees memory: training loads the model again
    main(["fit", "--config", str(written), "--ckpt_path", "last"])
    folder = run.output / "drafter"
    training = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["training"]
    return {"output": str(folder), "step": training["step"], **training["dev"]}


def data_options(run: DrafterRun) -> Recipe:
    """Return the options of `DraftData` for a run. Write the list of questions about a folder of pictures."""
    base = str(find(run.model, None)) if run.model in names(None) or Path(run.model).is_dir() else run.model
    listed, images = run.data, run.images
    if listed.is_dir():
        asked = asked_of(listed, run.prompt)
        rows = [{"question": one.question, "image": one.id} for one in asked]
        listed, images = run.output / "questions.jsonl", run.data
        write_whole(listed, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
    return {
        "base": base,
        "corpus": str(listed),
        "images": None if images is None else str(images),
        "dev_split": None,
        "samples": run.questions,
        "dev_samples": 1,
        "max_tokens": run.max_tokens,
        "base_dtype": "bfloat16" if torch.cuda.is_available() else "float32",
        "kept": str(run.output / "answers"),
        "answered": True,
    }


def _answered(run: DrafterRun, until: float, shown: Callable[[int, int], None]) -> DraftData:
    """Let the model answer questions until the time `until`, in seconds since 1970; `shown` as in `train_drafter`.
    Returns the answered questions, some of them held out."""
    options = data_options(run)
    data = DraftData(**options)
    count = len(data.samples["train"]) + 1
    data = DraftData(**{**options, "dev_samples": max(1, min(MOST_HELD_OUT, round(HELD_OUT * count)))})
    data.regenerate(device="cuda" if torch.cuda.is_available() else None, until=until, shown=shown)
    data.setup("fit")
    return data


def recipe_of(run: DrafterRun, data: DraftData, at: float) -> Recipe:
    """Write the run as a recipe of `python -m mmdec.training`. data: answered questions. at: its end, in seconds since
    1970."""
    config = data.teacher.config
    size, vocabulary = config.hidden_size, config.vocab_size
    batch = 8 if size <= 1024 else 2
    steps = min(len(data.parts["train"]) // batch, MOST_STEPS, round(STEPS_A_MINUTE * run.minutes))
    steps = max(steps, 10)
    options: Recipe = {
        "unroll": 7 if torch.cuda.is_available() else 4,
        "unroll_decay": 0.8,
        "noise": 0.0,
        "optimizer": "muon",
        "lr": min(max(0.5 / size, 1e-4), 3e-3),
        "weight_decay": 0.01,
        "warmup": 20,
        "keep_features": _features(data) <= MOST_KEPT,
        "half_teacher": True,
        "chain": 5,
    }
    if run.system == "eagle3" and vocabulary > ALL_TOKENS:
        options["draft_vocab"] = 32_000 if size >= LARGE else MANY_TOKENS
    recipe: Recipe = {
        "seed_everything": 1,
        "trainer": _trainer(run.output),
        "model": {"class_path": modules()[run.system], "init_args": options},
        "data": {
            "class_path": "mmdec.training.vlm_drafters.data.DraftData",
            "init_args": {
                **data_options(run),
                "dev_samples": data.options.dev_samples,
                "batch_size": batch,
                "steps_per_epoch": steps,
            },
        },
    }
    set_deadline(recipe, run.system, at, decay=True)
    return recipe


def _trainer(folder: Path) -> Recipe:
    """Return the trainer section of a recipe that writes into a run's folder."""
    log = {"save_dir": str(folder), "name": "log", "version": ""}
    checkpoint = {
        "dirpath": str(folder / "checkpoints"),
        "filename": "{step}",
        "save_last": True,
        "save_top_k": 1,
        "monitor": "step",
        "mode": "max",
        "every_n_epochs": 1,
        "save_on_train_epoch_end": True,
        "enable_version_counter": False,
    }
    return {
        "accelerator": "gpu" if torch.cuda.is_available() else "cpu",
        "devices": 1,
        "precision": "bf16-mixed",
        "use_distributed_sampler": False,
        "reload_dataloaders_every_n_epochs": 1,
        "max_epochs": 1_000_000,
        "gradient_clip_val": 0.5,
        "num_sanity_val_steps": 0,
        "check_val_every_n_epoch": 1,
        "log_every_n_steps": 10,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
        "logger": {"class_path": "lightning.pytorch.loggers.CSVLogger", "init_args": log},
        "callbacks": [{"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": checkpoint}],
    }


def _features(data: DraftData) -> float:
    """Estimate, from the lengths of a few prompts, how many bytes the features of all samples take, in four layers."""
    rows = [*data.parts["train"], *data.parts["dev"]]
    tried = rows[:: max(1, len(rows) // 4)]
    prompts = sum(data.prompting(one)["input_ids"].shape[1] for one in tried) / len(tried)
    tokens = len(rows) * prompts + sum(len(data.tokens[one.name]) for one in rows)
    return 2 * 4 * data.teacher.config.hidden_size * tokens
