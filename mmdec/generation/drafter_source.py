"""Sources of drafters: what gives the drafter for a target model, and for the inputs of a call."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmdec.types import Drafter


class LoadedTarget(Protocol):
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

    def for_target(self, target: LoadedTarget) -> DrafterSource:
        """Return the source for a loaded target model, whose tokenizer is known."""
        return self

    def check_inputs(self, count: int, sound: bool = False) -> None:  # noqa: B027 # most sources accept all calls
        """Raise InputError if there are no drafts for a call with `count` inputs.

        Args:
            sound: Whether `for_inputs` will get their sound.
        """

    def for_inputs(self, inputs: Sequence[DraftInput]) -> DrafterSource:
        """Return the source for these inputs of a call, one for each row of a batch, which are decoded together."""
        return self


@final
class DrafterCache:
    """Drafters that were made for target models, the last one for each. Copies of a source share it."""

    def __init__(self) -> None:
        self._drafters: WeakKeyDictionary[PreTrainedModel, tuple[torch.device, torch.dtype, Any, Drafter]]
        self._drafters = WeakKeyDictionary()
        self._lock = threading.Lock()

    def get(self, model: PreTrainedModel, tokenizer: Any, make: Callable[[], Drafter]) -> Drafter:
        """Return the drafter for a target model on its device, in its dtype and with this tokenizer.

        Args:
            model: The target model.
            tokenizer: Its tokenizer; None: any, or the one in its folder for a new drafter.
            make: Makes the drafter.
        """
        with self._lock:
            device, dtype, made_with, drafter = self._drafters.get(model, (None, None, None, None))
            is_other = tokenizer is not None and made_with is not tokenizer
            if drafter is None or (device, dtype) != (model.device, model.dtype) or is_other:
                drafter = make()
                self._drafters[model] = model.device, model.dtype, tokenizer, drafter
            return drafter


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
        self._drafters = DrafterCache()

    def drafter_for(self, model: PreTrainedModel) -> Drafter:
        return self._drafters.get(model, None, lambda: self._make(model))
