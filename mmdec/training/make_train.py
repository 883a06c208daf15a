"""`make train MINUTES=25`: how the minutes are shared among the systems that can be trained here, and what came of it.

The minutes hold everything but the building of a corpus that is missing: loading, validation, export and comparison.
What is made is in runs/; `mmdec promote` puts it into models/. The translator is one of the phrasebook and of robots'
voices, and stays in runs/: the shipped one hears people, and is trained otherwise (docs/train/hearing.md).

A model or a drafter of an earlier run is trained further if it was better, else the shipped one. A drafter's model does
not change; a better drafter is put beside it in runs/. The heads come with a new Whisper, which was trained with them,
and are then trained on its own text. What the patches show is not taught again to a model that was exported: the heads
that tell it are not kept with the weights.
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
from mmdec.training.whisper.window_data import SECONDS, WindowData, data_options
from mmdec.types import InputError

SETTLED = 3.0  # divides the recipe's learning rate for weights that are trained already
VISION = 0.15  # of the time, for the phase that teaches the encoder alone, where training begins with random weights
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
    """The loss of a checkpoint, or of a model's folder, on the development split; infinite if the folder's
    tokens are not the recipe's."""
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
    """The recipe's options of a module that begins from this model."""
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
    # The windows are read once, at 4 seconds a step, in the first half of the time; then only the heads have work.
    data["repeat_after"] = max(1, int(seconds / 2 / (4.0 * data["steps_per_epoch"])))
    model["keep_states"] = model["kind"] == "linear"


def tokens_per_tree(heads: Path, recipe: Recipe) -> float:
    """Tokens per round of trees that these heads draft for the recipe's model, on its development split."""
    data = HeadData(**data_options(recipe))
    shape = load_heads(heads, data.whisper.model).heads.config
    model = {**recipe["model"]["init_args"], "kind": shape.kind, "heads": shape.heads, "start": str(heads)}
    return validate(MedusaModule(**{**model, "weights": "mean"}), data)["dev/tree"]


def fits_whisper(base: str) -> bool:
    """Whether heads were trained for this very model."""
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
        most = int(seconds * VISION / 0.4)  # seconds a step
        model |= {"vision_steps": max(1, min(model["vision_steps"], most)), "cell_weight": 0.3}
    data["steps_per_epoch"] = epoch_steps(seconds, 1.5, data["steps_per_epoch"])
    model["warmup"] = min(model["warmup"], data["steps_per_epoch"])


def keep_tokenizer(start: Path, folder: Path) -> None:
    """The tokens of the model that is trained further; without one, training learns its own."""
    if not (folder / TOKENIZER[0]).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for name in TOKENIZER:
            if (start / name).is_file():
                shutil.copy(start / name, folder / name)


def share_right(model: Path, recipe: Recipe) -> float:
    """The share of the development split's questions that a checkpoint or a model's folder answers rightly, mean over
    tasks."""
    data = SceneData(**recipe["data"]["init_args"])
    if model.is_dir():
        module = VlmModule(**{**started(recipe, model, VlmShape), "units": data.units, "compiled": False})
    else:
        module = load_vlm([model])[0]
    module.options = replace(module.options, vision_steps=0)  # a phase that answers nothing
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
    # A third of the time is for the target's answers and features: some six samples a second.
    data["samples"] = max(32, min(data["samples"], int(seconds / 3 * 6)))
    data["steps_per_epoch"] = epoch_steps(seconds / 2, 0.6, data["steps_per_epoch"])
    model["warmup"] = min(model["warmup"], data["steps_per_epoch"])


def tokens_per_chain(drafter: Path, recipe: Recipe) -> float:
    """Tokens per round of chains that it drafts for the recipe's model, on its development split."""
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

ONE_STAGE = (WHISPER, MEDUSA, VLM, EAGLE)  # in the order of their priority


RECIPES = Path("recipes")


@dataclass(frozen=True)
class Wish:
    """What of a `System` the sharing of the time needs, for one of several stages."""

    name: str
    share: float  # of the time, where all are trained
    least: float  # seconds, below which it is left to those before it
    missing: Callable[[], str]  # builds what it can; why there is nothing to train: "" where there is
    train: Callable[[Allowance, Runner, bool], Outcome]


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
    """Train the systems one after the other, and print what came of it; one outcome for each.

    Building a corpus that is missing is not counted. The minutes begin at `begun` by the clock `now`. `fresh` trains
    from random weights. SIGTERM is a SystemExit, after the checkpoint of what is trained. Raises InputError outside a
    checkout, and where another `make train` works in runs/.
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
    """What to do with a model that is better."""
    if folder.name == daspeech.MODEL:  # nothing in models/ has the same tests
        return f"It stays where it is: python -m mmdec translate recording.wav --model {folder} --output out"
    return f"Into models/, if it is better there, too: python -m mmdec promote {folder}"


def affordable(wishes: Sequence[tuple[str, float, float]], seconds: float) -> list[str]:
    """Names of those whose share of the time is at least what they need, from (name, share, least): the last ones give
    way. The first is always there."""
    fitting = list(wishes)
    while len(fitting) > 1:
        total = sum(share for _, share, _ in fitting)
        if all(seconds * share / total >= least for _, share, least in fitting):
            break
        fitting.pop()
    return [name for name, _, _ in fitting]


def table(outcomes: Sequence[Outcome], seconds: float) -> Table:
    """What was trained, before and after."""
    total = round(seconds)
    title = f"trained in {total // 60}:{total % 60:02d} minutes; measured on the development splits"
    grid = Table("system", "trained", "measure", "before", "after", "", title=title, title_justify="left")
    for outcome in outcomes:
        numbers = ("-" if value is None else f"{value:.3f}" for value in (outcome.before, outcome.after))
        verdict = "" if outcome.after is None else f"better: {outcome.folder}" if outcome.better else "not better"
        grid.add_row(outcome.system, outcome.trained, outcome.measure, *numbers, verdict)
    return grid
