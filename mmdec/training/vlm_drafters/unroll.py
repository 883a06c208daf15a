"""Unrolls drafting over a batch of texts: one pass over the prompts, then several drafting steps over the answers.

Column c of an answer reads token c and the target's feature of the token before. It predicts the feature of token c,
from which the LM head predicts token c + 1. Column 0 is the root right after the prompt. Step 0 reads the target's
features. Step s reads at column c the network's own feature, which step s - 1 computed at column c - 1. In decoding,
this is a draft with its root at column c - s, and column c attends to what the draft's cache holds: the target's
columns up to the root, and one column of each step in between (HASS, Zhang et al. 2025; EAGLE-3's training-time test,
Li et al. 2025, section 3.2). So each root attends to the columns up to itself in step 0, and to one column in each
later step: a diagonal, for which `diagonal_attention` needs no mask.

B texts, M states of the longest prompt, N columns of the longest answer, H hidden size, k layers whose features are
read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmdec.nn.draft_network import DraftNetwork, Pair, Prompted
from mmdec.training.vlm_drafters.teacher import Reading


@dataclass(frozen=True)
class Columns:
    """The network's inputs for a batch: B prompts of up to M columns, and B answers of up to N columns, padded on the
    right. prompt_mask (B, M), mask (B, N): False at padding."""

    states: Tensor  # (B, M, H) inputs of the network's first layer at the prompts' columns
    prompt_positions: Tensor  # (B, M); (3, B, M) for a network that follows three axes of positions
    prompt_mask: Tensor
    carry: Tensor | None  # (B, 1, H) a vector of each prompt that all later columns read, as in ViSpec
    embeds: Tensor  # (B, N, H) embeddings of the answers' tokens
    features: Tensor  # (B, N, k * H) k layers' hidden states of the target at the token before each answer token
    positions: Tensor  # (B, N), or (3, B, N), positions of the answers' tokens
    mask: Tensor


def read_columns(network: DraftNetwork, texts: Sequence[Reading], noise: float = 0.0) -> Columns:
    """Run the network over the prompt of each text, as in decoding, and build the columns of the answers.

    noise: the features get additive noise U(-noise, noise) * 512 / L, where L is the text's length; EAGLE uses 0.1.
    """
    prompts, embeds, features, positions = [], [], [], []
    for text in texts:
        begin, states = text.prompt, text.features
        if noise:
            states = states + (torch.rand_like(states) * 2 - 1) * (noise * 512 / len(states))
        prompts.append(network.prompt(text.embeds[:begin], states[:begin], text.visual[:begin]))
        embeds.append(text.embeds[begin:])
        features.append(states[begin - 1 : -1])
        positions.append(_positions(network, text, prompts[-1]))
    return Columns(
        states=pad_sequence([prompt.states for prompt in prompts], batch_first=True),
        prompt_positions=_stacked([before for before, _ in positions]),
        prompt_mask=_filled([len(prompt.states) for prompt in prompts], embeds[0].device),
        carry=_carried([prompt.carry for prompt in prompts]),
        embeds=pad_sequence(embeds, batch_first=True),
        features=pad_sequence(features, batch_first=True),
        positions=_stacked([after for _, after in positions]),
        mask=_filled([len(part) for part in embeds], embeds[0].device),
    )


def _positions(network: DraftNetwork, text: Reading, prompted: Prompted) -> tuple[Tensor, Tensor]:
    """Return the positions of a prompt's M columns (axes, M) and of its answer's N (axes, N), as in decoding."""
    count, device = len(text.answer) - 1, text.embeds.device
    if text.positions is None or not network.config.follows:
        start = text.prompt - 1 if prompted.end is None else prompted.end
        return prompted.positions[None], torch.arange(start, start + count, device=device)[None]
    axes = text.positions[:1] if cast(Any, network.config).positions == "temporal" else text.positions
    start = int(text.positions[:, text.prompt].max()) - 1
    after = torch.arange(start, start + count, device=device)
    return axes[:, : text.prompt - 1], after.expand(len(axes), -1)


def unrolled(network: DraftNetwork, columns: Columns, steps: int, through: bool = True) -> list[Tensor]:
    """Run `steps` drafting steps from all answer columns at once, or fewer if no column is left.

    through: let gradients flow from a step into earlier steps.
    Returns: for each step s, the hidden states (B, N - s, H) of columns s ... N - 1.
    """
    length, features, outputs = columns.embeds.shape[1], columns.features, list[Tensor]()
    context = prompt_keys(network, columns)
    diagonals: list[list[Pair]] = [[] for _ in context]
    visible = additive(causal(columns.prompt_mask, length), columns.states.dtype)
    for step in range(min(steps, length)):
        enter = network.follow if step else network.fuse
        states = enter(columns.embeds[:, step:], features, columns.carry)
        mask = visible[:, :, : length - step]
        for index, own in enumerate(diagonals):
            queries, *pair = network.project(states, columns.positions[..., step:], index=index)
            if step:
                own.append((pair[0], pair[1]))
                mixed = diagonal_attention(queries, context[index], own, mask)
                states = network.after_attention(states, mixed, index=index)
            else:
                keys, values = (torch.cat(both, 2) for both in zip(context[index], pair, strict=True))
                context[index] = keys, values
                states = network.attend(states, queries, keys, values, mask, index=index)
        outputs.append(states)
        features = states[:, :-1] if through else states[:, :-1].detach()
    return outputs


def prompt_keys(network: DraftNetwork, columns: Columns) -> list[Pair]:
    """Compute the prompts' keys and values (B, h, M, d) in each layer: h heads with d channels."""
    states, pairs = columns.states, list[Pair]()
    for index in range(network.depth):
        queries, keys, values = network.project(states, columns.prompt_positions, index=index)
        pairs.append((keys, values))
        if index + 1 < network.depth:
            states = network.attend(states, queries, keys, values, None, index=index)
    return pairs


