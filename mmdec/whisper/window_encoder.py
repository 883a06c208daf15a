"""Runs a loaded Whisper's encoder on the log-mel features of a window, or of a part of it.

For the provisional text of a stream, the encoder reads only the sound and a margin of silence, instead of always 30 s.
This changes results, because the model was trained on windows of 30 s. The decoder needs some silence to end its text;
without silence, the decoder repeats itself (`repetition` recognises such texts).
"""

from __future__ import annotations

import math
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers import WhisperForConditionalGeneration
from transformers.activations import GELUActivation
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.whisper.modeling_whisper import WhisperAttention, WhisperEncoderLayer

from mmdec.kernels.cpu_features import has_bfloat16_products
from mmdec.kernels.onednn import attention, is_usable, linear
from mmdec.nn.int8 import Bfloat16Linear, Int8Linear
from mmdec.targets.hf_target import has_hooks, plain_linear, shallow_copy

FRAMES_PER_SECOND = 100  # mel frames per second of audio, of an extractor with the published Whispers' hop length
FEED_FORWARD_ROWS = 250  # number of states for which an int8 feed-forward network is computed at a time


def context_frames(features: Tensor, margin: float, frames_per_second: float = FRAMES_PER_SECOND) -> int:
    """Return how many frames of a window to encode: up to `margin` seconds after its last sound, in whole seconds.

    Frames at the end that equal the last frame are padding or digital silence.

    Args:
        features: (1, mels, T), the window's log-mel features.
        margin: Margin in seconds.
        frames_per_second: Mel frames per second of audio.
    """
    sounds = (features != features[..., -1:]).any(1)[0].nonzero()[:, 0]
    last = int(sounds[-1]) + 1 if len(sounds) else 0
    step = round(frames_per_second)  # whole seconds, so that few shapes occur
    return min(math.ceil((last + margin * frames_per_second) / step) * step, features.shape[-1])


def encode(encoder: Any, features: Tensor, frames: int) -> Tensor:
    """Return the encoder's states (B, frames / 2, H) of the first `frames` frames of features (B, mels, T).

    transformers' layers are computed without the overhead of their `forward`; in float32 on a CPU, oneDNN computes
    them.
    """
    x = gelu(encoder.conv1(features[..., :frames]))
    x = gelu(encoder.conv2(x)).transpose(1, 2)
    x = x + encoder.embed_positions.weight[: x.shape[1]]
    for layer in encoder.layers:
        if _is_stock_layer(layer):
            x = _run_stock_layer(layer, x)
        else:
            output = layer(x, None)
            x = output[0] if isinstance(output, tuple) else output  # some versions of transformers return a tuple
    return encoder.layer_norm(x)


def _is_stock_layer(layer: nn.Module) -> bool:
    """Return whether a layer is transformers' own, without hooks, and uses "sdpa" attention."""
    if type(layer) is not WhisperEncoderLayer or layer.training or has_hooks(layer):
        return False
    self_attention: Any = layer.self_attn
    if type(self_attention) is not WhisperAttention or has_hooks(self_attention):
        return False
    settings: Any = self_attention.config
    return settings._attn_implementation == "sdpa"


def _run_stock_layer(layer: Any, x: Tensor) -> Tensor:
    """Run one of transformers' own encoder layers over x (B, S, H)."""
    self_attention, kind = layer.self_attn, type(layer.fc1)
    y = layer.self_attn_layer_norm(x)
    if kind is Bfloat16Linear:
        y = y.bfloat16()
    queries = _linear(self_attention.q_proj, y) * self_attention.scaling
    parts = (queries, _linear(self_attention.k_proj, y), _linear(self_attention.v_proj, y))
    if kind is Int8Linear and has_bfloat16_products():
        parts = (part.bfloat16() for part in parts)
    heads = (part.unflatten(2, (self_attention.num_heads, -1)).transpose(1, 2) for part in parts)
    attended = attention(*heads).transpose(1, 2).flatten(2)
    x = _add(x, _linear(self_attention.out_proj, attended), self_attention.out_proj)
    if kind is not Int8Linear:
        return _add(x, _feed_forward(layer, x), layer.fc2)
    # a few rows at a time, which stay in the processor's cache
    return torch.cat([_add(rows, _feed_forward(layer, rows), layer.fc2) for rows in x.split(FEED_FORWARD_ROWS, 1)], 1)


def _feed_forward(layer: Any, x: Tensor) -> Tensor:
    """Return what the layer's feed-forward network adds to x (B, S, H)."""
    y = layer.final_layer_norm(x)
    if type(layer.fc1) is Bfloat16Linear:
        y = y.bfloat16()
    if type(layer.activation_fn) is GELUActivation and plain_linear(layer.fc1):
        y = linear(y, layer.fc1.weight, layer.fc1.bias, "gelu")
    else:
        y = layer.activation_fn(layer.fc1(y))
    return _linear(layer.fc2, y)


def _linear(module: Any, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias) if plain_linear(module) else module(x)


def _add(x: Tensor, product: Tensor, module: nn.Module) -> Tensor:
    """Return the sum of x and the product of `module`; in the product's memory, if nobody else reads it."""
    if product.dtype != x.dtype:
        return product.to(x.dtype).add_(x)  # a sum of two dtypes is far slower
    return product.add_(x) if plain_linear(module) else x + product


def can_shorten(encoder: nn.Module) -> bool:
    """Return whether `encode` may replace the encoder's `forward`: no `forward` inside the encoder was replaced."""
    return not any("forward" in vars(module) for module in encoder.modules())


@final
class WindowEncoder:
    """Runs a Whisper's encoder over windows. The model is not changed; its encoder's hooks are called.

    Args:
        model: The Whisper.
        margin: A window is encoded up to this many seconds after its sound, or to its end if None.
        frames_per_second: Mel frames per second of audio.
    """

    def __init__(
        self,
        model: WhisperForConditionalGeneration,
        margin: float | None = None,
        frames_per_second: float = FRAMES_PER_SECOND,
    ) -> None:
        self._encoder: Any = model.model.encoder
        self._frames_per_second = frames_per_second
        self._margin = margin if can_shorten(self._encoder) else None
        self._fast_encoder: Any = None  # a copy with its own `forward`, so that the encoder's hooks are called
        if can_shorten(self._encoder):
            self._fast_encoder = shallow_copy(self._encoder)
            vars(self._fast_encoder)["forward"] = self._fast_forward

    @torch.no_grad()
    def __call__(self, features: Tensor, to_end: bool = False) -> Tensor:
        """Return the encoder's states (1, S, H) of a window's features (1, mels, T).

        Args:
            to_end: Encode to the window's end, whatever the margin.
        """
        if self._margin is not None and not to_end:
            frames = context_frames(features, self._margin, self._frames_per_second)
            if frames < features.shape[-1]:
                return encode(self._encoder, features, frames)
        is_full = features.shape[-1] == 2 * self._encoder.config.max_source_positions
        run = self._encoder
        if self._fast_encoder is not None and is_full and is_usable(features):
            run = self._fast_encoder
        return run(features, return_dict=True).last_hidden_state

    def encoded_seconds(self, states: Tensor) -> float | None:
        """Return how many seconds of a window have the states (1, S, H); None for a whole window."""
        if states.shape[1] >= self._encoder.config.max_source_positions:
            return None
        return 2 * states.shape[1] / self._frames_per_second

    def _fast_forward(self, input_features: Tensor, **_: Any) -> BaseModelOutput:
        states: Any = encode(self._encoder, input_features, input_features.shape[-1])
        return BaseModelOutput(last_hidden_state=states)
