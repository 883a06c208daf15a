"""What a caller may give as `drafter`: a name, a folder, a dotted path, a smaller model, a Drafter, or None."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import final
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from mmdec.checks.arguments import check_instance, check_methods, check_path, did_you_mean, show
from mmdec.drafters.registry import drafter_entry, drafter_names, find_folder, is_dotted, loader_names
from mmdec.drafters.small_model import SmallModel
from mmdec.generation.named_drafters import folder_drafter, named_drafter
from mmdec.targets.registry import target_of
from mmdec.types import Drafter, InputError, Needs

DraftedBy = Drafter | PreTrainedModel | str | os.PathLike[str] | None
METHODS = ("check", "start", "propose", "update", "select")  # of `mmdec.types.Drafter`


@final
class DrafterChoice:
    """The caller's choice, checked. A folder is read when a model is there to read it for."""

    def __init__(self, choice: DraftedBy) -> None:
        """Raises InputError for what is no drafter."""
        self.networks = (choice,) if isinstance(choice, PreTrainedModel) else ()  # which the drafter runs
        self._folder = _folder(choice) if isinstance(choice, (str, os.PathLike)) else None
        self._drafter = None if self._folder is not None else _drafter(choice)
        self._loaded: WeakKeyDictionary[PreTrainedModel, tuple[torch.device, torch.dtype, Drafter]]
        self._loaded = WeakKeyDictionary()
        self._lock = threading.Lock()

    def for_model(self, model: PreTrainedModel) -> Drafter | None:
        """The drafter, on the model's device and in its precision where it is read from a folder."""
        if self._folder is None:
            return self._drafter
        with self._lock:
            device, dtype, drafter = self._loaded.get(model, (None, None, None))
            if drafter is None or (device, dtype) != (model.device, model.dtype):
                drafter = _read(self._folder, model, "drafter")
                self._loaded[model] = model.device, model.dtype, drafter
            return drafter


def load_drafter(folder: str | os.PathLike[str], model: PreTrainedModel) -> Drafter:
    """The drafter with weights in `folder`, for this model: on its device and in its precision.

    The folder's config.json names the drafter ({"system": "<name>", ...}). Call it once and pass the drafter to
    `generate`, `stream`, `speculate`, `transcribe` or `describe`: it holds weights only and may serve many calls.
    Raises InputError for a folder without a drafter, for damaged files, and for a drafter of another model.
    """
    path = check_path("folder", folder, "Name the drafter's folder.")
    check_instance("model", model, PreTrainedModel, "a loaded model of transformers", "Load it first.")
    return _read(path, model, "folder")


def _read(folder: Path, model: PreTrainedModel, argument: str) -> Drafter:
    """argument: what the caller calls the folder, for errors."""
    drafter = folder_drafter(folder, model, argument)
    _check_methods(drafter)
    return drafter


def _folder(choice: str | os.PathLike[str]) -> Path | None:
    """A folder, also by hub id or as "<model>/<drafter>"; None for a name or a dotted path. Raises InputError for what
    is none of them."""
    if isinstance(choice, str) and (drafter_entry(choice) is not None or is_dotted(choice)):
        return None
    found = find_folder(choice, "drafter")
    if found is not None:
        return found
    try:
        path = Path(choice)
        if path.is_dir():
            return path
    except (TypeError, ValueError, OSError):  # bytes, a null character, a name that is too long
        pass
    raise InputError(
        f"`drafter` must be one of {', '.join(drafter_names())}, a drafter's folder or hub id, a dotted path such "
        f"as package.module:Class, a model or a Drafter, but is {show(choice)}. Choose one."
        f"{did_you_mean(choice, [*drafter_names(), *loader_names()])} Names of drafters with weights: "
        f"{', '.join(loader_names())}."
    )


def _drafter(choice: DraftedBy) -> Drafter | None:
    if choice is None:
        return None
    if isinstance(choice, PreTrainedModel):
        try:
            small = target_of(choice)
        except InputError as error:
            raise InputError(str(error).replace("`model`", "`drafter`", 1)) from error
        sees = {"memory": small.reads_encoder, "images": small.reads_images, "columns": small.columns}
        return SmallModel(small, positions=small.positions, **sees)
    drafter = named_drafter(choice) if isinstance(choice, str) else choice
    _check_methods(drafter)
    return drafter  # type: ignore[return-value] # `_check_methods` has seen that it is a Drafter


def _check_methods(drafter: object) -> None:
    remedy = f"Choose one of {', '.join(drafter_names())}, a smaller model, or write one after `mmdec.types.Drafter`."
    check_methods("drafter", drafter, METHODS, remedy)
    if not isinstance(getattr(drafter, "name", None), str) or not isinstance(getattr(drafter, "needs", None), Needs):
        raise InputError(
            f"`drafter` must have a `name` and its `needs`, an mmdec.types.Needs, but {show(drafter)} has not. {remedy}"
        )
