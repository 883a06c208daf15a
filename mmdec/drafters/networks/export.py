"""Writes networks in the formats that inference engines read; here the settings that all of them have.

"speculators" is the format of the package speculators (vLLM, mlx-vlm). "flat" is what SGLang and llama.cpp read: for
EAGLE-3 that of SafeAILab and SpecForge, whose layer is named `midlayer`. Each field for which engines have different
defaults is written. `mmdec.pretrained.export` finds the target and writes the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.drafters.networks.layered_network import LayeredNetwork
from mmdec.errors import InputError

Layout = Literal["speculators", "flat"]
SPECULATORS_VERSION = "0.9.0"  # whose format is written; tests compare with its classes
DEFAULT_MAX_POSITIONS = 32768  # maximum sequence length that is written, if the target's configuration has none


@dataclass(frozen=True)
class ExportTarget:
    """The target model for which a drafter is exported."""

    name: str  # the target's folder name or Hugging Face id, by which engines load it
    architectures: list[str]
    text: Any  # transformers' configuration of the target's text model

    @property
    def depth(self) -> int:
        return int(self.text.num_hidden_layers)


@dataclass(frozen=True)
class Exported:
    """A network in an engine's format."""

    state: Mapping[str, Tensor]  # the tensors by name
    described: Mapping[str, Any]  # the content of config.json
    method: str  # the engines' name of the method, such as "eagle3"


@dataclass(frozen=True)
class Exporter:
    """Converts a network to the formats of inference engines."""

    name: str  # what engines call such a drafter, such as "EAGLE-3"
    # (format, target, number of tokens that the engine drafts in a round) -> the network in this format; raises
    # InputError if the network has a feature that the format cannot describe
    convert: Callable[[Layout, ExportTarget, int], Exported]


def refuse_features(to: str, faults: Mapping[str, bool]) -> None:
    """Raise InputError if the network has a feature that the format cannot describe.

    Args:
        to: The format's name.
        faults: Description of a feature -> whether the network has it.
    """
    for fault, present in faults.items():
        if present:
            raise InputError(
                f"`to` must be a layout that can say what the network computes, but {to} has no place for {fault}. "
                f"Train without it{', or export to speculators' if to == 'flat' else ''}."
            )


def export_state(network: DraftNetwork) -> dict[str, Tensor]:
    """Return the network's tensors by name, on the CPU."""
    return {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}


def speculators_settings(
    network: LayeredNetwork,
    state: Mapping[str, Tensor],
    layer: Mapping[str, Any],
    served: ExportTarget,
    kind: str,
    name: str,
    count: int,
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the content of config.json in speculators' format.

    Args:
        network: The network.
        state: The network's tensors by name.
        layer: The result of `layer_settings`.
        served: The target.
        kind: Speculators' name of the drafter.
        name: The drafter's name in speculators' classes.
        count: Number of tokens that the engine drafts in a round.
        fields: The drafter's own fields.
    """
    config = network.config
    whole = config.target_size if config.target_size != config.hidden_size else None
    return {
        "draft_vocab_size": config.vocabulary,
        "dtype": export_dtype(state),
        **fields,
        "architectures": [f"{name}DraftModel"],
        "auto_map": {"": f"config.{name}SpeculatorConfig"},
        "speculators_model_type": kind,
        "speculators_version": SPECULATORS_VERSION,
        "target_hidden_size": whole,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": count,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": served.architectures, "name_or_path": served.name},
        },
    }


def layer_settings(
    network: LayeredNetwork, served: ExportTarget, model_type: str, axes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of the decoder layers, named as in a Llama's or Qwen3's config.json.

    The RoPE settings have both their old and their new names, because an engine may read either.

    Args:
        network: The network.
        served: The target.
        model_type: "llama" or "qwen3".
        axes: RoPE settings of M-RoPE.
    """
    config = network.config
    rope: dict[str, Any] = {"rope_type": "default", **(config.rope_scaling or {}), "rope_theta": config.rope_theta}
    rope |= axes
    scaled = len(rope) > 2
    ids = {name: getattr(served.text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": network.depth,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": getattr(served.text, "max_position_embeddings", None) or DEFAULT_MAX_POSITIONS,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if scaled else None,
        "rope_parameters": rope,
        "layer_types": ["full_attention"] * network.depth,
        "sliding_window": None,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        **ids,
    }


def export_dtype(state: Mapping[str, Tensor]) -> str:
    """Return the name of the tensors' dtype."""
    return str(state["fc.weight"].dtype).removeprefix("torch.")
