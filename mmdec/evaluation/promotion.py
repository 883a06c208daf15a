"""`mmdec promote RUN`: replaces a model in models/ by a better one from runs/, and writes its card.

Both models are measured on the development split. Card and provenance are written from measurements of the new weights;
nothing of the old ones is kept.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mmdec import hub
from mmdec.checks.processes import only_one
from mmdec.evaluation.log import Log, no_log
from mmdec.evaluation.promotable import Promotable, Report, render
from mmdec.evaluation.promotion_transcription import TRANSCRIPTION
from mmdec.evaluation.promotion_translation import TRANSLATION
from mmdec.hub.publish import whole_folder
from mmdec.provenance import CARD, stamp, weights
from mmdec.types import InputError, MmdecError

CHOSEN_BY = "dev"
SYSTEMS = {system.system: system for system in (TRANSLATION, TRANSCRIPTION)}


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
    """Put the model in `run` into `models`, under its folder's name, if it is better than the one there.

    corpus: where it is measured; None takes the system's own. limit: use this many utterances of each split, evenly
    spaced. force: replace the old model even if the new one is not better. Raises InputError, with both figures, for a
    model that is not better, for a folder that is no model, and while `make train` writes in runs/.
    """
    system = SYSTEMS.get(hub.kind(run))
    if system is None:
        raise InputError(
            f"`run` must be a model that `make train` made ({', '.join(SYSTEMS)}), but '{run}' is "
            f"{hub.kind(run) or 'none'!r}. Give its folder, runs/daspeech-phrasebook say."
        )
    target, root = models / run.name.removesuffix("-not-better"), corpus or system.corpus
    if target.exists() and target.resolve() == run.resolve():
        raise InputError(f"`run` must lie in runs/, but '{run}' is the model in {models}. Give the folder of a run.")
    if not system.has_split(root, CHOSEN_BY):
        raise InputError(
            f"`corpus` must have a split {CHOSEN_BY}, but '{root}' has none. Build it: see data/README.md."
        )
    with only_one(run.parent, "mmdec promote"):
        measured_weights = weights(run)
        log(f"measuring {run} on {CHOSEN_BY}")
        new = system.measure(run, root, CHOSEN_BY, limit, threads)
        old = None
        if hub.kind(target):
            log(f"measuring {target} on {CHOSEN_BY}")
            old = system.measure(target, root, CHOSEN_BY, limit, threads)
        comparison = f"{system.summary(new)} on {CHOSEN_BY}, n = {new['n']}" + (
            f", where the one in {models} had {system.summary(old)}" if old else ""
        )
        if old is not None and system.score(new) >= system.score(old) and not force:
            raise InputError(f"`run` must be better than '{target}', but has {comparison}. Train on, or give --force.")
        log(comparison)
        reports = [new]
        for split in system.splits:
            if split != CHOSEN_BY and system.has_split(root, split):
                log(f"measuring {run} on {split}")
                reports.append(system.measure(run, root, split, limit, threads))
        _publish(run, target, measured_weights, system, reports, comparison)
        return target


def _publish(
    run: Path,
    target: Path,
    measured_weights: dict[str, str],
    system: Promotable,
    reports: Sequence[Report],
    comparison: str,
) -> None:
    """Write the folder `target` in one step: on an error the old one stays.

    Raises MmdecError if the weights are no longer those measured.
    """
    path = run / "provenance.json"
    before: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    with whole_folder(target) as fresh:
        shutil.copytree(run, fresh, dirs_exist_ok=True, ignore=lambda folder, _: [CARD] if Path(folder) == run else [])
        if weights(fresh) != measured_weights:
            raise MmdecError(f"The weights in '{run}' changed while they were measured. Stop what writes there.")
        before.pop("compared", None)
        provenance = {
            **before,
            "promoted": stamp(torch.device("cpu")),  # where both were measured
            "weights": measured_weights,
            "chosen": comparison,
            "measured": list(reports),
        }
        text = json.dumps(provenance, indent=2, ensure_ascii=False, default=str)
        (fresh / "provenance.json").write_text(text + "\n", encoding="utf-8")
        card = render(
            system.card, target.name, parameters(fresh), reports, [*_facts(before), f"Chosen by {comparison}."]
        )
        (fresh / CARD).write_text(card, encoding="utf-8")


def _facts(provenance: Mapping[str, Any]) -> list[str]:
    """Lines about the training, from the run's provenance."""
    training = provenance.get("training") or {}
    facts = [f"Written on {provenance.get('date', 'an unknown day')} at commit {str(provenance.get('commit'))[:12]}."]
    if "step" in training:
        facts.append(f"The last stage had {training['step']} steps; `provenance.json` has its hyperparameters.")
    start = (training.get("hyperparameters") or {}).get("start")
    return [*facts, f"It began from `{start}`."] if start else facts


def parameters(folder: Path) -> dict[str, int]:
    """The number of parameters in each safetensors file of a folder, by path in the folder."""
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
