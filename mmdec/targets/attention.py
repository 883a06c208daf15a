"""Registers tree attention with transformers under the name "mmdec_tree", on import (`mmdec.register`).

    model.set_attn_implementation(TREE_ATTENTION)

No other module changes transformers' registries. Passes without a draft attend as with "sdpa". transformers has a
second registry for masks: an implementation without an entry there gets no mask at all, not even a causal one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from mmdec.ops.tree_attention import TreeMask, tree_attention

TREE_ATTENTION = "mmdec_tree"


def additive_mask(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Tensor | None:
    """A mask (B, 1, Q, S) of floats to add to scores; None if plain causal masking suffices."""
    seen = sdpa_mask(*args, **kwargs)
    if seen is None:
        return None
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree: TreeMask | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention: query (B, Hq, N, D), key and value (B, Hkv, S, D) -> (B, N, Hq, D).

    tree: the draft's mask, in a pass over a draft. options: the other arguments that transformers passes to attention;
        only dropout and is_causal have an effect.
    """
    dropout, is_causal = options.get("dropout", 0.0), options.get("is_causal")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    queries = query.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if tree is not None and attention_mask is tree.additive:  # cross-attention of the same pass has another mask
        out = tree_attention(query, key, value, tree, scale)
    elif attention_mask is None and (queries == 1 or not causal) and not dropout:
        out = tree_attention(query, key, value, None, scale)
    else:
        out = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=dropout,
            scale=scale,
            is_causal=attention_mask is None and causal and queries > 1,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(TREE_ATTENTION, attend)
AttentionMaskInterface.register(TREE_ATTENTION, additive_mask)
