"""A simple reference for EAGLE-3 and P-EAGLE: from published tensors to logits, without a cache, one head at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


def naive_logits(
    state: dict[str, Tensor], options: dict[str, Any], embeds: Tensor, features: Tensor, drafted: Tensor
) -> Tensor:
    """Compute the logits (1 + D, Vd) after each column of a draft: after the root, then after each drafted token.

    state: tensors under speculators' names. options: `heads`, `dim`, `eps`, `theta`, and the flags of its config.
    embeds: (T, H) of tokens 1 ... T, the last one is the root. features: (T, k * Ht) of tokens 0 ... T - 1. drafted:
    (D, H), the embeddings of drafted tokens, or for P-EAGLE of its mask token.
    """
    dim, heads = options["dim"], options["heads"]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + options["eps"]).sqrt() * state[f"{name}.weight"]

    def product(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0.0)

    def fused(g: Tensor) -> Tensor:
        if options.get("norm_before_fc"):
            g = norm(g, "input_norm")
        if options.get("fc_norm"):
            g = torch.cat([norm(part, f"fc_norm.{i}") for i, part in enumerate(g.chunk(options["features"]))])
        return product(g, "fc")

    def rotated(x: Tensor, position: int) -> Tensor:
        angles = float(position) * (1.0 / options["theta"] ** (torch.arange(0, dim, 2).float() / dim))
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)  # angles in float32, as in transformers
        a, b = x[: dim // 2], x[dim // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin])

    def projected(x: Tensor, layer: str, which: str, position: int) -> list[Tensor]:
        parts = list(product(x, f"{layer}.self_attn.{which}_proj").split(dim))
        if which != "v" and options.get("qk_norm"):
            parts = [norm(part, f"{layer}.self_attn.{which}_norm") for part in parts]
        return parts if which == "v" else [rotated(part, position) for part in parts]

    inputs = [(e, fused(g)) for e, g in zip(embeds, features, strict=True)]
    logits: list[Tensor] = []
    for step in range(1 + len(drafted)):
        states, residuals = [], []
        for e, f in inputs:
            normed = norm(f, "layers.0.hidden_norm")
            states.append(torch.cat([norm(e, "layers.0.input_layernorm"), normed]))
            residuals.append(normed if options.get("norm_before_residual") else f)
        for index in range(options.get("layers", 1)):
            layer = f"layers.{index}"
            if index:
                residuals, states = states, [norm(x, f"{layer}.input_layernorm") for x in states]
            keys = [projected(x, layer, "k", position) for position, x in enumerate(states)]
            values = [projected(x, layer, "v", position) for position, x in enumerate(states)]
            outputs = []
            for position, x in enumerate(states):
                mixed = []
                for head, query in enumerate(projected(x, layer, "q", position)):
                    group = head * len(keys[0]) // heads
                    scores = torch.stack([query @ keys[j][group] for j in range(position + 1)]) / math.sqrt(dim)
                    mixed.append(sum(w * values[j][group] for j, w in enumerate(scores.softmax(0))))
                h = residuals[position] + product(torch.cat(mixed), f"{layer}.self_attn.o_proj")
                y = norm(h, f"{layer}.post_attention_layernorm")
                inner = silu(product(y, f"{layer}.mlp.gate_proj")) * product(y, f"{layer}.mlp.up_proj")
                outputs.append(h + product(inner, f"{layer}.mlp.down_proj"))
            states = outputs
        last = norm(states[-1], "norm")
        logits.append(product(last, "lm_head"))
        if step < len(drafted):
            own = last if options.get("norm_output") else states[-1]
            masked = "mask_hidden" in state
            inputs.append((drafted[step], fused(state["mask_hidden"][0, 0]) if masked else own))
    return torch.stack(logits)
