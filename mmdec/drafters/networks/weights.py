"""The base of all weights that are trained to draft for one language model, saved in a folder, and loaded by name.

`mmdec.pretrained.drafters` saves and loads them. Most are draft networks (`draft_network.py`); prompt tokens are not,
because no network runs beside the target.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar

from torch import nn

from mmdec.errors import InputError
from mmdec.types import Drafter

MAX_CONFIG_SIZE = 2**20  # maximum of all sizes in a configuration; a larger number means that the file is damaged


@dataclass(frozen=True)
class WeightsConfig:
    """The target model that weights were trained for."""

    hidden_size: int
    vocab_size: int
    base: str = field(default="", kw_only=True)  # fingerprint of the target's weights, or its name
    target: str = field(default="", kw_only=True)  # name of the target's folder, or its Hugging Face id

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size"):
            check_size(name, getattr(self, name), MAX_CONFIG_SIZE, "Use the target model's value.")
        for name in ("base", "target"):
            if type(getattr(self, name)) is not str:
                raise InputError(f"`{name}` must be text, but is {getattr(self, name)!r:.60}. Leave it out.")

    @property
    def target_size(self) -> int:
        """The number of channels of the target's hidden states."""
        return self.hidden_size

    @property
    def trained_for(self) -> str:
        """Describe the target in a message by name and fingerprint, as in "vlm-scenes (402af2b1ab88)".

        If only one of the two is known, the message has what is known.
        """
        mark = f"({self.base})" if self.target else self.base
        return " ".join(part for part in (self.target, mark) if part.strip("()"))

    def for_depth(self, layers: int) -> Self:
        """Return the configuration for a target with `layers` layers.

        Here it is unchanged; the default layers of EAGLE-3 and DFlash depend on this number.
        """
        return self

    def check_depth(self, layers: int) -> None:
        """Raise InputError if a target with `layers` layers lacks one that is read."""

    @classmethod
    def like(cls, model: Any, **changes: Any) -> Self:
        """Make a configuration for a model.

        Args:
            model: The configuration of the target's text model.
            changes: Values of other fields.
        """
        return cls(**{"hidden_size": model.hidden_size, "vocab_size": model.vocab_size, **changes})


def check_size(name: str, size: object, maximum: int, remedy: str = "") -> None:
    """Raise InputError unless a size in a configuration is an integer from 1 to `maximum`."""
    if type(size) is not int or not 1 <= size <= maximum:
        raise InputError(f"`{name}` must be an integer from 1 to {maximum}, but is {size!r:.60}. {remedy}".rstrip())


Config = TypeVar("Config", bound=WeightsConfig)


class DrafterWeights(nn.Module, ABC, Generic[Config]):
    """The abstract base of weights that `mmdec.drafters.registry.built_in_network` registers."""

    system: ClassVar[str]  # the drafter's name, which `built_in_network` sets
    config_class: ClassVar[type[Any]]  # the class of `config`

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.build(config)

    @abstractmethod
    def build(self, config: Config) -> None:
        """Create the weights."""

    @abstractmethod
    def make_drafter(self, embedding: nn.Module, output: nn.Linear) -> Drafter:
        """Make the drafter that uses these weights.

        Args:
            embedding: The target's embedding.
            output: The target's LM head.
        """

    def share_ends(self, embedding: nn.Module, output: nn.Linear) -> None:
        """Remove an own embedding and LM head if they are equal to the target's, which are used instead."""
