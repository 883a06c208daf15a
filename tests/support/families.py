"""A small random model of each supported family: transformers' default configuration with tiny sizes."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from mmdec.targets.probe import tiny_model
from tests.support.recurrent import OWN as RECURRENT
from tests.support.recurrent import recurrent_config

OWN: dict[str, dict[str, Any]] = {  # settings without which a family's default configuration does not work
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "Dots1ForCausalLM": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "GPTNeoForCausalLM": {"num_layers": 2, "attention_types": [[["global"], 2]], "attention_layers": ["global"] * 2},
}
OFF = {"sliding_window": None, "use_sliding_window": False, "is_decoder": True}


def config_of(family: str) -> PreTrainedConfig:
    """Make a family's default configuration, without sliding windows."""
    if (short := family.removesuffix("ForCausalLM")) in RECURRENT:
        return recurrent_config(short)
    kind: Any = getattr(transformers, family).config_class
    given = kind().to_dict()
    off = {name: value for name, value in OFF.items() if name in given}
    if given.get("layer_types"):
        off["layer_types"] = ["full_attention"] * len(given["layer_types"])
    known = {name: value for name, value in given.items() if name not in ("model_type", "transformers_version")}
    return kind(**{**known, **off, **OWN.get(family, {})})


def attention_of(family: str) -> str:
    """Return the class's attention implementation: "sdpa" if it supports it, else "eager"."""
    return "sdpa" if getattr(transformers, family)._supports_sdpa else "eager"


def model_of(family: str, seed: int = 0) -> PreTrainedModel:
    """Build a model of two small layers, float32."""
    return tiny_model(getattr(transformers, family), config_of(family), attention_of(family), seed)
