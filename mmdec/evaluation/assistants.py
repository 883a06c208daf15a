"""Smaller Whispers for transformers' assisted generation: given ones, or some of a model's own decoder layers.

A distilled assistant shares the large model's encoder, as distil-whisper does (Gandhi et al. 2023, section 3.3). Where
none is at hand, layers of the model itself, untrained for the purpose, are what one can have for nothing: which ones
work best is a matter of trial.
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from transformers import WhisperForCausalLM, WhisperForConditionalGeneration

from mmdec.evaluation.harness import Method
from mmdec.hub.whisper import load_whisper


def assistants(model: WhisperForConditionalGeneration, directory: str | os.PathLike[str] | None) -> list[Method]:
    """Methods with an assistant: the one in `directory`, or for None several choices of the model's layers."""
    if directory is not None:
        smaller = load_whisper(directory, model.device).model
        return [_method(f"assistant {os.path.basename(os.fspath(directory))}", smaller)]
    last = model.config.decoder_layers - 1
    choices = {(0, last), (*range(0, last, 2), last), tuple(range(last))}
    return [
        _method(f"assistant of decoder layers {', '.join(map(str, layers))}", of_layers(model, layers))
        for layers in sorted(choices)
        if layers
    ]


def of_layers(model: WhisperForConditionalGeneration, layers: tuple[int, ...]) -> WhisperForCausalLM:
    """A decoder of some of the model's layers, whose weights, embeddings and output it shares; it reads the model's
    encoder states."""
    config = copy.deepcopy(model.config)
    config.decoder_layers = len(layers)
    config._attn_implementation = model.config._attn_implementation
    with torch.device("meta"):
        made = WhisperForCausalLM(config).eval()
    own: Any = made.model.decoder
    theirs = model.model.decoder
    for name in ("embed_tokens", "embed_positions", "layer_norm"):
        setattr(own, name, getattr(theirs, name))
    for place, layer in enumerate(layers):
        copied: Any = copy.deepcopy(theirs.layers[layer])
        copied.self_attn.layer_idx = copied.encoder_attn.layer_idx = place  # its place in the cache
        own.layers[place] = copied
    made.proj_out = model.proj_out
    made.generation_config = copy.deepcopy(model.generation_config)
    return made


def _method(name: str, network: Any) -> Method:
    return Method(name, "generate", {"assistant_model": network}, networks=[network])
