"""Converts the arguments `model` and `drafter` of a public call to a loaded model and a drafter that fits it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import torch
from transformers import PreTrainedModel, ProcessorMixin

from mmdec.checks.arguments import show
from mmdec.checks.devices import check_device, check_dtype, check_same_dtype
from mmdec.drafters.other_vocabulary import OtherVocabulary
from mmdec.drafters.registry import AUTO, DRAFTER_NAME, drafter_entry, drafter_names
from mmdec.errors import InputError
from mmdec.generation.auto_drafter import auto_drafter
from mmdec.generation.run import DecodingOptions, DrafterChoice, Speculation
from mmdec.hub.cache import path_version
from mmdec.hub.find import drafter_by_name, drafter_folder
from mmdec.pretrained.audio_lm import LoadedAudioLm
from mmdec.pretrained.drafters import load_drafter
from mmdec.pretrained.load_small_model import small_drafter
from mmdec.pretrained.vlm import LoadedVlm
from mmdec.targets.hf_target import source_folder
from mmdec.targets.registry import target_of
from mmdec.tasks.options import GenerateOptions
from mmdec.types import Drafter

Loaded = TypeVar("Loaded")
LanguageModel = LoadedVlm | LoadedAudioLm


@dataclass(frozen=True)
class ArgumentKind:
    """Describes a network or processor that a caller may pass: its class, and words for errors."""

    kind: type  # the class of transformers
    rule: str  # what it is called in errors, such as "a processor"
    loader: str  # name of transformers' class whose `from_pretrained` loads it, for errors


@dataclass(frozen=True)
class TaskLoader(Generic[Loaded]):
    """How a task loads its models."""

    # function that loads a model: (name, device, dtype) -> loaded model
    load: Callable[[Any, Any, torch.dtype], Loaded]
    # function that combines a model of transformers with its processor: (model, processor, model's folder or None) ->
    # loaded model
    loaded: Callable[[Any, Any, Any], Loaded]
    network: ArgumentKind
    processor: ArgumentKind
    integers: bool = False  # whether the dtype may be int8


class ModelOptions(Protocol):
    """The options of a call that choose its model."""

    @property
    def model(self) -> Any: ...
    @property
    def processor(self) -> ProcessorMixin | None: ...
    @property
    def device(self) -> str | torch.device | None: ...
    @property
    def dtype(self) -> torch.dtype | str | None: ...


def as_loaded(loader: TaskLoader[Loaded], options: ModelOptions) -> Loaded:
    """Return the model of a call, with its processor.

    Args:
        options: `model` is a shipped name, a directory or a hub id (loaded once for each device and dtype), or a loaded
            model. For a loaded model of transformers, `processor` is given; `device` and `dtype` are each None or the
            model's.

    Raises:
        InputError: If there is no such model, files are damaged, the processor is missing, superfluous or another
            model's, or a loaded model has another device or dtype.
    """
    model, processor = options.model, options.processor
    dtype = check_dtype(options.dtype, loader.integers)
    if isinstance(model, (str, bytes, os.PathLike)):
        if processor is not None:
            raise InputError("`processor` must be left out for a `model` that is named, which has one, but is given.")
        return loader.load(model, options.device, dtype)
    loaded: Any = model
    if not isinstance(model, loader.loaded):  # type: ignore[arg-type] # it is a class
        for name, value, part, after in (
            ("model", model, loader.network, "a name, a directory, a hub id or {}"),
            ("processor", processor, loader.processor, "{} with a loaded `model`"),
        ):
            if not isinstance(value, part.kind):
                raise InputError(
                    f"`{name}` must be {after.format(part.rule)}, but is {show(value)}. Load it with "
                    f"`{part.loader}.from_pretrained`."
                )
        loaded = loader.loaded(model, processor, source_folder(loaded))
    check_placement(loaded.model, options.device, options.dtype)
    return loaded


def check_placement(model: Any, device: str | torch.device | None, dtype: Any, remedy: str = "Leave it out.") -> None:
    """Raise InputError if `device` or `dtype` is not None and differs from the loaded model's.

    Args:
        model: The loaded model.
        device: The caller's argument.
        dtype: The caller's argument.
        remedy: Last sentence of the message about `device`.
    """
    if device is not None and check_device(device).type != model.device.type:
        raise InputError(
            f"`device` must be that of the loaded `model`, {model.device}, but is {show(str(device))}. {remedy}"
        )
    check_same_dtype(dtype, model.dtype)


def decoding_options(options: GenerateOptions, drafter: DrafterChoice) -> DecodingOptions:
    """Return the options of the decoding loop.

    Args:
        drafter: The call's drafter, as `Speculation` takes it.
    """
    return DecodingOptions(
        drafter=drafter,
        rule=options.rule,
        num_speculative_tokens=options.num_speculative_tokens,
        seed=options.seed,
        statistics=options.statistics,
        on_round=options.on_round,
    )


def load_speculation(options: DecodingOptions, model: PreTrainedModel, checked: set[str] | None = None) -> Speculation:
    """Make the decoding loop from the options: load the drafter, and check that it fits the model.

    Args:
        options: The options of the loop, with the drafter.
        model: The target model.
        checked: Names of drafters that passed the check for this model before. For these the check is skipped, because
            it takes a large part of the time of a short answer. A new drafter's name is added.

    Raises:
        InputError: If the drafter does not fit.
    """
    speculation, checked = Speculation(options), set() if checked is None else checked
    drafter = speculation.drafter_for(model)
    name = "" if drafter is None else drafter.name
    if name not in checked:
        target = target_of(model)
        if drafter is not None:
            drafter.check(target)
        checked.add(name)
    return speculation


def as_drafter(loaded: LanguageModel, drafter: DrafterChoice) -> DrafterChoice:
    """Convert a task's argument `drafter` to a value that `speculate` accepts.

    "auto" becomes the drafter that `auto_drafter` finds. The name, folder or hub id of a drafter with weights becomes
    that drafter, loaded once on the model's device and in its precision. Other values are returned unchanged.

    Raises:
        InputError: If weights are missing, damaged, or were trained for another model.
    """
    if isinstance(drafter, PreTrainedModel):
        # a small model with the same vocabulary needs no change: `Speculation` makes the drafter, and locks the model
        small = small_drafter(drafter, loaded.model, None, loaded.tokenizer)
        return small if isinstance(small, OtherVocabulary) else drafter
    if isinstance(drafter, str) and drafter == AUTO:
        return auto_drafter(loaded.model, loaded.directory, partial(_read, loaded))
    named = drafter_by_name(drafter, "drafter")
    if named is not None:
        return _read(loaded, named)
    entry = None
    # a registered name takes precedence over a folder of the same name
    if isinstance(drafter, str) and DRAFTER_NAME.fullmatch(drafter):
        entry = drafter_entry(drafter)
        if entry is not None and entry.factory is not None:
            return drafter
        folder = find_drafter_folder(loaded, drafter)
        if folder is not None:
            return _read(loaded, folder)
    if isinstance(drafter, (str, os.PathLike)) and _is_folder(drafter):
        return _read(loaded, Path(drafter))
    if entry is not None:
        raise _missing_weights_error(loaded, str(drafter))
    return drafter


def find_drafter_folder(loaded: LanguageModel, name: str) -> Path | None:
    """Return the folder of a drafter that belongs to this model, by the drafter's name; None if there is none."""
    return None if loaded.directory is None else drafter_folder(loaded.directory, name)


def _is_folder(path: str | os.PathLike[str]) -> bool:
    try:
        return Path(path).is_dir()
    except (OSError, ValueError):  # the name cannot be that of a folder
        return False


def _read(loaded: LanguageModel, folder: Path) -> Drafter:
    return loaded.drafters.get(
        path_version(folder), lambda: load_drafter(folder, loaded.model, "drafter", tokenizer=loaded.tokenizer)
    )


def _missing_weights_error(loaded: LanguageModel, name: str) -> InputError:
    home = loaded.directory
    where = (
        "the caller loaded it"
        if home is None
        else f"neither '{home / name}' nor '{home.with_name(f'{home.name}-{name}')}' is there"
    )
    return InputError(
        f"`drafter` must have weights for this model, but {name!r} has none: {where}. Train it with "
        f"recipes/vlm_drafters, give its folder, or use one without weights: {', '.join(drafter_names())}."
    )
