"""Turns the argument `drafter=` of a call into a drafter.

Callers give a name, a folder, a Hugging Face id, a smaller model or a drafter of their own. `resolve_drafter` is the
only place that tells these apart. Its result gives the drafter for any target model.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmdec.checks.arguments import did_you_mean, show
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
from mmdec.hub.find import drafter_by_name, drafter_folder
from mmdec.pretrained.drafters import load_drafter
from mmdec.pretrained.load_small_model import small_drafter, small_target
from mmdec.types import Drafter


@dataclass(frozen=True)
class DraftInput:
    """An input of a call, or a part of it that is decoded by itself."""

    index: int  # of the input in the call
    samples: Tensor | None = None  # (T,) at 16 kHz; None: the input is not audio
    start: float = 0.0  # seconds of the recording before the samples
    total: float = 0.0  # seconds of the whole recording


class DrafterSource(ABC):
    """Gives the drafter for a target model."""

    networks: tuple[PreTrainedModel, ...] = ()  # models that the drafter runs, which are locked during a call

    @abstractmethod
    def drafter_for(self, model: PreTrainedModel) -> Drafter | None:
        """Return the drafter for a target model, on its device and in its dtype; None for plain decoding."""

    def of_home(self, home: DrafterHome) -> DrafterSource:
        """Return the source for the target model of `home`."""
        return self

    def check_inputs(self, count: int, sound: bool = False) -> None:  # noqa: B027 # most sources accept all calls
        """Raise InputError if there are no drafts for a call with `count` inputs.

        Args:
            sound: Whether `for_inputs` will get their sound.
        """

    def for_inputs(self, inputs: Sequence[DraftInput]) -> DrafterSource:
        """Return the source for these inputs of a call, one for each row of a batch, which are decoded together."""
        return self


CORPUS = "mmdec.generation.corpus"  # imported by name, because it imports this module
DrafterChoice = Drafter | DrafterSource | PreTrainedModel | str | os.PathLike[str] | None


@final
class FixedDrafter(DrafterSource):
    """The same drafter for every target model.

    Args:
        drafter: The drafter; None for plain decoding.
    """

    def __init__(self, drafter: Drafter | None) -> None:
        self._drafter = drafter

    def drafter_for(self, model: PreTrainedModel) -> Drafter | None:
        return self._drafter


@final
class DrafterOfModel(DrafterSource):
    """A drafter that depends on the target model. It is made once for each model, device and dtype.

    Args:
        make: Makes the drafter from the target model.
        networks: Models that the drafter runs.
    """

    def __init__(self, make: Callable[[PreTrainedModel], Drafter], networks: tuple[PreTrainedModel, ...] = ()) -> None:
        self.networks = networks
        self._make = make
        self._drafters: WeakKeyDictionary[PreTrainedModel, tuple[torch.device, torch.dtype, Drafter]]
        self._drafters = WeakKeyDictionary()
        self._lock = threading.Lock()

    def drafter_for(self, model: PreTrainedModel) -> Drafter:
        with self._lock:
            device, dtype, drafter = self._drafters.get(model, (None, None, None))
            if drafter is None or (device, dtype) != (model.device, model.dtype):
                drafter = self._make(model)
                self._drafters[model] = model.device, model.dtype, drafter
            return drafter


class DrafterHome(Protocol):
    """A loaded model that finds its drafters in its own folder and loads each of them once."""

    @property
    def model(self) -> Any: ...
    @property
    def directory(self) -> Path | None: ...
    @property
    def tokenizer(self) -> Any: ...

    def read_drafter(self, folder: Path) -> Drafter:
        """Load the drafter in a folder."""
        ...

    def own_drafter(self, name: str) -> Drafter:
        """Load the drafter of this name that belongs to the model. Raises InputError if there is none."""
        ...


def resolve_drafter(choice: DrafterChoice, home: DrafterHome | None = None) -> DrafterSource:
    """Resolve the argument `drafter` of a call.

    Args:
        choice: "auto", the name of a drafter, a folder with weights, a Hugging Face id, "<model>/<drafter>", a file
            that `mmdec index` wrote, a dotted path "package.module:Class", a smaller model, a drafter, a source, or
            None for plain decoding.
        home: The loaded target model, if the call has one. Drafters with weights are then loaded at once, and names
            stand for the drafters in the model's folder. Default None: they are loaded when a model is known.

    Returns:
        The source of the drafter.

    Raises:
        InputError: If there is no such drafter, its weights are damaged or another model's, or the object is not a
            drafter.
    """
    if isinstance(choice, DrafterSource):
        return choice if home is None else choice.of_home(home)
    if choice is None:
        return FixedDrafter(None)
    if isinstance(choice, PreTrainedModel):
        small_target(choice)  # raises InputError if mmdec cannot use this model
        tokenizer = None if home is None else home.tokenizer
        return DrafterOfModel(lambda model: small_drafter(choice, model, None, tokenizer), (choice,))
    if isinstance(choice, str):
        named = _named_drafter(choice, home)
        if named is not None:
            return named
    if not isinstance(choice, (str, os.PathLike)):
        check_drafter(choice)
        return FixedDrafter(choice)
    if os.fsdecode(choice).endswith(WEIGHTS_SUFFIX):
        index: DrafterSource = import_module(CORPUS).corpus(choice)
        return index if home is None else index.of_home(home)
    folder = drafter_by_name(choice, "drafter") or _local_folder(choice)
    if home is not None:
        return FixedDrafter(home.read_drafter(folder))
    return DrafterOfModel(partial(load_drafter, folder, argument="drafter"))


def _named_drafter(name: str, home: DrafterHome | None) -> DrafterSource | None:
    """Return the drafter of a name, which takes precedence over a folder of the same name.

    Returns:
        None if the name must be that of a folder or a repository of the hub.
    """
    if name == AUTO:
        if home is None:
            return DrafterOfModel(auto_drafter)
        return FixedDrafter(auto_drafter(home.model, home.directory, home.read_drafter))
    entry = drafter_entry(name)
    if entry is None:
        if is_dotted(name):
            return FixedDrafter(_make(name))
        if home is None or home.directory is None or not DRAFTER_NAME.fullmatch(name):
            return None
        folder = drafter_folder(home.directory, name)
        return None if folder is None else FixedDrafter(home.read_drafter(folder))
    if entry.of_model is not None:
        return DrafterOfModel(entry.of_model)
    if home is not None and entry.has_weights and (entry.speech or not is_speech_model(home.model)):
        return FixedDrafter(home.own_drafter(name))
    return FixedDrafter(_make(name))


def _make(name: str) -> Drafter:
    drafter = make_drafter(name)
    check_drafter(drafter)
    return drafter


def _local_folder(choice: str | os.PathLike[str]) -> Path:
    try:
        path = Path(choice)
        if path.is_dir():
            return path
    except (TypeError, ValueError, OSError):  # raised for bytes, a null character, or a name that is too long
        pass
    raise InputError(
        f"`drafter` must be one of {', '.join(drafter_names())}, a drafter's folder or Hugging Face id, a dotted path "
        f"such as package.module:Class, a model or a Drafter, but is {show(choice)}. Choose one."
        f"{did_you_mean(choice, [*drafter_names(), *loader_names()])} Names of drafters with weights: "
        f"{', '.join(loader_names())}."
    )
