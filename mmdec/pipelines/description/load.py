"""Loads the model and the drafter of a `describe` call; checks those that are already loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel, ProcessorMixin

from mmdec.checks.arguments import show
from mmdec.checks.devices import check_device, check_dtype, check_same_dtype
from mmdec.drafters.registry import NAME, auto_names, drafter_entry, drafter_names
from mmdec.generation.drafter_choice import DraftedBy
from mmdec.hub.drafters import load_drafter
from mmdec.hub.find import drafter_by_name, drafter_folder, version
from mmdec.hub.vlm import LoadedVlm, load_vlm
from mmdec.targets.hf_target import source_folder
from mmdec.types import Drafter, InputError

Model = str | os.PathLike[str] | PreTrainedModel | LoadedVlm

AUTO = "auto"
OTHERWISE = "lookup"  # the drafter if the model has none with weights


def as_vlm(
    model: Model,
    processor: ProcessorMixin | None,
    device: str | torch.device | None,
    dtype: torch.dtype | str | None,
) -> LoadedVlm:
    """A vision-language model with its processor.

    model: a shipped name, a directory or a hub id (loaded once for each device and dtype), or a loaded model.
    processor: of a loaded model; else None.
    device: None for a GPU if there is one. dtype: None for float32. For a loaded model, None or its own.
    Raises: InputError if there is no such model, files are damaged, the processor is missing, superfluous or another
        model's, or a loaded model has another device or dtype.
    """
    wanted = check_dtype(dtype)
    if isinstance(model, (str, bytes, os.PathLike)):
        if processor is not None:
            raise InputError("`processor` must be left out for a `model` that is named, which has one, but is given.")
        return load_vlm(cast(Any, model), device, wanted)
    if not isinstance(model, LoadedVlm):
        if not isinstance(model, PreTrainedModel):
            raise InputError(
                "`model` must be a name, a directory, a hub id or a loaded model of transformers, but is "
                f"{show(model)}. Load it with `AutoModelForImageTextToText.from_pretrained`."
            )
        if not isinstance(processor, ProcessorMixin):
            raise InputError(
                f"`processor` must be a processor of transformers with a loaded `model`, but is {show(processor)}. "
                "Load it with `AutoProcessor.from_pretrained`."
            )
        model = LoadedVlm(model, processor, source_folder(model))
    if device is not None and check_device(device).type != model.model.device.type:
        raise InputError(
            f"`device` must be that of the loaded `model`, {model.model.device}, but is {show(str(device))}. Leave "
            "it out."
        )
    check_same_dtype(dtype, model.model.dtype)
    return model


def as_drafter(vlm: LoadedVlm, drafter: DraftedBy) -> DraftedBy:
    """Resolve `describe`'s argument `drafter` to one that `speculate` takes.

    "auto" becomes the first drafter in the registry's `auto_names` with weights beside the model, else "lookup". The
    name of a drafter with weights, a folder or a hub id becomes that drafter, loaded once in the model's device and
    precision. Anything else stays as it is. Raises: InputError if weights are missing, damaged, or another model's.
    """
    if isinstance(drafter, str) and drafter == AUTO:
        folders = (_beside(vlm, name) for name in auto_names())
        folder = next((folder for folder in folders if folder is not None), None)
        return OTHERWISE if folder is None else _loaded(vlm, folder)
    named = drafter_by_name(drafter, "drafter")
    if named is not None:
        return _loaded(vlm, named)
    entry = None
    if isinstance(drafter, str) and NAME.fullmatch(drafter):  # a name takes precedence over a folder of the same name
        entry = drafter_entry(drafter)
        if entry is not None and entry.factory is not None:
            return drafter
        folder = _beside(vlm, drafter)
        if folder is not None:
            return _loaded(vlm, folder)
    if isinstance(drafter, (str, os.PathLike)) and _is_folder(drafter):
        return _loaded(vlm, Path(drafter))
    if entry is not None:
        raise _without_weights(vlm, str(drafter))
    return drafter


def available_drafters(vlm: LoadedVlm) -> dict[str, str]:
    """The drafters with weights for this model, in "auto"'s order of preference -> a line that describes each."""
    names = [name for name in auto_names() if _beside(vlm, name) is not None]
    entries = {name: drafter_entry(name) for name in names}
    return {name: entry.note for name, entry in entries.items() if entry is not None}


def _beside(vlm: LoadedVlm, name: str) -> Path | None:
    return None if vlm.directory is None else drafter_folder(vlm.directory, name)


def _is_folder(path: str | os.PathLike[str]) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # no folder can have this name
        return False


def _loaded(vlm: LoadedVlm, folder: Path) -> Drafter:
    return vlm.drafters.get(version(folder), lambda: load_drafter(folder, vlm.model))


def _without_weights(vlm: LoadedVlm, name: str) -> InputError:
    home = vlm.directory
    where = (
        "it was loaded by its user"
        if home is None
        else f"neither '{home / name}' nor '{home.with_name(f'{home.name}-{name}')}' is there"
    )
    return InputError(
        f"`drafter` must have weights for this model, but {name!r} has none: {where}. Train it with "
        f"recipes/vlm_drafters, give its folder, or use one without weights: {', '.join(drafter_names())}."
    )
