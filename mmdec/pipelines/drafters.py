"""Resolves the argument `drafter` of a task whose model is a language model that sees or hears."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel

from mmdec.drafters.other_vocabulary import OtherVocabulary
from mmdec.drafters.registry import AUTO, NAME, drafter_entry, drafter_names
from mmdec.generation.auto_drafter import auto_drafter
from mmdec.generation.run import DraftedBy
from mmdec.hub.audio_lm import LoadedAudioLm
from mmdec.hub.drafters import load_drafter
from mmdec.hub.find import drafter_by_name, drafter_folder, version
from mmdec.hub.small_model import small_drafter
from mmdec.hub.vlm import LoadedVlm
from mmdec.types import Drafter, InputError

Loaded = LoadedVlm | LoadedAudioLm


def as_drafter(loaded: Loaded, drafter: DraftedBy) -> DraftedBy:
    """Resolve a task's argument `drafter` to a value that `speculate` takes.

    "auto" becomes the drafter that `auto_drafter` finds. The name, folder or hub id of a drafter with weights becomes
    that drafter, loaded once on the model's device and in its precision. Anything else stays as it is.
    Raises: InputError if weights are missing, damaged, or were trained for another model.
    """
    if isinstance(drafter, PreTrainedModel):
        made = small_drafter(
            drafter, loaded.model, None, loaded.tokenizer
        )  # `Speculation` wraps small models of the same vocabulary itself, with locks
        return made if isinstance(made, OtherVocabulary) else drafter
    if isinstance(drafter, str) and drafter == AUTO:
        return auto_drafter(loaded.model, loaded.directory, partial(_read, loaded))
    named = drafter_by_name(drafter, "drafter")
    if named is not None:
        return _read(loaded, named)
    entry = None
    if isinstance(drafter, str) and NAME.fullmatch(drafter):  # a name takes precedence over a folder of the same name
        entry = drafter_entry(drafter)
        if entry is not None and entry.factory is not None:
            return drafter
        folder = beside(loaded, drafter)
        if folder is not None:
            return _read(loaded, folder)
    if isinstance(drafter, (str, os.PathLike)) and _is_folder(drafter):
        return _read(loaded, Path(drafter))
    if entry is not None:
        raise _without_weights(loaded, str(drafter))
    return drafter


def beside(loaded: Loaded, name: str) -> Path | None:
    """Return the folder of this model's drafter with the given name; None if the model has no such drafter."""
    return None if loaded.directory is None else drafter_folder(loaded.directory, name)


def _is_folder(path: str | os.PathLike[str]) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # no folder can have this name
        return False


def _read(loaded: Loaded, folder: Path) -> Drafter:
    return loaded.drafters.get(
        version(folder), lambda: load_drafter(folder, loaded.model, "drafter", tokenizer=loaded.tokenizer)
    )


def _without_weights(loaded: Loaded, name: str) -> InputError:
    home = loaded.directory
    where = (
        "it was loaded by its user"
        if home is None
        else f"neither '{home / name}' nor '{home.with_name(f'{home.name}-{name}')}' is there"
    )
    return InputError(
        f"`drafter` must have weights for this model, but {name!r} has none: {where}. Train it with "
        f"recipes/vlm_drafters, give its folder, or use one without weights: {', '.join(drafter_names())}."
    )
