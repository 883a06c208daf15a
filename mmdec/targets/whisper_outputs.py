"""Attentions and hidden states of a finished text, cut into the steps of transformers' own loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationConfig


def output_states(
    decoded: Any, encoded: Mapping[str, Any], prompt: int, length: int, config: GenerationConfig
) -> dict[str, Any]:
    """What an output object holds besides tokens, scores and cache, as far as `config` asks for it.

    decoded: the decoder's output for `length` columns, of which the first `prompt` are the prompt's; encoded: the
    encoder's output.
    """
    states: dict[str, Any] = {}
    if config.output_attentions:
        states["decoder_attentions"] = _steps(decoded.attentions, prompt, length, 2, square=True)
        states["cross_attentions"] = _steps(decoded.cross_attentions, prompt, length, 2)
        states["encoder_attentions"] = encoded.get("attentions")
    if config.output_hidden_states:
        states["decoder_hidden_states"] = _steps(decoded.hidden_states, prompt, length, 1)
        states["encoder_hidden_states"] = encoded.get("hidden_states")
    return states


def _steps(
    layers: tuple[Tensor, ...], prompt: int, length: int, axis: int, square: bool = False
) -> tuple[tuple[Tensor, ...], ...]:
    """Each layer's (..., T, ...) of `length` columns: the prompt's, then one tuple for each later token. Empty tuples
    where there are no layers ("sdpa" gives no attentions). `square` attentions see no column after their own."""
    cuts = [(0, prompt), *((step, step + 1) for step in range(prompt, length))]
    return tuple(
        tuple((layer[..., :end] if square else layer).narrow(axis, begin, end - begin) for layer in layers)
        for begin, end in cuts
    )
