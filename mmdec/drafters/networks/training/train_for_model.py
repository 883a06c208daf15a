"""`mmdec train drafter`: trains a drafter for a user's own model, on the user's questions or pictures.

The model first answers the questions, for a share of the time. Then the drafter is trained until the time is over. The
output folder gets all files: `answers` (with features), `checkpoints`, `recipe.yaml`, `log` and `drafter`. The same
command continues the training: the model answers only new questions, and training continues from the last checkpoint.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import yaml

from mmdec.checks.arguments import check_choice, check_finite
from mmdec.checks.files import write_atomically
from mmdec.drafters.built_in import BUILT_IN
from mmdec.drafters.networks.training.data import DraftData
from mmdec.drafters.networks.training.module import DraftModule
from mmdec.errors import InputError
from mmdec.hub.find import find_model, shipped_names
from mmdec.training.__main__ import main
from mmdec.training.checkpoints import check_positive
from mmdec.training.corpora.chats import check_listed
from mmdec.training.corpora.image_text import ask_about
from mmdec.training.processes import lock_folder

# a recipe's option -> the command's, for error messages
OPTION_ARGUMENTS = {"base": "model", "corpus": "data", "cache_dir": "output"}
ANSWERING_SHARE = 0.3  # share of the time in which the model answers questions; in the rest the drafter is trained
HELD_OUT_SHARE = 0.1  # share of the questions that are not trained on; the drafter is evaluated on them
MOST_HELD_OUT, MOST_STEPS = 64, 100  # maximum held-out questions; maximum training steps between two evaluations
MAX_STEPS_PER_MINUTE = 4  # maximum training steps between two evaluations, for each minute of the time limit
MAX_STORED_BYTES = 4e9  # maximum bytes of features stored on disk; if they need more, they are recomputed in each step
Recipe = dict[str, Any]  # the options of a training for LightningCLI, as nested dicts
# Size of EAGLE-3's draft vocabulary: all tokens if the model has at most ALL_TOKENS; else MANY_TOKENS, or 32,000 if the
# model's hidden size is at least LARGE.
ALL_TOKENS, MANY_TOKENS, LARGE = 4096, 8192, 2048


@dataclass(frozen=True)
class DrafterRun:
    """Options of `mmdec train drafter`.

    Args:
        system: Kind of the drafter, such as "eagle3".
        head: Kind of the head, for dflash (vanilla, gated or rnn of DSpark, dflash2, domino) and heads (medusa, hydra,
            recurrent, mlp); None: DFlash alone, Hydra.
        model: Name of a shipped model, a folder or a Hugging Face id.
        data: A file of questions (.json, .jsonl or .txt), or a folder of pictures.
        output: Folder for all files.
        minutes: Time limit of answering and training, without the last validation.
        images: Folder of the pictures that the file names; None: next to the file.
        prompt: The question about each picture of a folder.
        questions: Maximum number of questions to answer.
        max_tokens: Maximum tokens of an answer.
        allow_absolute_paths: Accept pictures outside the folder of the pictures.
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
    allow_absolute_paths: bool = False
    head: str | None = None

    def __post_init__(self) -> None:
        check_choice("system", self.system, tuple(modules()), "If in doubt, use eagle3.")
        if self.head is not None:
            heads = modules()[self.system].heads
            if not heads:
                systems = " or ".join(system for system, kind in modules().items() if kind.heads)
                raise InputError(f"`head` must be left out for {self.system}. Only {systems} have a choice of heads.")
            check_choice("head", self.head, tuple(heads))
        check_finite("minutes", self.minutes, "Try 30.")
        check_positive(questions=self.questions, max_tokens=self.max_tokens)
        if not self.minutes > 0:
            raise InputError(f"`minutes` must be positive, but is {self.minutes}. Try 30.")
        if not self.data.is_dir():
            check_listed(self.data)


def modules() -> dict[str, type[DraftModule]]:
    """Return name of a built-in drafter -> its training class."""
    for drafter in BUILT_IN.values():
        if drafter.training:
            import_module(drafter.training)
    return {kind.system: kind for kind in DraftModule.__subclasses__() if kind.system in BUILT_IN}


def train_drafter(
    run: DrafterRun, on_progress: Callable[[int, int], None], log: Callable[[str], None], start: float | None = None
) -> dict[str, Any]:
    """Train a drafter, or continue its training.

    Args:
        run: The options.
        on_progress: Called with (number of answered questions, number of all).
        log: Called with lines of text that report progress.
        start: Time from which the minutes count, in seconds since 1970; None: now.

    Returns:
        "output": the drafter's folder; "step": its training step; and name -> score on held-out answers.

    Raises:
        InputError: If the model or the data cannot be used, or differ from those of the training in `output`.
    """
    start = time.time() if start is None else start
    try:
        return _train(run, on_progress, log, start)
    except InputError as error:
        raise error.with_names(OPTION_ARGUMENTS) from error


def _train(
    run: DrafterRun, on_progress: Callable[[int, int], None], log: Callable[[str], None], start: float
) -> dict[str, Any]:
    written = run.output / "recipe.yaml"
    with lock_folder(run.output, "mmdec train drafter"):
        data = _answer_questions(run, start + ANSWERING_SHARE * 60 * run.minutes, on_progress)
        recipe = make_recipe(run, data, start + 60 * run.minutes - time.time())
        write_atomically(written, yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True).encode())
    tokens = sum(len(data.tokens[sample.name]) for sample in data.parts["train"])
    log(f"{len(data.parts['train'])} answers of {tokens} tokens to train on, {len(data.parts['dev'])} held out")
    del data  # `data` holds the model; without it the memory is free for training, which loads the model again
    main(["fit", "--config", str(written), "--ckpt_path", "last"])
    folder = run.output / "drafter"
    training = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))["training"]
    return {"output": str(folder), "step": training["step"], **training["dev"]}


