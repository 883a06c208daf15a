"""Small random models with recurrent or convolutional states: two layers, one of each of the family's kinds."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from mmdec.targets.probe import PROBE_VOCABULARY, tiny_model

BOTH = ["linear_attention", "full_attention"]
SIZES: dict[str, Any] = {
    "vocab_size": PROBE_VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA: dict[str, Any] = {
    "layer_types": BOTH,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
}
MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2}
MLA: dict[str, Any] = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_nope_head_dim": 8}
OWN: dict[str, dict[str, Any]] = {
    "Bamba": {**MAMBA, "attn_layer_indices": [1], "mamba_chunk_size": 8},
    "FalconH1": {**MAMBA, "mamba_d_ssm": 64, "mamba_chunk_size": 8, "head_dim": 8},
    "FalconMamba": {"state_size": 8},
    "GraniteMoeHybrid": {
        **MAMBA,
        "layer_types": BOTH,
        "mamba_chunk_size": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "Jamba": {
        **EXPERTS,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "KimiLinear": {
        **EXPERTS,
        **MLA,
        "layer_types": BOTH,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "num_key_value_heads": 4,
        "mlp_layer_types": ["dense", "sparse"],
        "num_local_experts": 4,
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "Lfm2Moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Lfm3": {"layer_types": ["conv", "full_attention"]},
    "Mamba": {"state_size": 8},
    "Mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "NemotronH": {
        "layers_block_type": BOTH,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
        "head_dim": 8,
    },
    "OlmoHybrid": DELTA,
    "Qwen3Next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1},
    "Qwen3_5": DELTA,
    "Qwen3_5Moe": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
    "Zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "n_mamba_heads": 4,
        "mamba_ngroups": 2,
        "mamba_d_state": 8,
        "chunk_size": 8,
        "num_key_value_heads": 4,
    },
    "Zamba": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "n_mamba_heads": 2,
        "mamba_d_state": 8,
        "num_key_value_heads": 4,
    },
    "Zaya": {},
    "BailingHybrid": {
        **EXPERTS,
        **MLA,
        "layer_types": BOTH,
        "mlp_layer_types": ["dense", "sparse"],
        "num_local_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 8,
        "num_key_value_heads": 4,
        "num_mtp_layers": 0,
    },
    "RecurrentGemma": {"lru_width": 32, "block_types": ["recurrent", "attention"], "attention_window_size": 16},
    "MiniMax": {"layer_types": BOTH},
}


def recurrent_config(family: str) -> PreTrainedConfig:
    """Make a family's configuration with small sizes."""
    kind: Any = getattr(transformers, f"{family}ForCausalLM").config_class
    known = kind().to_dict()
    given = {name: value for name, value in SIZES.items() if name in known or name in kind.attribute_map}
    return kind(**{**given, **OWN[family]})


def recurrent_model(family: str, seed: int = 0) -> PreTrainedModel:
    """Build a model of two small layers, float32."""
    kind: Any = getattr(transformers, f"{family}ForCausalLM")
    attention = "sdpa" if kind._supports_sdpa else "eager"
    return tiny_model(kind, recurrent_config(family), attention, seed)
