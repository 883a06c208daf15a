"""On import, registers tree attention with transformers under the name "mmdec_tree" (see `mmdec.register_attention`).

    model.set_attn_implementation(TREE_ATTENTION)

Passes without a draft attend as with "sdpa". transformers has a second registry, for functions that make masks. The
name is registered in both, because otherwise transformers would pass no mask, not even a causal one.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from mmdec.kernels.tree_attention import TreeMask, tree_attention, with_sinks

TREE_ATTENTION = "mmdec_tree"
# tree masks of the current pass over a draft, one for each type of layer
_pass_trees: ContextVar[Sequence[TreeMask]] = ContextVar("trees", default=())


@contextmanager
def tree_masks(trees: Sequence[TreeMask]) -> Generator[None]:
    """In this context, attention with the mask `additive` of one of these trees is tree attention."""
    token = _pass_trees.set(trees)
    try:
        yield
    finally:
        _pass_trees.reset(token)


def find_tree(attention_mask: Tensor | None) -> TreeMask | None:
    """Return the tree whose `additive` is a layer's mask; None if the layer does not attend to a draft's nodes."""
    return next((tree for tree in _pass_trees.get() if tree.additive is attention_mask), None)


def additive_sdpa_mask(*args: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Tensor | None:
    """Make an additive float mask (B, 1, queries, keys). args, kwargs: those of transformers' `sdpa_mask`.

    Returns:
        None if plain causal masking is enough.
    """
    visible = sdpa_mask(*args, **kwargs)
    if visible is None:
        return None
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, torch.finfo(dtype).min)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention. transformers calls this function in each attention layer.

    Args:
        query: (B, query heads, N, D).
        key, value: (B, key heads, S, D).
        options: Other arguments that transformers passes. Only dropout, is_causal and s_aux, the attention sinks
            (query heads,), have an effect.

    Returns:
        (B, N, query heads, D), and None instead of an attention map.
    """
    dropout, is_causal, sinks = options.get("dropout", 0.0), options.get("is_causal"), options.get("s_aux")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    queries = query.shape[2]
    causal = (getattr(module, "is_causal", True) if is_causal is None else is_causal) and queries > 1
    # None in cross-attention, whose `attention_mask` hides encoder states and belongs to no draft tree
    tree = find_tree(attention_mask)
    if tree is not None or (attention_mask is None and not causal and not dropout):
        return tree_attention(query, key, value, tree, scale, sinks).transpose(1, 2).contiguous(), None
    if sinks is not None:
        if attention_mask is None and causal:
            attention_mask = query.new_full((queries, key.shape[2]), torch.finfo(query.dtype).min)
            attention_mask = attention_mask.triu_(1 + key.shape[2] - queries)[None, None]
        sinks_of_queries = sinks.view(1, -1, 1, 1).expand(len(query), -1, queries, 1)
        key, value, attention_mask = with_sinks(key, value, attention_mask, sinks_of_queries)
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scale,
        is_causal=attention_mask is None and causal,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(TREE_ATTENTION, attend)
AttentionMaskInterface.register(TREE_ATTENTION, additive_sdpa_mask)
