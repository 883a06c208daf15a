"""What loaded models of speech and pictures have in common: processor and drafters."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, ProcessorMixin

from mmdec.checks.weights import lies_inside
from mmdec.drafters.registry import drafter_names
from mmdec.errors import InputError
from mmdec.hub.cache import LoadedModels, path_version
from mmdec.hub.find import drafter_folder
from mmdec.pretrained.drafters import load_drafter
from mmdec.pretrained.plain_text import PlainText
from mmdec.types import Drafter


@dataclass(frozen=True)
class LoadedMediaModel:
    """A model with its processor. All callers share one object, and none changes the weights."""

    model: PreTrainedModel
    processor: ProcessorMixin
    # the model's folder, where drafters are looked for; None: the model was not loaded from a folder
    directory: Path | None = None
    # cache of drafters that were loaded from folders
    drafters: LoadedModels[Drafter] = field(default_factory=LoadedModels, repr=False)
    checked: set[str] = field(default_factory=set, repr=False)  # names of drafters that passed the check for this model

    @property
    def tokenizer(self) -> Any:
        """The processor's tokenizer."""
        processor: Any = self.processor
        return processor.tokenizer

    @cached_property
    def plain(self) -> PlainText:
        """The tokenizer for callers' texts, which reads special tokens in them as text."""
        return PlainText(self.tokenizer, self.processor)

    def read_drafter(self, folder: Path) -> Drafter:
        """Load the drafter in a folder, on the model's device and in its precision.

        It is loaded once, and again if its files have changed.

        Raises:
            InputError: If the folder holds no drafter that fits the model.
        """
        return self.drafters.get(
            path_version(folder), lambda: load_drafter(folder, self.model, "drafter", tokenizer=self.tokenizer)
        )

    def own_drafter(self, name: str) -> Drafter:
        """Load the drafter that lies in the model's folder or next to it.

        Args:
            name: The drafter's name, such as "eagle".

        Raises:
            InputError: If there is none, it leads outside the model's folder, or its weights are damaged or another
                model's.
        """
        parent = self.directory
        folder = None if parent is None else drafter_folder(parent, name)
        if parent is None or folder is None:
            where = "the caller loaded it"
            if parent is not None:
                where = f"neither '{parent / name}' nor '{parent.with_name(f'{parent.name}-{name}')}' is there"
            raise InputError(
                f"`drafter` must have weights for this model, but {name!r} has none: {where}. Train it, convert a "
                "published one with `mmdec convert`, give its folder, or use one without weights: "
                f"{', '.join(drafter_names())}."
            )
        parent = parent.resolve()
        if folder.parent == parent and not lies_inside(folder, parent):
            raise InputError(
                f"`model` must hold its drafters in its own folder, but '{folder}' leads outside. Give the drafter's "
                "own folder as `drafter`."
            )
        return self.read_drafter(folder)
