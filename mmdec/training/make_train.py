"""Implements `make train MINUTES=25`: trains all models and drafters that can be trained here, and prints the results.

The models and drafters (the code calls them systems) share the time. The time limit covers everything except building a
missing corpus: loading, validation, export and comparison. Results are in runs/; `mmdec promote` copies them to
models/. The speech translator that is trained here learns a corpus of synthetic voices (the phrasebook), and stays in
runs/. The shipped translator, for human voices, is trained separately (docs/train/hearing.md).

Training continues from an earlier result in runs/ if it was an improvement, else from the shipped model or drafter.
Training a drafter does not change its model; a better drafter is put into a copy of the model's folder in runs/. Medusa
heads are first trained together with a new Whisper, and then on the text that this Whisper decodes. The training of the
vision-language model begins with a phase that trains its vision encoder alone. This phase is skipped if training begins
from an exported model, because the auxiliary heads of this phase are not exported.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mmdec.hub.medusa import load_heads
from mmdec.hub.whisper import HEADS, load_whisper
from mmdec.training import timed_run
from mmdec.training.checkpoints import read_checkpoint
from mmdec.training.corpora.windows import SECONDS, WindowData, data_options
from mmdec.training.daspeech import timed as daspeech
from mmdec.training.medusa.data import HeadData, fingerprint
from mmdec.training.medusa.module import MedusaModule
from mmdec.training.processes import only_one, sigterm_exits
from mmdec.training.timed_run import (
    RUNS,
    Allowance,
    Outcome,
    Recipe,
    Runner,
    System,
    epoch_steps,
    read_recipe,
    start_model,
    validate,
)
from mmdec.training.vlm.data import SceneData
from mmdec.training.vlm.export import export as export_vlm
from mmdec.training.vlm.export import load_module as load_vlm
from mmdec.training.vlm.module import VlmModule
from mmdec.training.vlm.network import Shape as VlmShape
from mmdec.training.vlm_drafters.regenerate import draft_data
from mmdec.training.vlm_drafters.systems import EagleModule
from mmdec.training.whisper.export import export as export_whisper
from mmdec.training.whisper.export import load_module as load_whisper_module
from mmdec.training.whisper.module import Shape, WhisperModule
from mmdec.types import InputError

SETTLED = 3.0  # divisor of the learning rate if training begins with trained weights, which large steps would spoil
VISION = 0.15  # largest share of the time for the phase that trains the vision encoder alone
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def fit_whisper(data: Recipe, model: Recipe, start: Path | None, seconds: float) -> None:
    steps = epoch_steps(seconds, 1.0, data["steps_per_epoch"])
    if start is not None:
        model["lr"] = model["lr"] / SETTLED
        data |= {"tokenizer": str(start), "lengths": [[0, SECONDS]]}
    else:
        epochs = data["steps_per_epoch"] / steps
        data["lengths"] = [[round(begin * epochs), length] for begin, length in data["lengths"]]
    data["steps_per_epoch"] = steps


def next_token_loss(model: Path, recipe: Recipe) -> float:
    """Return the loss of the next token on the development split. It is infinite if the model's vocabulary differs from
    the recipe's, because the two losses then cannot be compared.

    model: a checkpoint, or the folder of an exported model.
    """
    data = WindowData(**data_options(recipe))
    if not model.is_dir():
        return validate(load_whisper_module([model])[0], data)["dev/next"]
    kept, own = (
        json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        for folder in (model, Path(recipe["data"]["init_args"]["tokenizer"]))
    )
    if kept != own:
        return float("inf")
    return validate(WhisperModule(**started(recipe, model, Shape), units=data.units), data)["dev/next"]


def started(recipe: Recipe, model: Path, shape: type[Any]) -> Recipe:
    """Return the arguments of the recipe's module, changed so that training begins from `model`, a folder. shape: class
    for the network's sizes, which replaces the recipe's dict of sizes."""
    options = {**recipe["model"]["init_args"], "start": str(model)}
    sizes = options.pop("shape", None)
    return {**options, "shape": None if sizes is None else shape(**sizes)}


def export_transcription(checkpoint: Path, recipe: Recipe, out: Path) -> Path:
    alignment = [list(pair) for pair in read_checkpoint(checkpoint)["hyper_parameters"]["guided"]]
    return export_whisper([checkpoint], Path(recipe["data"]["init_args"]["tokenizer"]), out, alignment)


WHISPER = System(
    name="transcription",
    share=0.25,
    least=75.0,
    stage="whisper",
    model="whisper-phrasebook",
    recipe=Path("recipes/whisper/phrasebook.yaml"),
    run=Path("runs/whisper"),
    corpus=Path("data/english"),
    needs=("train", "train_everyday", "dev"),
    builder=Path("data/build/english.py"),
    programs=("espeak-ng", "flite"),
    untrained="no Whisper is trained",
    new="random weights",
    kept=("steps_per_epoch", "tokenizer", "lengths", "start", "lr"),
    size="batch_seconds",
    fit=fit_whisper,
    measure="loss of the next token",
    score=next_token_loss,
    lower=True,
    comparison=20.0,
    export=export_transcription,
)


def fit_heads(data: Recipe, model: Recipe, start: Path | None, seconds: float) -> None:
    data["steps_per_epoch"] = epoch_steps(seconds, 3.0, data["steps_per_epoch"])
    if start is not None:
        shape = json.loads((start / "config.json").read_text(encoding="utf-8"))["heads"]
        model |= {"kind": shape["kind"], "heads": shape["heads"]}
    # In the first half of the time, decoder states are computed and stored (4 s a step). Then the same windows repeat.
    data["repeat_after"] = max(1, int(seconds / 2 / (4.0 * data["steps_per_epoch"])))
    model["keep_states"] = model["kind"] == "linear"


def tokens_per_tree(heads: Path, recipe: Recipe) -> float:
    """Return the tokens per round that these heads reach with draft trees, on the recipe's development split. heads:
    their folder."""
    data = HeadData(**data_options(recipe))
    shape = load_heads(heads, data.whisper.model).heads.config
    model = {**recipe["model"]["init_args"], "kind": shape.kind, "heads": shape.heads, "start": str(heads)}
    return validate(MedusaModule(**{**model, "weights": "mean"}), data)["dev/tree"]


def fits_whisper(base: str) -> bool:
    """Return whether heads were trained for the current Whisper. base: the hash of the Whisper that they were trained
    for."""
    model = load_whisper(start_model(WHISPER.model), "cpu").model
    return base == fingerprint(model)


MEDUSA = System(
    name="heads that draft",
    share=0.2,
    least=75.0,
    stage="heads",
    model=WHISPER.model,
    part=HEADS,
    fits=fits_whisper,
    recipe=Path("recipes/medusa/phrasebook.yaml"),
    run=Path("runs/medusa"),
    corpus=WHISPER.corpus,
    needs=("train", "dev"),
    builder=WHISPER.builder,
    untrained="no heads are trained",
    new="new heads",
    kept=("steps_per_epoch", "repeat_after", "start", "kind", "heads", "keep_states"),
    fit=fit_heads,
    validated=1,
    measure="tokens per round",
    score=tokens_per_tree,
    comparison=30.0,
)


def fit_vlm(data: Recipe, model: Recipe, start: Path | None, seconds: float) -> None:
    if start is not None:
        model |= {"lr": model["lr"] / SETTLED, "vision_steps": 0, "cell_weight": 0.0}
        keep_tokenizer(start, Path(data["tokenizer"]))
    else:
        most = int(seconds * VISION / 0.4)  # a step of this phase takes about 0.4 seconds
        model |= {"vision_steps": max(1, min(model["vision_steps"], most)), "cell_weight": 0.3}
    data["steps_per_epoch"] = epoch_steps(seconds, 1.5, data["steps_per_epoch"])
    model["warmup"] = min(model["warmup"], data["steps_per_epoch"])


def keep_tokenizer(start: Path, folder: Path) -> None:
    """Copy the start model's tokenizer into `folder` if there is none, so that training does not learn another
    tokenizer."""
    if not (folder / TOKENIZER[0]).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for name in TOKENIZER:
            if (start / name).is_file():
                shutil.copy(start / name, folder / name)


def share_right(model: Path, recipe: Recipe) -> float:
    """Return the share of the development questions that a model answers right, from 0 to 1, averaged over tasks.
    model: a checkpoint, or the folder of an exported model."""
    data = SceneData(**recipe["data"]["init_args"])
    if model.is_dir():
        module = VlmModule(**{**started(recipe, model, VlmShape), "units": data.units, "compiled": False})
    else:
        module = load_vlm([model])[0]
    # 0: no phase for the encoder alone, because in this phase a validation skips the answers
    module.options = replace(module.options, vision_steps=0)
    return validate(module, data)["dev/mean"]


VLM = System(
    name="pictures",
    share=0.4,
    least=240.0,
    stage="pictures",
    model="vlm-scenes",
    recipe=Path("recipes/vlm/scenes.yaml"),
    run=Path("runs/vlm"),
    corpus=Path("data/scenes"),
    needs=("train.json", "train.cells.npy", "dev.json"),
    builder=Path("data/build/scenes.py"),
    untrained="the model of pictures is not trained",
    new="random weights",
    kept=("steps_per_epoch", "start", "lr", "vision_steps", "cell_weight", "warmup"),
    size="rows",
    fit=fit_vlm,
    measure="share right, mean of tasks",
    score=share_right,
    comparison=60.0,
    export=lambda checkpoint, recipe, out: export_vlm([checkpoint], VLM.run / "tokenizer", out),
)


def fit_drafter(data: Recipe, model: Recipe, start: Path | None, seconds: float) -> None:
    # In a third of the time, the target computes answers and features, at about six samples a second.
    data["samples"] = max(32, min(data["samples"], int(seconds / 3 * 6)))
    data["steps_per_epoch"] = epoch_steps(seconds / 2, 0.6, data["steps_per_epoch"])
    model["warmup"] = min(model["warmup"], data["steps_per_epoch"])


def tokens_per_chain(drafter: Path, recipe: Recipe) -> float:
    """Return the tokens per round that this drafter reaches with chains, on the recipe's development split. drafter:
    its folder."""
    model = {**recipe["model"]["init_args"], "start": str(drafter), "decoded": 0}
    return validate(EagleModule(**model), draft_data(recipe))["dev/chain"]


EAGLE = System(
    name="drafter that sees",
    share=0.2,
    least=240.0,
    stage="drafter",
    model=VLM.model,
    part="eagle",
    fits=lambda base: base == draft_data(read_recipe(EAGLE.recipe), base=str(start_model(VLM.model))).teacher.name,
    recipe=Path("recipes/vlm_drafters/scenes/eagle.yaml"),
    run=Path("runs/vlm_drafters/eagle"),
    corpus=VLM.corpus,
    needs=("train.json", "dev.json"),
    builder=VLM.builder,
    untrained="no drafter is trained",
    new="a new network",
    kept=("steps_per_epoch", "samples", "start", "network", "warmup"),
    fit=fit_drafter,
    validated=2,
    measure="tokens per round",
    score=tokens_per_chain,
    comparison=40.0,
)

ONE_STAGE = (WHISPER, MEDUSA, VLM, EAGLE)  # in order of priority: if time is short, the last systems are skipped


RECIPES = Path("recipes")


@dataclass(frozen=True)
class Wish:
    """What `main` must know of a system to give it a share of the time. Its training may have several stages; that of a
    `System` has one."""

    name: str
    share: float  # share of the time, relative to the sum of the shares of all trained systems
    least: float  # seconds; with less time, the system is skipped
    missing: Callable[[], str]  # builds a missing corpus; returns "" or why training is impossible
    train: Callable[[Allowance, Runner, bool], Outcome]  # the bool: begin with random weights


SYSTEMS: tuple[Wish | System, ...] = (
    Wish(daspeech.NAME, 0.55, 60.0, daspeech.missing, daspeech.train),
    *ONE_STAGE,
)


def main(
    minutes: float,
    fresh: bool = False,
    runner: Runner | None = None,
    systems: Sequence[Wish | System] = SYSTEMS,
    now: Callable[[], float] = time.time,
    begun: float | None = None,
) -> list[Outcome]:
    """Train the systems one after the other, print the results, and return the outcome of each.

    minutes: the time limit. Building missing corpora is not counted.
    fresh: begin with random weights. runner: runs each training; None: in a child process.
    now: the clock, in seconds. begun: when the time begins, by this clock; None: now.
    Raises: InputError outside a checkout of the repository, and if another `make train` works in runs/. SIGTERM raises
    SystemExit after a checkpoint is written.
    """
    if not minutes > 0:
        raise InputError(f"`minutes` must be positive, but is {minutes}. Try 25.")
    if not RECIPES.is_dir():
        raise InputError(
            f"`make train` needs a checkout, but '{Path.cwd()}' has no {RECIPES}. Clone the repository, run it there."
        )
    with only_one(RUNS, "make train"), sigterm_exits():
        building = now()
        reasons = {system.name: system.missing() for system in systems}
        begun = (building if begun is None else begun) + now() - building
        time_left = Allowance(begun + 60 * minutes, now)
        able = [system for system in systems if not reasons[system.name]]
        chosen = affordable([(system.name, system.share, system.least) for system in able], 60 * minutes)
        outcomes = []
        for system in systems:
            if reasons[system.name]:
                outcomes.append(Outcome(system.name, reasons[system.name]))
            elif system.name not in chosen:
                outcomes.append(Outcome(system.name, f"not trained: {minutes:g} minutes are too short for it"))
            else:
                shares = [other.share for other in able[able.index(system) :] if other.name in chosen]
                part = time_left.part(system.share / sum(shares))
                outcomes.append(system.train(part, runner or timed_run.run, fresh))
        Console(width=max(Console().width, 100)).print(table(outcomes, now() - begun))
    for folder in sorted({str(outcome.folder) for outcome in outcomes if outcome.better and outcome.folder}):
        print(advice(Path(folder)), flush=True)
    return outcomes


def advice(folder: Path) -> str:
    """Return a sentence for the user: what to do with the improved model in `folder`."""
    # models/ has no translator of this name, so `mmdec promote` has nothing to compare the new one with
    if folder.name == daspeech.MODEL:
        return f"It stays where it is: python -m mmdec translate recording.wav --model {folder} --output out"
    return f"Into models/, if it is better there, too: python -m mmdec promote {folder}"


def affordable(wishes: Sequence[tuple[str, float, float]], seconds: float) -> list[str]:
    """Choose the systems to train. Systems are dropped from the end of the list until each remaining system gets enough
    time. The first system is always chosen.

    wishes: for each system its name, its share of the time (relative to the sum of all shares), and the least seconds
        that it needs.
    seconds: the whole time. Returns: the names of the chosen systems.
    """
    fitting = list(wishes)
    while len(fitting) > 1:
        total = sum(share for _, share, _ in fitting)
        if all(seconds * share / total >= least for _, share, least in fitting):
            break
        fitting.pop()
    return [name for name, _, _ in fitting]


def table(outcomes: Sequence[Outcome], seconds: float) -> Table:
    """Return a table of what was trained, with scores before and after. seconds: how long all of it took."""
    total = round(seconds)
    title = f"trained in {total // 60}:{total % 60:02d} minutes; measured on the development splits"
    grid = Table("system", "trained", "measure", "before", "after", "", title=title, title_justify="left")
    for outcome in outcomes:
        numbers = ("-" if value is None else f"{value:.3f}" for value in (outcome.before, outcome.after))
        verdict = "" if outcome.after is None else f"better: {outcome.folder}" if outcome.better else "not better"
        grid.add_row(outcome.system, outcome.trained, outcome.measure, *numbers, verdict)
    return grid
