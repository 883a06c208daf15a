"""Loads drafters with weights: the folder's config.json names the drafter, the registry names the loader."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import PreTrainedModel

from mmdec.checks.arguments import check_instance, check_path
from mmdec.checks.weights import read_settings
from mmdec.drafters.registry import (
    FLASH,
    MEDUSA,
    TREE_GROWING,
    Loader,
    check_drafter,
    drafter_entry,
    import_dotted,
    loader_names,
)
from mmdec.hub.find import drafter_by_name
from mmdec.hub.medusa import load_heads
from mmdec.hub.vlm_drafters import load_flash, load_tree_growing
from mmdec.types import Drafter, InputError

CONFIG = "config.json"
LOADERS: dict[str, Loader] = {MEDUSA: load_heads, TREE_GROWING: load_tree_growing, FLASH: load_flash}


def load_drafter(folder: str | os.PathLike[str], model: PreTrainedModel, argument: str = "folder") -> Drafter:
    """Load a drafter with weights for one target model, on that model's device and in its precision.

    Load it once and pass it to `generate`, `stream`, `speculate`, `transcribe` or `describe`. It holds weights only, so
    several calls may share it.

    folder: a directory, a hub id, or "<model>/<drafter>" for a shipped one ("vlm-scenes/eagle"). Its config.json names
        the drafter: {"system": "medusa", ...}.
    model: the loaded target model.
    argument: how error messages call `folder`. Default "folder".
    Returns: the drafter.
    Raises: InputError if the folder holds no drafter, a file is damaged, or the drafter belongs to another model.
    """
    path = drafter_by_name(folder, argument) or check_path(argument, folder, "Name the drafter's folder.")
    check_instance("model", model, PreTrainedModel, "a loaded model of transformers", "Load it first.")
    drafter = _loader(path, argument)(path, model)
    check_drafter(drafter)
    return drafter


def _loader(folder: Path, argument: str) -> Loader:
    if not (folder / CONFIG).is_file():
        raise InputError(
            f"`{argument}` must be a folder with a drafter's {CONFIG} and weights, but '{folder}' has no {CONFIG}. "
            "Name the drafter's folder."
        )
    name = str(read_settings(folder / CONFIG, argument).get("system") or "")
    if not name:  # most likely a smaller model
        raise InputError(
            f"`{argument}` must hold a drafter of {', '.join(loader_names())}, but the config.json of '{folder}' names "
            "none. A smaller model drafts, too: load it with transformers, and pass the loaded model."
        )
    entry = drafter_entry(name)
    if entry is None or not entry.has_weights:
        raise InputError(
            f"`{argument}` must hold a drafter of {', '.join(loader_names())}, but '{folder}' holds "
            f"{name!r}. Name another folder."
        )
    if entry.loader is None:
        return LOADERS[str(entry.drafter)]
    return import_dotted(entry.loader, argument) if isinstance(entry.loader, str) else entry.loader
