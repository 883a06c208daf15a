"""Writes networks in the formats that inference engines read; here EAGLE-3 and P-EAGLE, and what DFlash needs, too.

"speculators" is the format of the package speculators (vLLM, mlx-vlm). "flat" is what SGLang and llama.cpp read: for
EAGLE-3 that of SafeAILab and SpecForge, whose layer is named `midlayer`. Each field for which engines have different
defaults is written. `mmdec.pretrained.export` finds the target and writes the folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from mmdec.drafters.eagle.eagle3 import Eagle3, LayeredNetwork, default_layers
from mmdec.errors import InputError

Layout = Literal["speculators", "flat"]
SPECULATORS_VERSION = "0.9.0"  # whose format is written; tests compare with its classes
DEFAULT_MAX_POSITIONS = 32768  # maximum sequence length that is written, if the target's configuration has none


@dataclass(frozen=True)
class ExportTarget:
    """The target model for which a drafter is exported."""

    name: str  # the target's folder name or hub id, by which engines load it
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


def export_eagle3(network: Eagle3, to: Layout, served: ExportTarget, count: int) -> Exported:
    """Convert an EAGLE-3 or P-EAGLE. Arguments and errors are those of `DraftNetwork.export`."""
    config = network.config
    refuse_features(
        to,
        {
            "the target's normed last states (layer -1)": -1 in config.layers,
            "projected embeddings of image columns (engines embed the placeholder)": config.pictures == "projected",
            "a bias of fc": config.fc_bias,
            "a bias of some of attention's projections": config.attention_bias != config.output_bias,
        },
    )
    if to == "flat":
        return _flat(network, served)
    parallel = config.mask_token is not None
    kind, name = ("peagle", "PEagle") if parallel else ("eagle3", "Eagle3")
    fields = {
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.layers],
        "embed_requires_grad": parallel,
        **_flags(network),
        **({"mask_token_id": config.mask_token} if parallel else {}),
    }
    state = export_state(network)
    layer = _layer_settings(network, served)
    return Exported(state, speculators_settings(network, state, layer, served, kind, name, count, fields), "eagle3")


def _flat(network: Eagle3, served: ExportTarget) -> Exported:
    config, state = network.config, export_state(network)
    default = config.layers == default_layers(served.depth)
    # SGLang adds 1 to all layer ids if the first one is 1; vLLM does not, so vLLM would read other layers
    refuse_features(
        "flat",
        {
            "norms of queries and keys, which SGLang ignores": config.qk_norm,
            "reading the target's first layer": not default and config.layers[0] == 0,
        },
    )
    if not config.has_draft_vocabulary:  # some engines need the tables d2t and t2d even then
        state = {
            **state,
            "d2t": torch.zeros(config.vocab_size, dtype=torch.long),
            "t2d": torch.ones(config.vocab_size, dtype=torch.bool),
        }
    state = {re.sub(r"^layers\.0\.", "midlayer.", name): value for name, value in state.items()}
    boundaries = [layer + 1 for layer in config.layers]
    ids = {} if default else {"eagle_aux_hidden_state_layer_ids": boundaries}
    parallel = config.mask_token is not None
    described = {
        **_layer_settings(network, served),
        "architectures": ["PEagleDraftModel" if parallel else "LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.vocabulary,
        "target_hidden_size": config.target_size,
        "torch_dtype": export_dtype(state),
        "dtype": export_dtype(state),
        **_flags(network),
        **ids,
        "eagle_config": {"use_aux_hidden_state": True, "norm_before_fc": config.norm_before_fc, **ids},
        **({"mask_token_id": config.mask_token} if parallel else {}),
    }
    return Exported(state, described, "eagle3")


def _flags(network: Eagle3) -> dict[str, bool]:
    """Return EAGLE-3's options about norms.

    All are written, because vLLM and speculators have different defaults for `norm_before_residual`.
    """
    names_of = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return {name: getattr(network.config, name) for name in names_of}


def _layer_settings(network: Eagle3, served: ExportTarget) -> dict[str, Any]:
    config, axes = network.config, dict[str, Any]()
    if config.mrope_section:
        axes = {
            "type": "default" if config.mrope_interleaved else "mrope",
            "mrope_section": list(config.mrope_section),
            "mrope_interleaved": config.mrope_interleaved,
        }
    return layer_settings(network, served, "qwen3" if config.qk_norm else "llama", axes)


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


def export_state(network: LayeredNetwork) -> dict[str, Tensor]:
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
        state: Its tensors by name.
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
