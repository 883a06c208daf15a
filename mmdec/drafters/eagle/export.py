"""Writes EAGLE-3 and P-EAGLE in the formats that inference engines read; see `mmdec.drafters.networks.export`."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch

from mmdec.drafters.eagle.eagle3 import Eagle3, default_layers
from mmdec.drafters.networks.export import (
    Exported,
    Exporter,
    ExportTarget,
    Layout,
    export_dtype,
    export_state,
    layer_settings,
    refuse_features,
    speculators_settings,
)


def eagle3_exporter(network: Eagle3) -> Exporter:
    """Return what converts an EAGLE-3 or P-EAGLE."""
    return Exporter("EAGLE-3" if network.config.mask_token is None else "P-EAGLE", partial(_convert, network))


def _convert(network: Eagle3, to: Layout, served: ExportTarget, count: int) -> Exported:
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
    """Write the EAGLE authors' layout as vLLM and SGLang read it, or refuse what they would read otherwise."""
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
