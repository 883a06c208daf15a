"""A simple reference for DFlash: from published tensors to a block's logits, without a cache, one head at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


def naive_block(
    state: dict[str, Tensor], options: dict[str, Any], block: Tensor, features: Tensor, head: Tensor, start: int = 0
) -> Tensor:
    """Compute the logits (b, V) of each token of a block.

    state: tensors under the published names. options: `heads`, `dim`, `eps`, `theta`, `layers`. block: (b, H), the
    embeddings of the root and of the mask tokens. features: (T, k * H) of all tokens before the root. head: (V, H).
    start: the position of the first token.
    """
    dim, heads = options["dim"], options["heads"]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + options["eps"]).sqrt() * state[f"{name}.weight"]

    def product(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0.0)

    def rotated(x: Tensor, position: int) -> Tensor:
        angles = float(position) * (1.0 / options["theta"] ** (torch.arange(0, dim, 2).float() / dim))
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)  # angles in float32, as in transformers
        a, b = x[: dim // 2], x[dim // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin])

    def projected(x: Tensor, layer: str, which: str, position: int) -> list[Tensor]:
        parts = list(product(x, f"{layer}.self_attn.{which}_proj").split(dim))
        if which == "v":
            return parts
        return [rotated(norm(part, f"{layer}.self_attn.{which}_norm"), position) for part in parts]

    read = [norm(product(g, "fc"), "hidden_norm") for g in features]
    states = list(block)
    for index in range(options["layers"]):
        layer = f"layers.{index}"
        columns = [*read, *(norm(x, f"{layer}.input_layernorm") for x in states)]
        keys = [projected(x, layer, "k", start + place) for place, x in enumerate(columns)]
        values = [projected(x, layer, "v", start + place) for place, x in enumerate(columns)]
        for place, x in enumerate(states):
            mixed = []
            for head_index, query in enumerate(
                projected(columns[len(read) + place], layer, "q", start + len(read) + place)
            ):
                group = head_index * len(keys[0]) // heads
                scores = torch.stack([query @ key[group] for key in keys]) / math.sqrt(dim)
                mixed.append(sum(w * value[group] for w, value in zip(scores.softmax(0), values, strict=True)))
            h = x + product(torch.cat(mixed), f"{layer}.self_attn.o_proj")
            y = norm(h, f"{layer}.post_attention_layernorm")
            inner = silu(product(y, f"{layer}.mlp.gate_proj")) * product(y, f"{layer}.mlp.up_proj")
            states[place] = h + product(inner, f"{layer}.mlp.down_proj")
    return torch.stack([norm(x, "norm") for x in states]) @ head.T
