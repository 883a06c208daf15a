"""Finds the drafters that `mmdec bench drafters` compares, before the model is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mmdec.checks.arguments import did_you_mean
from mmdec.checks.weights import WEIGHTS_SUFFIX
from mmdec.drafters.registry import auto_names, drafter_entry, drafter_names, is_dotted, loader_names
from mmdec.errors import InputError
from mmdec.hub.find import SHORT_NAMES, drafter_folder, find_model, folder_by_name, shipped_names
from mmdec.pretrained.drafters import check_drafter_folder
from mmdec.pretrained.language_model import LANGUAGE_MODEL_FILES

TRAINED_FOLDER = "drafter"  # where `mmdec train drafter` puts the drafter, in the folder of its run


def own_drafters(directory: Path, kind: str) -> list[str]:
    """Return the drafters without weights, and those in the model's folder."""
    names = auto_names(speech=kind == "audio")
    return [*drafter_names(), *(name for name in names if drafter_folder(directory, name) is not None)]


def find_drafters(names: Sequence[str], directory: Path, kind: str) -> dict[str, str | Path]:
    """Find drafters by name, without the model.

    Args:
        names: Names, folders, Hugging Face ids.
        directory: The model's folder.
        kind: What the model decodes.

    Returns:
        Name in the report -> name, dotted path, index or folder of the drafter.

    Raises:
        InputError: If there is no such drafter, it is named twice, or its folder does not fit the model.
    """
    if len(set(names)) < len(names):
        raise InputError(f"`drafter` must name each drafter once, but is {', '.join(names):.200}.")
    found: dict[str, str | Path] = {}
    for name in names:
        choice = _find(name, directory)
        if isinstance(choice, Path):
            check_drafter_folder(choice, directory, "drafter")
        label = name
        if isinstance(choice, Path):
            label = choice.resolve().parent.name if choice.name == TRAINED_FOLDER else choice.name
        found[label if label not in found else name] = choice
    return found


def _find(name: str, directory: Path) -> str | Path:
    entry = None if not name or "/" in name else drafter_entry(name)
    if entry is not None and entry.has_weights:
        folder = drafter_folder(directory, name)
        if folder is None:
            raise InputError(
                f"`drafter` must be a folder for {name}, which has weights, where the model's folder '{directory}' has "
                f"none of that name. Give the folder."
            )
        return folder
    if entry is not None or is_dotted(name) or (name.endswith(WEIGHTS_SUFFIX) and os.path.isfile(name)):
        return name  # the last is an index of texts
    if name in shipped_names(None) or any(pattern.fullmatch(name) for pattern in SHORT_NAMES):
        return find_model(name, None, LANGUAGE_MODEL_FILES)
    folder = folder_by_name(name, "drafter") if name else None
    if folder is None:
        names = [*drafter_names(), *loader_names()]
        raise InputError(
            f"`drafter` must be one of {', '.join(names)}, or the folder or Hugging Face id of a drafter or a smaller "
            f"model, but is {name!r:.100}.{did_you_mean(name, names)}"
        )
    return folder
