"""Registers tree attention with transformers under the name "mmdec_tree", on import (`mmdec.register`).

    model.set_attn_implementation(TREE_ATTENTION)

No other module changes transformers' registries. Passes without a draft attend as with "sdpa". transformers has a
second registry for masks: an implementation without an entry there gets no mask at all, not even a causal one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from mmdec.ops.onednn import attention
from mmdec.ops.tree_attention import TreeMask, tree_attention, with_sinks

TREE_ATTENTION = "mmdec_tree"
ALONE = "mmdec_alone"  # for models whose layers round their input


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
    trees: Sequence[TreeMask] = (),
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention: query (B, Hq, N, D), key and value (B, Hkv, S, D) -> (B, N, Hq, D).

    trees: the masks of a pass over a draft, one for each kind of layer.
    options: the other arguments that transformers passes to attention; only dropout, is_causal and s_aux (Hq,), the
        heads' sinks, have an effect.
    """
    dropout, is_causal, sinks = options.get("dropout", 0.0), options.get("is_causal"), options.get("s_aux")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    queries = query.shape[2]
    causal = (getattr(module, "is_causal", True) if is_causal is None else is_causal) and queries > 1
    # cross-attention of the same pass has another mask
    tree = next((tree for tree in trees if tree.additive is attention_mask), None)
    if tree is not None or (attention_mask is None and not causal and not dropout):
        return tree_attention(query, key, value, tree, scale, sinks).transpose(1, 2).contiguous(), None
    if sinks is not None:
        if attention_mask is None and causal:
            attention_mask = query.new_full((queries, key.shape[2]), torch.finfo(query.dtype).min)
            attention_mask = attention_mask.triu_(1 + key.shape[2] - queries)[None, None]
        each = sinks.view(1, -1, 1, 1).expand(len(query), -1, queries, 1)
        key, value, attention_mask = with_sinks(key, value, attention_mask, each)
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


def attend_alone(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of a model whose layers round their input: query (B, H, Q, D) -> (B, Q, H, D).

    A query's result has the same bits beside any other queries and rows. Matrix libraries sum in another order for
    other shapes, and layers that round to integers make a whole step of such a last bit.
    """
    query = query * (query.shape[-1] ** -0.5 if options.get("scaling") is None else options["scaling"])
    if getattr(module, "is_causal", False):
        queries, keys = query.shape[2], key.shape[2]
        if attention_mask is None and queries > 1:
            hidden = torch.ones(queries, keys, dtype=torch.bool, device=query.device).triu(1 + keys - queries)
            attention_mask = query.new_zeros(queries, keys).masked_fill_(hidden, -torch.inf)
        out = over_past(query, key, value, attention_mask)
    elif query.shape == key.shape:  # an encoder: always of one length, but for the number of rows
        rows = zip(query.split(1), key.split(1), value.split(1), strict=True)
        out = torch.cat([attention(*row) for row in rows])
    else:
        out = over_all(query, key, value)
    return out.transpose(1, 2).contiguous(), None


def over_past(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention over a text, for `attend_alone`: in double precision, whose differences vanish when it is rounded.

    query: (B, H, Q, D), scaled. key, value: (B, H, S, D). mask: additive, or None. Returns: (B, H, Q, D).
    """
    scores = torch.matmul(query.double(), key.transpose(2, 3).double())
    if mask is not None:
        scores += mask
    return torch.matmul(scores.softmax(-1), value.double()).to(query.dtype)


def over_all(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of all queries over all keys, for `attend_alone`: products of its own for each row's query.

    query: (B, H, Q, D), scaled. key, value: (B, H, S, D). mask: None. Returns: (B, H, Q, D).
    """
    found = torch.empty_like(query)
    for row in range(len(query)):
        across, own = key[row].transpose(1, 2), value[row]
        for place in range(query.shape[2]):
            one = query[row, :, place : place + 1]  # (H, 1, D)
            found[row, :, place : place + 1] = torch.matmul(torch.matmul(one, across).softmax(-1), own)
    return found


for _name, _attend in ((TREE_ATTENTION, attend), (ALONE, attend_alone)):
    AttentionInterface.register(_name, _attend)
    AttentionMaskInterface.register(_name, additive_mask)
