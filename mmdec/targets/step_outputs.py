"""Hidden states and attentions of a drafted text, in the layout in which stock `generate` gives them step by step.

A drafted run computes them in passes over trees, and does not keep them. So a finished text is read again: its prompt
in one pass, as stock does, and its new tokens in a second one, whose columns are the steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from mmdec.targets.states import cache_arguments
from mmdec.targets.windows import Windows

KINDS = ("hidden_states", "attentions")
FLAGS = tuple(f"output_{kind}" for kind in KINDS)
Steps = tuple[tuple[Tensor, ...], ...]  # for each decoding step, one tensor for each layer


def wanted(config: GenerationConfig) -> list[str]:
    """List which of `KINDS` a call asks for."""
    return [kind for kind in KINDS if config.return_dict_in_generate and getattr(config, f"output_{kind}")]


@torch.no_grad()
def step_outputs(
    model: PreTrainedModel, sequences: Tensor, mask: Tensor | None, positions: Tensor, kinds: list[str]
) -> dict[str, Steps]:
    """Read a finished text again.

    sequences: (B, L) prompts and new tokens. mask: (B, P), the prompts'; None: nothing is masked. positions: (B, P).
    kinds: which of `KINDS` to return.
    Returns: by kind, what stock `generate` returns under that name: the first step is the prompt's.
    """
    columns, windows = positions.shape[1], Windows.of(model.config)
    flags, cache = {f"output_{kind}": True for kind in kinds}, DynamicCache(config=model.config)
    first = _pass(model, sequences[:, :columns], mask, positions, cache, flags)
    steps = sequences.shape[1] - columns - 1
    found: dict[str, list[tuple[Tensor, ...]]] = {kind: [getattr(first, kind)] for kind in kinds}
    if steps > 0:
        following = positions[:, -1:] + torch.arange(1, steps + 1, device=positions.device)
        seen = None if mask is None else torch.cat([mask, mask.new_ones(len(mask), steps)], 1)
        rest = _pass(model, sequences[:, columns:-1], seen, following, cache, flags)
        for step in range(steps):
            if "hidden_states" in found:
                found["hidden_states"].append(tuple(states[:, step : step + 1] for states in rest.hidden_states))
            if "attentions" in found:
                maps = enumerate(rest.attentions)
                found["attentions"].append(
                    tuple(_row(map_, step, columns, _window(model, windows, layer)) for layer, map_ in maps)
                )
    return {kind: tuple(each) for kind, each in found.items()}


def _pass(
    model: PreTrainedModel, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: Any, flags: dict[str, bool]
) -> Any:
    return model(
        input_ids=ids,
        attention_mask=mask,
        **cache_arguments(model, cache, positions),
        use_cache=True,
        logits_to_keep=1,
        return_dict=True,
        **flags,
    )


def _window(model: PreTrainedModel, windows: Windows | None, layer: int) -> int | None:
    """Return the number of columns that a step sees in a layer's cache, its own included; None: all."""
    if windows is None:
        return None
    window = windows.layers[layer] if windows.kinds is None else windows.kinds[model.config.layer_types[layer]]
    return None if window is None else window.size


def _row(attention: Tensor | None, step: int, columns: int, window: int | None) -> Any:
    """Cut one step's map (B, H, 1, S) out of attention (B, H, N, S) of all steps. columns: the prompt's number."""
    if attention is None:  # only "eager" attention gives maps
        return None
    past = columns + step if window is None else min(columns + step, window - 1)
    end = attention.shape[3] - attention.shape[2] + step + 1
    return attention[:, :, step : step + 1, end - past - 1 : end]