def diagonal_attention(queries: Tensor, context: Pair, own: Sequence[Pair], mask: Tensor) -> Tensor:
    """Compute the attention of the newest drafted token of each root: to the target's columns up to the root, and to
    the tokens drafted from this root, one in each step.

    queries: (B, heads, n, d) of roots 0 ... n - 1. context: keys and values (B, h, S, d) of S target columns. own:
        keys and values (B, h, n or more, d) of each step; column r belongs to root r, and only root r attends to it.
    mask: additive (B, 1, n, S), the target's columns that each root sees.
    Returns: (B, heads, n, d).
    """
    keys, values = context
    rows, groups, width, size = keys.shape
    count = queries.shape[2]
    queries = queries.view(rows, groups, -1, count, size) * size**-0.5
    before = queries @ keys[:, :, None].transpose(-1, -2) + mask[:, :, None]  # (B, h, heads / h, n, S)
    since = [(queries * step[:, :, None, :count]).sum(-1, keepdim=True) for step, _ in own]
    weights = torch.cat([before, *(part.to(before.dtype) for part in since)], -1).softmax(-1)
    mixed = weights[..., :width].to(values.dtype) @ values[:, :, None]
    for index, (_, step) in enumerate(own, width):
        mixed = mixed + weights[..., index : index + 1] * step[:, :, None, :count]
    return mixed.flatten(1, 2)


def causal(prompt_mask: Tensor, length: int) -> Tensor:
    """Return a mask (B, N, M + N) bool: each of the N roots sees the prompt's M columns and, of the answer's N columns,
    those up to the root. prompt_mask: (B, M), False at padding. length: N."""
    rows, device = len(prompt_mask), prompt_mask.device
    own = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return torch.cat([prompt_mask[:, None].expand(-1, length, -1), own.expand(rows, -1, -1)], 2)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Make a mask to add to attention scores. visible: (B, n, S) bool, which of S columns each of n roots sees. Returns
    (B, 1, n, S): 0 where visible, else minus infinity."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, -math.inf)[:, None]


def _carried(carries: Sequence[Tensor | None]) -> Tensor | None:
    """Stack the prompts' vectors that later columns read, (B, 1, ...); zeros for a prompt without one. Returns None if
    no prompt has one."""
    first = next((carry for carry in carries if carry is not None), None)
    if first is None:
        return None
    return torch.stack([torch.zeros_like(first) if carry is None else carry for carry in carries])[:, None]


def _stacked(positions: Sequence[Tensor]) -> Tensor:
    """Pad and stack the positions (axes, n) of B texts. Returns (B, longest), or (axes, B, longest) for several
    axes."""
    padded = pad_sequence([own.t() for own in positions], batch_first=True).permute(2, 0, 1)
    return padded if len(padded) > 1 else padded[0]


def _filled(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return a mask (B, longest) bool: True in the first columns of each of B rows, as many as its entry in
    `lengths`."""
    return torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]
