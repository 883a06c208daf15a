"""Writes heads in the layouts of their authors' code, which `checkpoint.py` reads."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mmdec.drafters.heads.checkpoint import (
    HYDRA_ARCHITECTURES,
    MLP_MODEL_TYPE,
    MLP_PREFIX,
    REDRAFTER_MODEL_TYPE,
    HeadsLayout,
    published_name,
)
from mmdec.drafters.heads.network import Heads, HeadsConfig, HeadsKind
from mmdec.drafters.networks.export import Exported, Exporter, ExportTarget, Layout, export_state
from mmdec.errors import InputError

LAYOUT_OF: dict[HeadsKind, HeadsLayout] = {
    "medusa": "medusa",
    "hydra": "hydra",
    "recurrent": "redrafter",
    "mlp": "mlp",
}
PUBLISHED_NAMES: dict[HeadsKind, str] = {
    "medusa": "Medusa",
    "hydra": "Hydra",
    "recurrent": "ReDrafter",
    "mlp": "MLPSpeculator",
}


def heads_exporter(network: Heads) -> Exporter:
    """Return the exporter, which refuses heads for which the authors' code would compute something else."""
    return Exporter(PUBLISHED_NAMES[network.config.kind], partial(_convert, network))


def _convert(network: Heads, to: Layout, served: ExportTarget, count: int) -> Exported:
    if to != "flat":
        raise InputError(f"`to` must be flat for heads, their authors' layout, but is {to}. speculators has no heads.")
    config, layout = network.config, LAYOUT_OF[network.config.kind]
    _check_layout(network, layout)
    state = export_state(network)
    if layout == "hydra" and not config.lm_head_bias:  # its code would keep a random bias
        weight = state["lm_heads.0.weight"]
        state |= {f"lm_heads.{level}.bias": weight.new_zeros(len(weight)) for level in range(config.heads)}
    prefix = MLP_PREFIX if layout == "mlp" else ""
    named = {prefix + published_name(name, layout, config): value for name, value in state.items()}
    return Exported(named, {"base_model_name_or_path": served.name, **_settings(config, layout)}, layout)


def _check_layout(network: Heads, layout: HeadsLayout) -> None:
    config = network.config
    lm_heads = "one" if config.tied or layout == "redrafter" else "each"
    faults = {
        f"`lm_heads: {config.lm_heads}`. Train with `lm_heads: {lm_heads}`": config.lm_heads != lm_heads,
        "`lm_head_bias`. Train without it": config.lm_head_bias and layout != "hydra",
        "`prefix_layer`. Train without it": config.prefix_layer and layout != "hydra",
        "`attention`. Train without it": config.attention,
        "`previous_head`. Train without it": config.previous_head,
        "blocks that differ, where its code repeats one block. Train with fewer `blocks`": _has_different_blocks(
            network, layout
        ),
    }
    fault = next((fault for fault, present in faults.items() if present), None)
    if fault is not None:
        raise InputError(
            f"`source` must hold heads that the layout of {PUBLISHED_NAMES[config.kind]} can hold, but has {fault}. "
            "Export with another layout."
        )


def _has_different_blocks(network: Heads, layout: HeadsLayout) -> bool:
    """Whether blocks differ that are one object in the code of Medusa and Hydra: all, but for Hydra's first."""
    if layout not in ("medusa", "hydra"):
        return False
    levels: Any = network.heads.levels
    return any(
        not torch.equal(first, value)
        for blocks in levels
        for block in blocks[int(layout == "hydra") :]
        for first, value in zip(blocks[int(layout == "hydra")].parameters(), block.parameters(), strict=True)
    )


def _settings(config: HeadsConfig, layout: HeadsLayout) -> dict[str, Any]:
    """Return the fields of config.json that the authors' code and `checkpoint.py` read."""
    if layout == "medusa":
        return {"medusa_num_heads": config.heads, "medusa_num_layers": config.blocks}
    if layout == "hydra":
        return {
            "hydra_num_heads": config.heads,
            "hydra_num_layers": config.blocks,
            "hydra_head_arch": HYDRA_ARCHITECTURES[config.prefix_layer],
            "grounded_heads": True,
            "hidden_state_offset": 0,
            "num_attention_heads": config.num_attention_heads,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope_theta,
        }
    if layout == "redrafter":
        return {
            "model_type": REDRAFTER_MODEL_TYPE,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "exit_dim": config.output_size,
            "num_draft_layers": config.blocks,
            "rnn": not config.summed,
        }
    return {
        "model_type": MLP_MODEL_TYPE,
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "vocab_size": config.vocab_size,
        "emb_dim": config.hidden_size,
        "inner_dim": config.output_size,
        "n_predict": config.heads,
        "tie_weights": config.tied,
        "scale_input": config.scale_input,
    }
