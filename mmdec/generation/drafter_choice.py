"""Turns the argument `drafter=` of a call into a drafter.

Callers give a name, a folder, a Hugging Face id, a smaller model or a drafter of their own. `resolve_drafter` tells
these apart for all calls. Its result gives the drafter for any target model. Only the bench of drafters looks them up
itself (`bench/drafter_search.py`), because it must refuse a wrong name before the model is loaded.
"""

from __future__ import annotations

import os
from functools import partial

from transformers import PreTrainedModel

from mmdec.checks.arguments import did_you_mean, format_value
from mmdec.checks.weights import WEIGHTS_SUFFIX
from mmdec.drafters.built_in import AUTO
from mmdec.drafters.registry import (
    DRAFTER_NAME,
    check_drafter,
    drafter_entry,
    drafter_names,
    is_dotted,
    loader_names,
    make_drafter,
)
from mmdec.errors import InputError
from mmdec.generation.auto_drafter import auto_drafter, is_speech_model
from mmdec.generation.corpus_source import corpus
from mmdec.generation.drafter_source import DrafterOfModel, DrafterSource, FixedDrafter, LoadedTarget
from mmdec.hub.find import drafter_folder, folder_by_name
from mmdec.pretrained.drafters import load_drafter
from mmdec.pretrained.load_small_model import check_small_model, small_drafter
from mmdec.types import Drafter

DrafterChoice = Drafter | DrafterSource | PreTrainedModel | str | os.PathLike[str] | None


def resolve_drafter(choice: DrafterChoice, target: LoadedTarget | None = None) -> DrafterSource:
    """Resolve the argument `drafter` of a call.

    Args:
        choice: "auto", the name of a drafter, a folder with weights, a Hugging Face id, "<model>/<drafter>", a file
            that `mmdec index` wrote, a dotted path "package.module:Class", a smaller model, a drafter, a source, or
            None for plain decoding.
        target: The loaded target model, if the call has one. Drafters with weights are then loaded at once, and names
            stand for the drafters in the model's folder. Default None: they are loaded when a model is known.

    Returns:
        The source of the drafter.

    Raises:
        InputError: If there is no such drafter, its weights are damaged or another model's, or the object is not a
            drafter.
    """
    if isinstance(choice, DrafterSource):
        return choice if target is None else choice.for_target(target)
    if choice is None:
        return FixedDrafter(None)
    if isinstance(choice, PreTrainedModel):
        check_small_model(choice)
        tokenizer = None if target is None else target.tokenizer
        return DrafterOfModel(lambda model: small_drafter(choice, model, None, tokenizer), (choice,))
    if isinstance(choice, str):
        named = _named_drafter(choice, target)
        if named is not None:
            return named
    if not isinstance(choice, (str, os.PathLike)):
        check_drafter(choice)
        return FixedDrafter(choice)
    if os.fsdecode(choice).endswith(WEIGHTS_SUFFIX):
        index = corpus(choice)
        return index if target is None else index.for_target(target)
    folder = folder_by_name(choice, "drafter")
    if folder is None:
        raise InputError(
            f"`drafter` must be one of {', '.join(drafter_names())}, a drafter's folder or Hugging Face id, a dotted "
            f"path such as package.module:Class, a model or a Drafter, but is {format_value(choice)}."
            f"{did_you_mean(choice, [*drafter_names(), *loader_names()])} Names of drafters with weights: "
            f"{', '.join(loader_names())}."
        )
    if target is not None:
        return FixedDrafter(target.read_drafter(folder))
    return DrafterOfModel(partial(load_drafter, folder, argument="drafter"))


def _named_drafter(name: str, target: LoadedTarget | None) -> DrafterSource | None:
    """Return the drafter of a name, which takes precedence over a folder of the same name.

    Returns:
        None if the name must be that of a folder or a repository of the hub.
    """
    if name == AUTO:
        if target is None:
            return DrafterOfModel(auto_drafter)
        return FixedDrafter(auto_drafter(target.model, target.directory, target.read_drafter))
    entry = drafter_entry(name)
    if entry is None:
        if is_dotted(name):
            return FixedDrafter(_make(name))
        if target is None or target.directory is None or not DRAFTER_NAME.fullmatch(name):
            return None
        folder = drafter_folder(target.directory, name)
        return None if folder is None else FixedDrafter(target.read_drafter(folder))
    if entry.from_model is not None:
        return DrafterOfModel(entry.from_model)
    if target is not None and entry.has_weights and (entry.speech or not is_speech_model(target.model)):
        return FixedDrafter(target.own_drafter(name))
    return FixedDrafter(_make(name))


def _make(name: str) -> Drafter:
    drafter = make_drafter(name)
    check_drafter(drafter)
    return drafter
