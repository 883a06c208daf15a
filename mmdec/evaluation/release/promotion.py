"""`mmdec promote RUN`: replaces a model in models/ by a better one from runs/, and writes its card.

Both models are measured on the development split. The new card and provenance.json have only measurements of the new
weights. A drafter is put into the folder of its model, and this whole folder is replaced.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mmdec import hub
from mmdec.checks.files import read_object
from mmdec.evaluation.quality.harness import Log, no_log
from mmdec.evaluation.release.description import DESCRIPTION, DRAFTERS
from mmdec.evaluation.release.promotable import Promotable, Report, Setting, render
from mmdec.evaluation.release.transcription import TRANSCRIPTION
from mmdec.evaluation.release.translation import HEARD, TRANSLATION
from mmdec.hub import heard_translator
from mmdec.hub.daspeech import layout
from mmdec.hub.provenance import CARD, portable, stamp, weights
from mmdec.hub.publish import PROVENANCE, whole_folder
from mmdec.pipelines.confidence import FILE as CONFIDENCE
from mmdec.training.processes import only_one
from mmdec.types import InputError, MmdecError

CHOSEN_BY = "dev"  # the split on which the old and the new model are compared
SYSTEMS = {system.system: system for system in (TRANSLATION, TRANSCRIPTION, DESCRIPTION)} | DRAFTERS
SYSTEMS[heard_translator.LAYOUT] = HEARD  # translators via French text are measured by other functions
RUNS = "runs"  # name of the folder into which `make train` writes


def promote(
    run: Path,
    *,
    force: bool = False,
    models: Path = Path("models"),
    corpus: Path | None = None,
    limit: int | None = None,
    threads: int = 2,
    log: Log = no_log,
) -> Path:
    """Copy the model in `run` to the folder of the same name in `models`, if it is better than the model there.

    A drafter is put into the folder of the model that its config.json names. If the run's model is not new, but one of
    its drafters is, only this drafter is copied.

    run: folder of a model or drafter that training wrote. corpus: where the model is measured; None: the usual one for
        models of its kind.
    force: replace the old model even if the new one is not better, or lacks drafters that the old one has.
    limit: use this many utterances of each split, or questions of each task, evenly spaced.
    Returns the folder of the model or drafter in `models`.
    Raises InputError for a model that is not better (with both figures), for a folder that is no model, and while `make
        train` writes in runs/.
    """
    system = SYSTEMS.get(_system(run))
    if system is None:
        raise InputError(
            f"`run` must be a model that `make train` made ({', '.join(SYSTEMS)}), but '{run}' is "
            f"{hub.kind(run) or 'none'!r}. Give its folder, runs/vlm-scenes say."
        )
    if not re.fullmatch(r"\w[\w.-]*", run.name):
        raise InputError(f"`run` must be a folder with a plain name, but is '{run}'. Give it as runs/NAME.")
    target, root = models / system.place(run), corpus or system.corpus
    if target.exists() and target.resolve() == run.resolve():
        raise InputError(f"`run` must lie in runs/, but '{run}' is the model in {models}. Give the folder of a run.")
    part = None if force or not hub.kind(target) else system.instead(run, target)
    if part is not None:
        log(f"the model in {run} is the one in {target}: {part} alone is new")
        return promote(part, models=models, corpus=corpus, limit=limit, threads=threads, log=log)
    if not system.has_split(root, CHOSEN_BY):
        raise InputError(
            f"`corpus` must have a split {CHOSEN_BY}, but '{root}' has none. Build it: see data/README.md."
        )
    home = models / target.relative_to(models).parts[0]
    with only_one(_runs(run), "mmdec promote"):
        warning = system.check(run, target, force)
        if warning:
            log(warning)
        left = system.left(run)
        measured_weights = {path: digest for path, digest in weights(run).items() if path.split("/")[0] not in left}
        reports, comparison = _measured(system, run, target, Setting(home, root, limit, threads), force, log)
        if (target / CONFIDENCE).is_file() and not (run / CONFIDENCE).is_file():
            log(f"{run} has no {CONFIDENCE}, which {target} has: calibrate it anew, see docs/confidence.md")
        _publish(_Found(system, run, target, home, measured_weights, reports, comparison, left))
        return target


def _system(run: Path) -> str:
    """Return the kind of the model or drafter in `run`: a key of `SYSTEMS`, such as "llava" or "eagle3". If it is of
    another kind, which cannot replace a model in models/, return the name in its config.json; "" if there is none."""
    kind = hub.kind(run)
    return heard_translator.LAYOUT if kind == HEARD.system and layout(run) == heard_translator.LAYOUT else kind


def _runs(run: Path) -> Path:
    """Return the folder that `make train` locks while it works: the folder runs/ that contains the run, else the run's
    parent."""
    return next((folder for folder in run.resolve().parents if folder.name == RUNS), run.parent)


def _measured(
    system: Promotable, run: Path, target: Path, setting: Setting, force: bool, log: Log
) -> tuple[list[Report], str]:
    """Measure the new model on all splits, and the old one on the development split.

    run: folder of the new model. target: folder of the old one, if there is one. force: accept a model that is not
        better.
    Returns: the new model's reports, that of the development split first; and a sentence with both scores.
    Raises: InputError if the new model is not better.
    """
    log(f"measuring {run} on {CHOSEN_BY}")
    new = system.measure(run, CHOSEN_BY, setting)
    old = None
    if hub.kind(target):
        log(f"measuring {target} on {CHOSEN_BY}")
        old = system.measure(target, CHOSEN_BY, setting)
    comparison = f"{system.summary(new)} on {CHOSEN_BY}, n = {new['n']}"
    if old is not None:
        comparison += f", where the one in {target.parent} had {system.summary(old)}"
        if system.score(new) >= system.score(old):
            if not force:
                raise InputError(
                    f"`run` must be better than '{target}', but has {comparison}. Train on, or give --force."
                )
            comparison += " (forced)"
    log(comparison)
    reports = [new]
    for split in system.splits:
        if split != CHOSEN_BY and system.has_split(setting.corpus, split):
            log(f"measuring {run} on {split}")
            reports.append(system.measure(run, split, setting))
    return reports, comparison


@dataclass(frozen=True)
class _Found:
    """What `promote` has found out: all that `_publish` needs."""

    system: Promotable
    run: Path
    target: Path  # the folder that is replaced: `home`, or a drafter's folder in it
    home: Path
    weights: dict[str, str]  # path in the run's folder -> hash of the file that was measured
    reports: Sequence[Report]
    comparison: str  # a sentence with both models' scores
    left: Sequence[str]  # folders in `run` that are not copied


def _publish(found: _Found) -> None:
    """Write the folder `home`, with the new model or drafter, card and provenance, in one step. If writing fails, the
    old folder stays.

    Raises MmdecError if the weights have changed since they were measured.
    """
    run, system = found.run, found.system
    path = run / PROVENANCE
    before: dict[str, Any] = portable(read_object(path))
    with whole_folder(found.home) as fresh:
        place = fresh / found.target.relative_to(found.home)
        if place != fresh:
            shutil.copytree(found.home, fresh, dirs_exist_ok=True)
            shutil.rmtree(place, ignore_errors=True)
        left = [CARD, *found.left]
        shutil.copytree(run, place, dirs_exist_ok=True, ignore=lambda folder, _: left if Path(folder) == run else [])
        if weights(place) != found.weights:
            raise MmdecError(f"The weights in '{run}' changed while they were measured. Stop what writes there.")
        before.pop("compared", None)
        reports, comparison = portable(found.reports), portable(found.comparison)
        provenance = {
            **before,
            "promoted": stamp(torch.device("cpu")),  # the device is the CPU, because both models were measured there
            "weights": found.weights,
            "chosen": comparison,
            "measured": reports,
        }
        text = json.dumps(provenance, indent=2, ensure_ascii=False, default=str)
        (place / PROVENANCE).write_text(text + "\n", encoding="utf-8")
        name = found.target.relative_to(found.home.parent).as_posix()
        facts = [*_facts(before), f"Chosen by {comparison}."]
        card = render(system.card, name, parameters(place), reports, facts)
        (place / CARD).write_text(card, encoding="utf-8")
        system.finish(fresh)


def _facts(provenance: Mapping[str, Any]) -> list[str]:
    """Write sentences about the training, from the run's provenance.json."""
    training = provenance.get("training") or {}
    facts = [f"Written on {provenance.get('date', 'an unknown day')} at commit {str(provenance.get('commit'))[:12]}."]
    if "step" in training:
        facts.append(f"The last stage had {training['step']} steps; `provenance.json` has its hyperparameters.")
    start = (training.get("hyperparameters") or {}).get("start")
    return [*facts, f"It began from `{start}`."] if start else facts


def parameters(folder: Path) -> dict[str, int]:
    """Count the parameters in each safetensors file of a folder, by path in the folder."""
    counts = {}
    for path in sorted(folder.rglob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 # not iterable itself
        except SafetensorError as error:
            raise InputError(
                f"`run` must hold sound safetensors, but '{path}' is none ({error}). Train again."
            ) from error
        counts[path.relative_to(folder).as_posix()] = sum(math.prod(shape) for shape in shapes)
    return counts
