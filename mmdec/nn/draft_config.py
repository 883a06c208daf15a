"""The configuration of a draft network, as config.json holds it, with checks."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Self

from mmdec.types import InputError

MOST = 2**20  # maximum of any size in a configuration


@dataclass(frozen=True)
class DraftConfig:
    """Sizes of a draft network, and the model that it was trained for."""

    hidden_size: int
    vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    # layers of the target whose features are read and concatenated; -1 is the LM head's input
    layers: tuple[int, ...] = (-1,)
    # a norm before attention: absent in EAGLE and in MSD for LLaVA, present in SpecVLM and in MSD for Qwen2-VL
    input_norm: bool = False
    fc_norm: bool = False  # a norm of [embedding; feature] before fc: SpecVLM's paper does not say where its norm is
    attention_bias: bool = False  # whether the projections of queries, keys and values have a bias
    fc_bias: bool = True
    base: str = ""  # fingerprint of the target's weights, or its name
    target: str = ""  # name of the target's folder, or its hub id

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))  # JSON has lists
        for name in SIZES:
            size = getattr(self, name)
            if type(size) is not int or not 1 <= size <= MOST:
                raise InputError(
                    f"`{name}` must be an integer from 1 to {MOST}, but is {size!r:.60}. Take the model's."
                )
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise InputError(
                f"`num_key_value_heads` must divide `num_attention_heads` and `head_dim` be even, but they are "
                f"{self.num_key_value_heads}, {self.num_attention_heads} and {self.head_dim}. Take the model's."
            )
        for name in ("rope_theta", "rms_norm_eps"):
            number = getattr(self, name)
            if type(number) not in (int, float) or not 0 < number < math.inf:
                raise InputError(f"`{name}` must be a positive number, but is {number!r:.60}. Take the model's.")
        if not 1 <= len(self.layers) <= 8 or any(type(layer) is not int for layer in self.layers):
            raise InputError(f"`layers` must be 1 to 8 integers, but is {self.layers!r:.60}. (-1,) is EAGLE's.")
        for name in FLAGS:
            if type(getattr(self, name)) is not bool:
                raise InputError(f"`{name}` must be true or false, but is {getattr(self, name)!r:.60}. Choose one.")
        for name in ("base", "target"):
            if type(getattr(self, name)) is not str:
                raise InputError(f"`{name}` must be text, but is {getattr(self, name)!r:.60}. Leave it out.")

    @property
    def trained_for(self) -> str:
        """The target as a text for people: "vlm-scenes (402af2b1ab88)", or the known part of it."""
        mark = f"({self.base})" if self.target else self.base
        return " ".join(part for part in (self.target, mark) if part.strip("()"))

    @classmethod
    def like(cls, model: Any, **changes: Any) -> Self:
        """A configuration with the sizes of a model's layers. model: its (text) configuration. changes: override
        fields."""
        heads = model.num_attention_heads
        rope = getattr(model, "rope_parameters", None) or {}
        sizes = {
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "intermediate_size": model.intermediate_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(model, "num_key_value_heads", None) or heads,
            "head_dim": getattr(model, "head_dim", None) or model.hidden_size // heads,
            "rope_theta": float(rope.get("rope_theta", 10000.0)),
            "rms_norm_eps": float(getattr(model, "rms_norm_eps", 1e-6)),
        }
        return cls(**{**sizes, **changes})


SIZES = (
    "hidden_size",
    "vocab_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
FLAGS = tuple(field.name for field in fields(DraftConfig) if field.type == "bool")
