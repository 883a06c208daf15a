"""A simple reference for DFlash, DSpark, DFlash 2 and Domino: from published tensors to logits, without a cache, one
head at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


def naive_block(
    state: dict[str, Tensor], options: dict[str, Any], block: Tensor, features: Tensor, start: int = 0
) -> Tensor:
    """Compute the normed states (b, H) of each token of a block.

    state: tensors under the published names. options: `heads`, `dim`, `eps`, `theta`, `layers`. block: (b, H), the
    embeddings of the root and of the mask tokens. features: (T, k * H) of all tokens before the root. start: the
    position of the first token.
    """
    dim, heads = options["dim"], options["heads"]

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + options["eps"]).sqrt() * state[f"{name}.weight"]

    def product(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", 0.0)

    def projected(x: Tensor, layer: str, which: str, position: int) -> list[Tensor]:
        parts = list(product(x, f"{layer}.self_attn.{which}_proj").split(dim))
        if which == "v":
            return parts
        normed = [norm(part, f"{layer}.self_attn.{which}_norm") for part in parts]
        return [rotated(part, position, options["theta"]) for part in normed]

    def convolved(xs: list[Tensor], inputs: list[Tensor], name: str, which: int) -> list[Tensor]:
        """With DFlash 2's two taps; xs and inputs: one vector for each token of the block."""
        if f"{name}.base_kernel" not in state:
            return xs
        result = []
        for place, (x, read) in enumerate(zip(xs, inputs, strict=True)):
            corrections = product(read, f"{name}.kernel_projection").view(2, 2, -1)[which]
            y = torch.zeros_like(x)
            for channel in range(len(x)):
                group = channel * corrections.shape[1] // len(x)
                for tap in range(min(2, place + 1)):
                    weight = state[f"{name}.base_kernel"][which, tap, channel] + corrections[tap, group]
                    y[channel] += weight * xs[place - tap][channel]
            result.append(y)
        return result

    read = [norm(product(g, "fc"), "hidden_norm") for g in features]
    states = list(block)
    for index in range(options["layers"]):
        layer = f"layers.{index}"
        normed = [norm(x, f"{layer}.input_layernorm") for x in states]
        columns = [*read, *convolved(normed, normed, f"{layer}.attention_conv", 0)]
        keys = [projected(x, layer, "k", start + place) for place, x in enumerate(columns)]
        values = [projected(x, layer, "v", start + place) for place, x in enumerate(columns)]
        outputs = []
        for place in range(len(states)):
            mixed = []
            for head_index, query in enumerate(
                projected(columns[len(read) + place], layer, "q", start + len(read) + place)
            ):
                group = head_index * len(keys[0]) // heads
                scores = torch.stack([query @ key[group] for key in keys]) / math.sqrt(dim)
                mixed.append(sum(w * value[group] for w, value in zip(scores.softmax(0), values, strict=True)))
            outputs.append(product(torch.cat(mixed), f"{layer}.self_attn.o_proj"))
        outputs = convolved(outputs, normed, f"{layer}.attention_conv", 1)
        states = [x + y for x, y in zip(states, outputs, strict=True)]
        normed = [norm(x, f"{layer}.post_attention_layernorm") for x in states]
        outputs = [
            product(
                silu(product(y, f"{layer}.mlp.gate_proj")) * product(y, f"{layer}.mlp.up_proj"),
                f"{layer}.mlp.down_proj",
            )
            for y in convolved(normed, normed, f"{layer}.mlp_conv", 0)
        ]
        outputs = convolved(outputs, normed, f"{layer}.mlp_conv", 1)
        states = [x + y for x, y in zip(states, outputs, strict=True)]
    return torch.stack([norm(x, "norm") for x in states])


def rotated(x: Tensor, position: int, theta: float) -> Tensor:
    """Apply the rotary position to one head's channels (d,)."""
    angles = float(position) * (1.0 / theta ** (torch.arange(0, len(x), 2).float() / len(x)))
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)  # angles in float32, as in transformers
    a, b = x.chunk(2)
    return torch.cat([a * cos - b * sin, b * cos + a * sin])


def naive_head(
    state: dict[str, Tensor],
    options: dict[str, Any],
    normed: Tensor,
    path: list[int],
    embedding: Tensor,
    head: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Compute the logits (V,) of the token after a path in a block, and the confidence in it if there is such a head.

    normed: (b, H), from `naive_block`. path: the root and drafted tokens. embedding: (tokens, H). head: (V, H).
    options: also `anchor`, whether the root's state predicts a token; `candidates`; `plain_prefix`.
    """
    depth = len(path) - 1
    first = 0 if options["anchor"] else 1
    n = normed[first + depth]
    logits = head @ n
    if "candidate_selector.predecessor_codebook" in state:
        gate = state["candidate_selector.hidden_projection.weight"] @ n
        a = state["candidate_selector.predecessor_codebook"][path[-1]]
        best = logits.argsort(descending=True)[: options["candidates"]].tolist()
        scores = torch.full_like(logits, -math.inf)
        for token in best:
            b = state["candidate_selector.successor_codebook"][token]
            scores[token] = logits[token] + (a * gate * b).sum()
        return scores, None
    if "prefix_gru.weight_ih_l0" in state:
        if depth < options["plain_prefix"]:
            return logits, None
        gru = torch.nn.GRU(embedding.shape[1], state["prefix_gru.weight_hh_l0"].shape[1], bias=False).to(n.dtype)
        gru.load_state_dict({name[11:]: value for name, value in state.items() if name.startswith("prefix_gru.")})
        memory = gru(embedding[path])[0][-1]
        inner = silu(state["embed_proj.0.weight"] @ torch.cat([n, memory]))
        return logits + state["embed_proj.2.weight"] @ inner, None
    if "markov_head.markov_w1.weight" not in state:
        return logits, None
    above = [state["markov_head.markov_w1.weight"][token] for token in path]
    w = above[-1]
    bias = w
    if "markov_head.gate_proj.weight" in state:
        z = state["markov_head.gate_proj.weight"] @ torch.cat([n, w]) + state["markov_head.gate_proj.bias"]
        bias = torch.sigmoid(z) * w
    if "markov_head.joint_proj.weight" in state:
        s = torch.zeros_like(w)
        # every slot of the block has its turn; a root that predicts nothing reads itself
        turns = list(zip(normed, above if options["anchor"] else [above[0], *above], strict=False))
        for slot, vector in turns:
            z = state["markov_head.joint_proj.weight"] @ torch.cat([s, vector, slot])
            g, c, o = (z + state["markov_head.joint_proj.bias"]).chunk(3)
            s = torch.sigmoid(g) * s + (1 - torch.sigmoid(g)) * torch.tanh(c)
            bias = torch.tanh(o)
    logits = logits + state["markov_head.markov_w2.weight"] @ bias
    if "confidence_head.proj.weight" not in state:
        return logits, None
    weight = state["confidence_head.proj.weight"][0]
    read = torch.cat([n, w])[: len(weight)]
    return logits, torch.sigmoid(weight @ read + state["confidence_head.proj.bias"][0])
