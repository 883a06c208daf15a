"""A naive reading of heads with a state (Medusa, Hydra, ReDrafter, MLPSpeculator), from the papers' formulas: one node,
one product at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from tests.support.naive_dflash import rotated


def naive_heads(
    state: dict[str, Tensor], config: Any, hidden: Tensor, text: Sequence[int], embedding: Tensor, head: Tensor
) -> Tensor:
    """Return the logits (V,) of the token after a root and the drafted tokens below it.

    Args:
        state: The network's tensors by name.
        config: Its configuration.
        hidden: (H,), the target's last hidden state before the root, past the prefix layer if there is one.
        text: The root and the drafted tokens.
        embedding: (V, H), the target's.
        head: (V, H), its LM head.
    """
    output = _OUTPUTS[config.kind](state, config, hidden, text, embedding)
    level = len(text) - 1
    if config.lm_heads != "target":
        own = f"lm_heads.{level if config.lm_heads == 'each' else 0}."
        return state[own + "weight"] @ output + state.get(own + "bias", torch.zeros(()))
    return head @ output


def _blocks(state: dict[str, Tensor], name: str, count: int, x: Tensor) -> Tensor:
    for index in range(count):
        block = f"{name}.{index}."
        inner = silu(state[block + "linear.weight"] @ x + state[block + "linear.bias"])
        if block + "res_connection.weight" in state:
            x = state[block + "res_connection.weight"] @ x + state[block + "res_connection.bias"]
        x = x + inner
    return x


def _medusa(state: dict[str, Tensor], config: Any, hidden: Tensor, text: Sequence[int], embedding: Tensor) -> Tensor:
    outputs = [_blocks(state, f"heads.levels.{level}", config.blocks, hidden) for level in range(config.heads)]
    if config.attention:
        outputs = _attend(state, config, outputs)
    return outputs[len(text) - 1]


def _attend(state: dict[str, Tensor], config: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Run Amphista's layer: all levels attend to all."""
    name, dim = "heads.attention.", config.head_dim

    def normed(x: Tensor, which: str) -> Tensor:
        return x / (x.square().mean() + config.rms_norm_eps).sqrt() * state[f"{name}{which}_layernorm.weight"]

    def parts(x: Tensor, which: str, place: int) -> list[Tensor]:
        split = list((state[f"{name}self_attn.{which}_proj.weight"] @ normed(x, "input")).split(dim))
        return split if which == "v" else [rotated(part, place, config.rope_theta) for part in split]

    queries, keys, values = ([parts(x, which, place) for place, x in enumerate(inputs)] for which in "qkv")
    outputs: list[Tensor] = []
    for x, own in zip(inputs, queries, strict=True):
        mixed: list[Tensor] = []
        for index, query in enumerate(own):
            group = index * config.num_key_value_heads // config.num_attention_heads
            weights = torch.stack([query @ key[group] for key in keys]).div(math.sqrt(dim)).softmax(0)
            mixed.append(sum((w * value[group] for w, value in zip(weights, values, strict=True)), torch.zeros(())))
        x = x + state[name + "self_attn.o_proj.weight"] @ torch.cat(mixed)
        read = normed(x, "post_attention")
        inner = silu(state[name + "mlp.gate_proj.weight"] @ read) * (state[name + "mlp.up_proj.weight"] @ read)
        outputs.append(x + state[name + "mlp.down_proj.weight"] @ inner)
    return outputs


def _hydra(state: dict[str, Tensor], config: Any, hidden: Tensor, text: Sequence[int], embedding: Tensor) -> Tensor:
    before: list[Tensor] = []
    if config.previous_head and len(text) > 1:
        before = [_hydra(state, config, hidden, text[:-1], embedding)]
    inputs = torch.cat([hidden, *(embedding[token] for token in text), *before])
    return _blocks(state, f"heads.levels.{len(text) - 1}", config.blocks, inputs)


def _recurrent(state: dict[str, Tensor], config: Any, hidden: Tensor, text: Sequence[int], embedding: Tensor) -> Tensor:
    memory = torch.zeros_like(hidden)
    for token in text:
        if config.summed:
            memory = memory + embedding[token]
            continue
        read = state["heads.rnn_w.weight"] @ embedding[token]
        memory = silu(read + state["heads.rnn_u.weight"] @ memory + state["heads.rnn_u.bias"])
    x = torch.cat([hidden, memory])
    if "heads.input_proj.weight" in state:
        x = state["heads.input_proj.weight"] @ x + state["heads.input_proj.bias"]
    return _blocks(state, "heads.blocks", config.blocks, x)


def _norm(x: Tensor) -> Tensor:
    return x / (x.square().mean() + 1e-6).sqrt()


def _mlp(state: dict[str, Tensor], config: Any, hidden: Tensor, text: Sequence[int], embedding: Tensor) -> Tensor:
    x = _norm(hidden) / math.sqrt(2) if config.scale_input else hidden
    weight = 0.5 ** (1 / (2 * config.heads))
    for level, token in enumerate(text):
        own = 0 if config.tied else level
        projected = state[f"heads.proj.{min(level, 1) if config.tied else level}.weight"] @ x
        table = state[f"heads.emb.{own}.weight"]
        summed = weight * projected + math.sqrt((1 - weight**2) * table.shape[1] / 2) * table[token]
        # the norm does not see the factor c, by which the formula here differs
        scale = (summed.square().mean() + weight**2 * 1e-6).sqrt()
        x = gelu(summed / scale * state[f"heads.ln.{own}.weight"] + state[f"heads.ln.{own}.bias"])
    return x


_OUTPUTS = {"medusa": _medusa, "hydra": _hydra, "recurrent": _recurrent, "mlp": _mlp}