def data_options(run: DrafterRun) -> Recipe:
    """Return the options of `DraftData` (the data module).

    If the data is a folder of pictures, write the file of questions about them.
    """
    base = (
        str(find_model(run.model, None)) if run.model in shipped_names(None) or Path(run.model).is_dir() else run.model
    )
    data, images = run.data, run.images
    if data.is_dir():
        questions = ask_about(data, run.prompt)
        rows = [{"question": question.question, "image": question.id} for question in questions]
        data, images = run.output / "questions.jsonl", run.data
        write_atomically(data, "".join(f"{json.dumps(row)}\n" for row in rows).encode())
    return {
        "base": base,
        "corpus": str(data),
        "images": None if images is None else str(images),
        "dev_split": None,
        "samples": run.questions,
        "dev_samples": 1,
        "max_tokens": run.max_tokens,
        "allow_absolute_paths": run.allow_absolute_paths,
        "base_dtype": "bfloat16" if torch.cuda.is_available() else "float32",
        "cache_dir": str(run.output / "answers"),
        "answered": True,
    }


def _answer_questions(run: DrafterRun, until: float, on_progress: Callable[[int, int], None]) -> DraftData:
    """Let the model answer questions until the time `until`, in seconds since 1970.

    Args:
        on_progress: Called with (number of answered questions, number of all).

    Returns:
        The data module with the answers, some of them held out.
    """
    options = data_options(run)
    data = DraftData(**options)
    count = len(data.samples["train"]) + 1
    data = DraftData(**{**options, "dev_samples": max(1, min(MOST_HELD_OUT, round(HELD_OUT_SHARE * count)))})
    data.regenerate(device="cuda" if torch.cuda.is_available() else None, until=until, on_progress=on_progress)
    data.setup("fit")
    return data


def make_recipe(run: DrafterRun, data: DraftData, seconds: float) -> Recipe:
    """Return a training recipe, as `python -m mmdec.training` reads it.

    Args:
        data: The answered questions.
        seconds: The time that is left for training; at least one second is taken.
    """
    config = data.teacher.config
    size, vocabulary = config.hidden_size, config.vocab_size
    batch = 8 if size <= 1024 else 2
    steps = min(len(data.parts["train"]) // batch, MOST_STEPS, round(MAX_STEPS_PER_MINUTE * run.minutes))
    steps = max(steps, 10)
    options: Recipe = {
        "unroll": 7 if torch.cuda.is_available() else 4,
        "unroll_decay": 0.8,
        "noise": 0.0,
        "optimizer": "muon",
        "lr": min(max(0.5 / size, 1e-4), 3e-3),
        "weight_decay": 0.01,
        "warmup": 20,
        "keep_features": _feature_bytes(data) <= MAX_STORED_BYTES,
        "half_teacher": True,
        "chain": 5,
    }
    module = modules()[run.system]
    if run.system == "eagle3" and vocabulary > ALL_TOKENS:
        options["draft_vocab"] = 32_000 if size >= LARGE else MANY_TOKENS
    if run.head is not None:
        options["network"] = dict(module.heads[run.head])
    if run.system == "prompt_tokens":  # a few vectors, whose gradients pass through the whole target
        options |= {"keep_features": False, "optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.0}
    return {
        "seed_everything": 1,
        "trainer": _trainer(run.output, run.system, max(seconds, 1.0)),
        "model": {"class_path": f"{module.__module__}.{module.__name__}", "init_args": options},
        "data": {
            "class_path": "mmdec.drafters.networks.training.data.DraftData",
            "init_args": {
                **data_options(run),
                "dev_samples": data.options.dev_samples,
                "batch_size": batch,
                "steps_per_epoch": steps,
            },
        },
    }


def _trainer(folder: Path, system: str, seconds: float) -> Recipe:
    """Return the section "trainer" of a recipe, with Lightning's options.

    Args:
        folder: Gets logs and checkpoints.
        system: Kind of the drafter.
        seconds: Time limit.
    """
    checkpoint = {
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
        "reload_dataloaders_every_n_epochs": 1,
        "min_epochs": 1,
        "max_epochs": 1_000_000,
        "gradient_clip_val": 0.5,
        "num_sanity_val_steps": 0,
        "check_val_every_n_epoch": 1,
        "log_every_n_steps": 10,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": str(folder),
        "callbacks": [
            {"class_path": "mmdec.training.callbacks.StageBar", "init_args": {"stage": system, "seconds": seconds}},
            {"class_path": "mmdec.training.callbacks.TimeLimit", "init_args": {"seconds": seconds}},
            {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": checkpoint},
        ],
    }


def _feature_bytes(data: DraftData) -> float:
    """Estimate how many bytes the stored features of all samples take, for four target layers in half precision."""
    rows = [*data.parts["train"], *data.parts["dev"]]
    tried = rows[:: max(1, len(rows) // 4)]
    prompts = sum(data.prompting(sample)["input_ids"].shape[1] for sample in tried) / len(tried)
    tokens = len(rows) * prompts + sum(len(data.tokens[sample.name]) for sample in rows)
    return 2 * 4 * data.teacher.config.hidden_size * tokens
