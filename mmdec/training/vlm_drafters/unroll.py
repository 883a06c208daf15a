"""A batch of texts as drafting processes them: the prompts once, then the answers' columns step by step.

Column c of an answer reads its token c together with the target's feature of the token before, and predicts the feature
of token c, from which the LM head predicts token c + 1. Column 0 is the root after the prompt. Step 0 reads the
target's features. At step s, column c reads the network's own feature, which step s - 1 computed at column c - 1. It
attends to what the cache of a draft with its root at column c - s holds: the target's columns up to the root, and one
column of each step in between (HASS, Zhang et al. 2025; EAGLE-3's training-time test, Li et al. 2025, section 3.2).

B texts, M states of the longest prompt, N columns of the longest answer, H hidden size, k layers whose features are
read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmdec.nn.draft_network import DraftNetwork
from mmdec.training.vlm_drafters.teacher import Reading


@dataclass(frozen=True)
class Columns:
    """The network's inputs for a batch, padded on the right. prompt_mask (B, M) and mask (B, N): False at padding."""

    states: Tensor  # (B, M, H) of the prompts, as the layer's inputs
    prompt_positions: Tensor  # (B, M)
    prompt_mask: Tensor
    carry: Tensor | None  # (B, 1, H), see `Prompted`
    embeds: Tensor  # (B, N, H) of the answers' tokens
    features: Tensor  # (B, N, k * H) of the tokens before them
    positions: Tensor  # (B, N)
    mask: Tensor


def read_columns(network: DraftNetwork, texts: Sequence[Reading], noise: float = 0.0) -> Columns:
    """Run the network over each prompt, as in decoding, and build the columns of the answers.

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
        positions.append(torch.arange(begin - 1, len(states) - 1, device=states.device))
    return Columns(
        states=pad_sequence([prompt.states for prompt in prompts], batch_first=True),
        prompt_positions=pad_sequence([prompt.positions for prompt in prompts], batch_first=True),
        prompt_mask=_filled([len(prompt.states) for prompt in prompts], embeds[0].device),
        carry=_carried([prompt.carry for prompt in prompts]),
        embeds=pad_sequence(embeds, batch_first=True),
        features=pad_sequence(features, batch_first=True),
        positions=pad_sequence(positions, batch_first=True),
        mask=_filled([len(part) for part in embeds], embeds[0].device),
    )


def unrolled(network: DraftNetwork, columns: Columns, steps: int, through: bool = True) -> list[Tensor]:
    """For each step s, the hidden states (B, N - s, H) of columns s ... N - 1; fewer steps if no column is left.

    through: let gradients flow from a step into those before it.
    """
    _, keys, values = network.project(columns.states, columns.prompt_positions)
    cached, features, outputs = (keys, values), columns.features, []
    length = columns.embeds.shape[1]
    for step in range(min(steps, length)):
        enter = network.follow if step else network.fuse
        states = enter(columns.embeds[:, step:], features, columns.carry)
        mask = step_mask(columns.prompt_mask, length, step)
        hidden, pair = network.layer(states, columns.positions[:, step:], cached, additive(mask, states.dtype))
        cached = torch.cat([cached[0], pair[0]], 2), torch.cat([cached[1], pair[1]], 2)
        outputs.append(hidden)
        features = hidden[:, :-1] if through else hidden[:, :-1].detach()
    return outputs


def step_mask(prompt_mask: Tensor, length: int, step: int) -> Tensor:
    """(B, N - s, M + N + (N - 1) + ... + (N - s)) bool: what each column c = s ... N - 1 attends to at step s.

    The prompt; of step 0 the columns up to c - s; of each step i = 1 ... s the column c - s + i.
    """
    rows, device = len(prompt_mask), prompt_mask.device
    queries = torch.arange(step, length, device=device)[:, None]
    parts = [torch.arange(length, device=device) <= queries - step]
    parts += [
        torch.arange(earlier, length, device=device) == queries - step + earlier for earlier in range(1, step + 1)
    ]
    columns = torch.cat(parts, 1).expand(rows, -1, -1)
    return torch.cat([prompt_mask[:, None].expand(-1, length - step, -1), columns], 2)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, n, S) bool -> (B, 1, n, S): 0 where visible, else minus infinity."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill(~visible, -math.inf)[:, None]


def _carried(carries: Sequence[Tensor | None]) -> Tensor | None:
    """Stack the `carry` of each prompt to (B, 1, ...); zeros for prompts without one."""
    first = next((carry for carry in carries if carry is not None), None)
    if first is None:
        return None
    return torch.stack([torch.zeros_like(first) if carry is None else carry for carry in carries])[:, None]


def _filled(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Mask (B, longest) bool: True before each length's end."""
    return torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]
