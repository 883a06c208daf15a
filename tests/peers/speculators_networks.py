"""Computes the logits of speculators' draft networks, step by step, and those of mmdec's networks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TOKENS, DRAFTED, SIZE, STEPS = 64, 40, 32, 4
LAYER: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": SIZE,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def fused(peer: Any, features: Tensor) -> Tensor:
    if peer.input_norm is not None:
        features = peer.input_norm(features)
    if peer.fc_norm is not None:
        parts = features.chunk(len(peer.fc_norm), -1)
        features = torch.cat([norm(part) for norm, part in zip(peer.fc_norm, parts, strict=True)], -1)
    return peer.fc(features)


def through(peer: Any, embeds: Tensor, hidden: Tensor) -> Tensor:
    """Run speculators' layers over whole rows (1, L, H), with a causal mask. Positions begin at 1, as there."""
    length = embeds.shape[1]
    states = torch.cat([embeds, hidden], -1)
    positions = torch.arange(1, length + 1)[None]
    rotations = peer.rotary_emb(states, positions)
    mask = torch.full((1, 1, length, length), float("-inf")).triu(1)
    for layer in peer.layers:
        states = layer(states, attention_mask=mask, position_ids=positions, position_embeddings=rotations)
    return states


def peers_logits(peer: Any, tokens: Tensor, features: Tensor, drafted: list[int], parallel: bool) -> Tensor:
    """Compute the logits (STEPS, D) of speculators' network. tokens: (T,). features: (T, k * H), each of the token
    before. drafted: the tokens to append, one by one. parallel: P-EAGLE, which appends its mask token instead."""
    embeds, hidden, logits = peer.embed_tokens(tokens[None]), fused(peer, features[None]), []
    for step in range(STEPS):
        last = through(peer, embeds, hidden)[:, -1:]
        out = peer.norm(last)
        logits.append(peer.lm_head(out)[0, 0])
        token = peer.mask_token_id if parallel else drafted[step]
        own = fused(peer, peer.mask_hidden) if parallel else out if peer.config.norm_output else last
        embeds = torch.cat([embeds, peer.embed_tokens(torch.tensor([[token]]))], 1)
        hidden = torch.cat([hidden, own], 1)
    return torch.stack(logits)


def our_logits(network: Any, tokens: Tensor, features: Tensor, drafted: list[int]) -> Tensor:
    """Compute the logits (STEPS, D) of mmdec's network, with a cache. Arguments: as for `peers_logits`."""
    embed, head = network.embed_tokens, torch.nn.Linear(1, 1)
    positions = torch.arange(len(tokens))[None]
    hidden, pair = network(network.fuse(embed(tokens)[None], features[None]), positions)
    logits, hidden = [], hidden[:, -1:]
    for step in range(STEPS):
        logits.append(network.logits(hidden[0, 0], head))
        if network.config.mask_token is not None:
            states = network.masked_input(embed(torch.tensor(network.config.mask_token)))[None, None]
        else:
            states = network.fuse_drafted(embed(torch.tensor([[drafted[step]]])), hidden)
        hidden, own = network(states, torch.tensor([[len(tokens) + step]]), pair)
        pair = torch.cat([pair[0], own[0]], 2), torch.cat([pair[1], own[1]], 2)
    return torch.stack(logits)
