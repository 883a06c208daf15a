"""Unrolls drafting over a batch of texts: one pass over the prompts, then several drafting steps over the answers.

A column is a position of the draft network. Column c of an answer reads token c and the feature (hidden state) of the
token before. It predicts the feature of token c, from which the LM head predicts token c + 1. Column 0 is the first
token after the prompt.

Step 0 reads the target's features. At column c, step s reads the network's own feature, which step s - 1 computed at
column c - 1. This imitates a draft whose root is at column c - s. Column c attends to what the cache would hold in
decoding: columns of step 0 up to the root, and one column of each later step (HASS, Zhang et al. 2025; EAGLE-3's
training-time test, Li et al. 2025, section 3.2). The columns of later steps form a diagonal, for which
`diagonal_attention` needs no mask.

In shapes: B texts, M columns of the longest prompt, N of the longest answer, H hidden size, k layers whose features are
read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmdec.drafters.networks.draft_network import DraftNetwork, PromptInput, stack_conditions
from mmdec.drafters.networks.layers import KeyValues
from mmdec.drafters.networks.training.teacher import TargetFeatures


@dataclass(frozen=True)
class UnrollInputs:
    """The draft network's inputs for a batch, padded on the right.

    They are B prompts of up to M columns (positions of the network), and B answers of up to N columns. An answer has a
    column for each token but the last one, after which nothing is drafted.
    """

    states: Tensor  # (B, M, H) inputs of the network's first layer at the prompts' columns
    prompt_positions: Tensor  # (B, M) position ids; (3, B, M) for a network with M-RoPE
    prompt_mask: Tensor  # (B, M) bool, False at padding
    # (B, 1, H) a vector that is computed once from each prompt, and read at all later positions, as in ViSpec; else
    # None
    condition: Tensor | None
    tokens: Tensor  # (B, N) int64 ids of the answers' tokens
    next_tokens: Tensor  # (B, N) int64 ids of the tokens that follow them
    embeds: Tensor  # (B, N, H) embeddings of the answers' tokens
    features: Tensor  # (B, N, k * H) hidden states of k target layers at the token before each answer token
    positions: Tensor  # (B, N), or (3, B, N), position ids of the answers' tokens
    mask: Tensor  # (B, N) bool, False at padding


def unroll_inputs(network: DraftNetwork, texts: Sequence[TargetFeatures], noise: float = 0.0) -> UnrollInputs:
    """Make the network's inputs for a batch of texts; prompts are processed as in decoding.

    Args:
        texts: The target's features.
        noise: Random noise U(-noise, noise) * 512 / L is added to the features, where L is the text's number of tokens;
            EAGLE uses 0.1.
    """
    prompts, answers, embeds, features, positions = [], [], [], [], []
    for text in texts:
        begin, states = text.prompt, text.features
        if noise:
            states = states + (torch.rand_like(states) * 2 - 1) * (noise * 512 / len(states))
        prompts.append(network.prompt(text.embeds[:begin], states[:begin], text.visual[:begin]))
        answers.append(torch.tensor(text.answer, device=states.device))
        embeds.append(text.embeds[begin:])
        features.append(states[begin - 1 : -1])
        positions.append(_positions(network, text, prompts[-1]))
    return UnrollInputs(
        states=pad_sequence([prompt.states for prompt in prompts], batch_first=True),
        prompt_positions=_stack_positions([before for before, _ in positions]),
        prompt_mask=_padding_mask([len(prompt.states) for prompt in prompts], embeds[0].device),
        condition=stack_conditions(prompts),
        tokens=pad_sequence([answer[:-1] for answer in answers], batch_first=True),
        next_tokens=pad_sequence([answer[1:] for answer in answers], batch_first=True),
        embeds=pad_sequence(embeds, batch_first=True),
        features=pad_sequence(features, batch_first=True),
        positions=_stack_positions([after for _, after in positions]),
        mask=_padding_mask([len(part) for part in embeds], embeds[0].device),
    )


def _positions(network: DraftNetwork, text: TargetFeatures, prompted: PromptInput) -> tuple[Tensor, Tensor]:
    """Return the position ids of the network's inputs, as in decoding.

    They are (axes, M) for the M inputs of a prompt, and (axes, N) for the N inputs of the answer.

    Args:
        prompted: The network's input for the prompt.
    """
    count, device = len(text.answer) - 1, text.embeds.device
    if text.positions is None or not network.config.uses_mrope:
        start = text.prompt - 1 if prompted.end is None else prompted.end
        return prompted.positions[None], torch.arange(start, start + count, device=device)[None]
    axes = text.positions[: network.config.mrope_axes]
    start = int(text.positions[:, text.prompt].max()) - 1
    after = torch.arange(start, start + count, device=device)
    return axes[:, : text.prompt - 1], after.expand(len(axes), -1)


def unroll_steps(network: DraftNetwork, columns: UnrollInputs, steps: int, through: bool = True) -> list[Tensor]:
    """Run drafting steps with all tokens of the answers as roots at once.

    Args:
        steps: Number of drafting steps; fewer are run if the answers are shorter.
        through: Let gradients flow from a step into earlier steps.

    Returns:
        For each step s, the network's hidden states (B, N - s, H) at answer tokens s ... N - 1.
    """
    length, features, outputs = columns.embeds.shape[1], columns.features, list[Tensor]()
    context, conditioned = prompt_keys(network, columns), network.condition_on(columns.condition)
    diagonals: list[list[KeyValues]] = [[] for _ in context]
    visible = additive_mask(causal_mask(columns.prompt_mask, length), columns.states.dtype)
    for step in range(min(steps, length)):
        enter = conditioned.fuse_drafted if step else conditioned.fuse
        states = enter(columns.embeds[:, step:], features)
        mask = visible[:, :, : length - step]
        for index, diagonal in enumerate(diagonals):
            layer = network.layer(index)
            queries, *pair = layer.project(states, columns.positions[..., step:])
            if step:
                diagonal.append((pair[0], pair[1]))
                mixed = diagonal_attention(queries, context[index], diagonal, mask)
                states = layer.after_attention(states, mixed)
            else:
                keys, values = (torch.cat(both, 2) for both in zip(context[index], pair, strict=True))
                context[index] = keys, values
                states = layer.attend(states, queries, keys, values, mask)
        states = network.output_norm(states)
        outputs.append(states)
        features = states[:, :-1] if through else states[:, :-1].detach()
    return outputs


def prompt_keys(network: DraftNetwork, columns: UnrollInputs) -> list[KeyValues]:
    """Return for each layer the prompts' keys and values (B, h, M, d): h heads with d channels."""
    states, pairs = columns.states, list[KeyValues]()
    for index in range(network.depth):
        layer = network.layer(index)
        queries, keys, values = layer.project(states, columns.prompt_positions)
        pairs.append((keys, values))
        if index + 1 < network.depth:
            states = layer.attend(states, queries, keys, values)
    return pairs


