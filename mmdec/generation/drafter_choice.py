"""Resolves a caller's `drafter`: a name, a folder, a dotted path, a smaller model, a Drafter, or None."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import final
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from mmdec.checks.arguments import did_you_mean, show
from mmdec.drafters.registry import check_drafter, drafter_entry, drafter_names, is_dotted, loader_names, named_drafter
from mmdec.drafters.small_model import SmallModel
from mmdec.hub.drafters import load_drafter
from mmdec.hub.find import drafter_by_name
from mmdec.targets.registry import target_of
from mmdec.types import Drafter, InputError

DraftedBy = Drafter | PreTrainedModel | str | os.PathLike[str] | None


@final
class DrafterChoice:
    """The caller's choice, checked. A folder is read once the model is known."""

    def __init__(self, choice: DraftedBy) -> None:
        """Raises InputError if the choice is none of these."""
        self.networks = (choice,) if isinstance(choice, PreTrainedModel) else ()  # models that the drafter runs
        self._folder = _folder(choice) if isinstance(choice, (str, os.PathLike)) else None
        self._drafter = None if self._folder is not None else _drafter(choice)
        self._loaded: WeakKeyDictionary[PreTrainedModel, tuple[torch.device, torch.dtype, Drafter]]
        self._loaded = WeakKeyDictionary()
        self._lock = threading.Lock()

    def for_model(self, model: PreTrainedModel) -> Drafter | None:
        """The drafter for a model; weights from a folder get the model's device and precision."""
        if self._folder is None:
            return self._drafter
        with self._lock:
            device, dtype, drafter = self._loaded.get(model, (None, None, None))
            if drafter is None or (device, dtype) != (model.device, model.dtype):
                drafter = load_drafter(self._folder, model, "drafter")
                self._loaded[model] = model.device, model.dtype, drafter
            return drafter


def _folder(choice: str | os.PathLike[str]) -> Path | None:
    """The folder of a choice, also by hub id or "<model>/<drafter>"; None for a name or a dotted path.

    Raises: InputError for any other text.
    """
    if isinstance(choice, str) and (drafter_entry(choice) is not None or is_dotted(choice)):
        return None
    found = drafter_by_name(choice, "drafter")
    if found is not None:
        return found
    try:
        path = Path(choice)
        if path.is_dir():
            return path
    except (TypeError, ValueError, OSError):  # bytes, a null character, or too long a name
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
    check_drafter(drafter)
    return drafter  # type: ignore[return-value] # `check_drafter` has seen that it is a Drafter
