"""Shrinks any decoder's configuration to two small layers, for a probe or a test.

Every size that transformers' configurations name shrinks, each kind of layer is kept, and every window becomes `WINDOW`
columns, so that a short text exceeds it. Switches keep their values.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedConfig

LAYERS = 2
WINDOW = 8
VOCABULARY = 48
WINDOWS = re.compile(r"window|sliding|chunk|local|block_size|blocks$|index_topk")
NO_WINDOWS = re.compile(r"chunk_size_feed_forward|experts|_layers$|_pattern$|dropout|mamba|lm_head|kernel|theta")
HEADS = 4
SIZES: dict[str, int] = {  # maximum of each size; 0 and None stay
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "max_position_embeddings": 128,
    "head_dim": 8,
    "global_head_dim": 8,
    "v_head_dim": 8,
    "qk_head_dim": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "o_lora_rank": 16,
    "rotary_dim": 8,
    "n_inner": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "embedding_size": 32,
    "embed_dim": 32,
    "word_embed_proj_dim": 32,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_top_k": 2,
    "num_experts_per_token": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_groups": 1,
    "moe_intermediate_size": 16,
    "expert_ffn_hidden_size": 16,
    "moe_ffn_hidden_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "dense_intermediate_size": 48,
    "intermediate_size_mlp": 48,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "num_dense_layers": 1,
    "zero_expert_num": 1,
    "kv_channels": 8,
    "d_kv": 8,
    "d_ff": 48,
    "max_window_layers": 1,
    "num_kv_shared_layers": 0,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "moe_latent_size": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
}
OWN = {"model_type", "transformers_version", "architectures", "dtype", "torch_dtype", "_name_or_path"}


def tiny(config: PreTrainedConfig, **changes: Any) -> PreTrainedConfig:
    """A configuration of the same class with two small layers. changes: fields to override."""
    given = {name: value for name, value in config.to_dict().items() if name not in OWN}
    names = dict(config.attribute_map)
    layers = getattr(config, "num_hidden_layers", LAYERS)
    heads = getattr(config, "num_attention_heads", HEADS)
    small: dict[str, Any] = {}
    for name, most in SIZES.items():
        own = names.get(name, name)
        if isinstance(given.get(own), int):
            small[own] = min(given[own], most)
        elif own == "head_dim" and own in given:
            small[own] = most  # what it is without: hidden_size by heads
    small[names.get("num_hidden_layers", "num_hidden_layers")] = LAYERS
    if isinstance(heads, int):
        small[names.get("num_attention_heads", "num_attention_heads")] = HEADS
    for name, value in given.items():
        if name.endswith(("num_key_value_heads", "num_kv_heads", "multi_query_group_num")) and name not in small:
            small[name] = HEADS if value is None or value == heads else min(value, 2)
        elif isinstance(value, (list, tuple)) and len(value) == layers and layers > LAYERS:
            small[name] = _both(list(value))
        elif is_window(name, value):
            small[name] = min(value, 1 if name.endswith("blocks") else WINDOW // 2 if "block" in name else WINDOW)
        elif name.endswith("_token_id") and isinstance(value, int):
            small[name] = {"pad_token_id": 0, "bos_token_id": 1}.get(name, 2)
    if isinstance(given.get("eos_token_id"), (list, tuple)):
        small["eos_token_id"] = 2
    return type(config)(**{**given, **small, **changes})


def is_window(name: str, value: Any) -> bool:
    """Whether a field of a configuration may bound how far a token sees."""
    number = isinstance(value, int) and not isinstance(value, bool) and value > 0
    return number and bool(WINDOWS.search(name)) and not NO_WINDOWS.search(name)


def _both(kinds: list[Any]) -> list[Any]:
    """Entries for two layers, of different kinds if there are several."""
    other = next((kind for kind in kinds if kind != kinds[0]), kinds[0])
    return [kinds[0], other]
