"""The configuration of draft networks."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from mmdec.drafters.networks.weights import MAX_CONFIG_SIZE, WeightsConfig, check_size
from mmdec.errors import InputError

SIZE_FIELDS = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class DraftConfig(WeightsConfig):
    """Sizes and options of a draft network, and the target model that it was trained for."""

    MIN_LAYERS: ClassVar[int] = 1  # the minimum number of entries in `layers`

    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    # indices of the target layers whose output is read and concatenated; -1: the input of the LM head
    layers: tuple[int, ...] = (-1,)
    # whether attention has an input norm: False in EAGLE and MSD for LLaVA; True in SpecVLM and MSD for Qwen2-VL
    input_norm: bool = False
    # whether [embedding; feature] is normalised before fc; SpecVLM's paper leaves open where its norm is
    fc_norm: bool = False
    attention_bias: bool = False  # whether the projections of queries, keys and values have a bias
    fc_bias: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "layers", tuple(self.layers))  # a list from a JSON file becomes a tuple
        for name in SIZE_FIELDS:
            check_size(name, getattr(self, name), MAX_CONFIG_SIZE, "Use the target model's value.")
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise InputError(
                f"`num_key_value_heads` must divide `num_attention_heads` and `head_dim` be even, but they are "
                f"{self.num_key_value_heads}, {self.num_attention_heads} and {self.head_dim}. Use the target "
                "model's values."
            )
        for name in ("rope_theta", "rms_norm_eps"):
            number = getattr(self, name)
            if type(number) not in (int, float) or not 0 < number < math.inf:
                raise InputError(
                    f"`{name}` must be a positive number, but is {number!r:.60}. Use the target model's value."
                )
        if not self.MIN_LAYERS <= len(self.layers) <= 8 or any(type(layer) is not int for layer in self.layers):
            raise InputError(f"`layers` must be 1 to 8 integers, but is {self.layers!r:.60}. (-1,) is EAGLE's.")
        for name in (field.name for field in fields(self) if field.type == "bool"):
            if type(getattr(self, name)) is not bool:
                raise InputError(f"`{name}` must be true or false, but is {getattr(self, name)!r:.60}.")

    def check_depth(self, layers: int) -> None:
        if max(self.layers) >= layers or min(self.layers) < -1:
            raise InputError(
                f"`model` must have the layers {self.layers} for this drafter, but has {layers} in all. It was trained "
                f"for {self.trained_for or 'another model'}; use a drafter trained for this model."
            )

    @property
    def projected(self) -> bool:
        """Whether the network reads the projected visual embedding at image tokens.

        If False, it reads the placeholder token's embedding.
        """
        return True

    @property
    def mrope_axes(self) -> int:
        """How many axes of the target's M-RoPE positions the network uses. 0: it counts tokens."""
        return 0

    @property
    def uses_mrope(self) -> bool:
        """Whether the network uses the target's M-RoPE positions instead of counting tokens."""
        return self.mrope_axes > 0

    @classmethod
    def like(cls, model: Any, **changes: Any) -> Self:
        """Make a configuration with the layer sizes of a model.

        Args:
            model: The configuration of the target's text model.
            changes: Values of other fields.
        """
        # the layers of Gemma 4 differ in size: use the sizes of the first layer
        if getattr(model, "is_heterogeneous", False):
            model = model.per_layer_config[0]
        heads = model.num_attention_heads
        rope = getattr(model, "rope_parameters", None) or {}
        sizes = {
            "intermediate_size": model.intermediate_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(model, "num_key_value_heads", None) or heads,
            "head_dim": getattr(model, "head_dim", None) or model.hidden_size // heads,
            "rope_theta": float(rope.get("rope_theta", 10000.0)),
            "rms_norm_eps": float(getattr(model, "rms_norm_eps", 1e-6)),
        }
        return super().like(model, **{**sizes, **changes}).for_depth(model.num_hidden_layers)