def diagonal_attention(queries: Tensor, context: KeyValues, diagonals: Sequence[KeyValues], mask: Tensor) -> Tensor:
    """Compute the attention of the newest drafted token of each root.

    It attends to the prompt and the answer up to the root, and to the tokens drafted from this root, one in each step.

    Args:
        queries: (B, heads, n, d), of roots 0 ... n - 1.
        context: Keys and values (B, h, S, d) of prompt and answer.
        diagonals: [s]: keys and values (B, h, n or more, d) of the tokens drafted in step s + 1; entry r is that of
            root r.
        mask: Additive (B, 1, n, S), to which of the S tokens of prompt and answer each root attends.

    Returns:
        (B, heads, n, d).
    """
    keys, values = context
    rows, groups, width, size = keys.shape
    count = queries.shape[2]
    queries = queries.view(rows, groups, -1, count, size) * size**-0.5
    before = queries @ keys[:, :, None].transpose(-1, -2) + mask[:, :, None]  # shape (B, h, heads / h, n, S)
    since = [(queries * step[:, :, None, :count]).sum(-1, keepdim=True) for step, _ in diagonals]
    weights = torch.cat([before, *(part.to(before.dtype) for part in since)], -1).softmax(-1)
    mixed = weights[..., :width].to(values.dtype) @ values[:, :, None]
    for index, (_, step) in enumerate(diagonals, width):
        mixed = mixed + weights[..., index : index + 1] * step[:, :, None, :count]
    return mixed.flatten(1, 2)


def causal_mask(prompt_mask: Tensor, length: int) -> Tensor:
    """Return the causal mask (B, N, M + N) bool of N roots.

    Each root attends to the M tokens of the prompt, and to the answer's tokens up to itself.

    Args:
        prompt_mask: (B, M), False at padding.
        length: N.
    """
    rows, device = len(prompt_mask), prompt_mask.device
    lower = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return torch.cat([prompt_mask[:, None].expand(-1, length, -1), lower.expand(rows, -1, -1)], 2)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask (B, 1, n, S) to add to attention scores: 0 where `visible` (B, n, S) is True, else -inf."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, -math.inf)[:, None]


def _stack_positions(positions: Sequence[Tensor]) -> Tensor:
    """Pad and stack the position ids of B texts, (axes, n) each.

    Returns:
        (B, longest), or (axes, B, longest) for several axes.
    """
    padded = pad_sequence([row.t() for row in positions], batch_first=True).permute(2, 0, 1)
    return padded if len(padded) > 1 else padded[0]


def _padding_mask(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return a mask (B, longest) bool of padded rows: True at the first `lengths[r]` places of row r."""
    return torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]
