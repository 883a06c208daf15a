"""A smaller Whisper decoder made of some layers of a larger one, without a copy of its embeddings and output."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import WhisperForCausalLM, WhisperForConditionalGeneration


def decoder_of_layers(model: WhisperForConditionalGeneration, layers: Sequence[int]) -> WhisperForCausalLM:
    """A decoder of the model's `layers`, for transformers' assisted generation.

    It shares the model's embeddings, last norm and output, and reads the model's encoder states. Each layer is a copy:
    its index in the cache is its index in the smaller decoder.
    """
    config = copy.deepcopy(model.config)
    config.decoder_layers = len(layers)
    config._attn_implementation = model.config._attn_implementation
    with torch.device("meta"):  # every parameter is replaced below
        assistant = WhisperForCausalLM(config).eval()
    small: Any = assistant.model.decoder
    large = model.model.decoder
    for name in ("embed_tokens", "embed_positions", "layer_norm"):
        setattr(small, name, getattr(large, name))
    for index, layer in enumerate(layers):
        copied: Any = copy.deepcopy(large.layers[layer])
        copied.self_attn.layer_idx = copied.encoder_attn.layer_idx = index
        small.layers[index] = copied
    assistant.proj_out = model.proj_out
    assistant.generation_config = copy.deepcopy(model.generation_config)
    return assistant
