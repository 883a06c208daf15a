"""Runs Whisper's encoder over the sound and a margin, instead of always 30 s.

This is not the stock model: the decoder was trained on windows of 30 s, and a shorter one gives other states. Silence
after the sound tells the decoder where to end; without it, the decoder repeats itself. `runs_away` recognises that.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers.activations import GELUActivation
from transformers.models.whisper.modeling_whisper import WhisperAttention, WhisperEncoderLayer

from mmdec.ops.onednn import attention, linear
from mmdec.targets.hf_target import hooked, plain_linear

FRAMES = 100  # frames of features in a second
STEP = FRAMES  # lengths are whole seconds, so that few shapes occur
TOKENS_A_SECOND, TOKENS_MORE = 12, 24  # more than 12 tokens a second, plus 24, cannot be speech
COMPRESSIBLE = 1.35  # Whisper's own threshold of the compression ratio, in tokens


def context_frames(features: Tensor, margin: float) -> int:
    """How many frames of a window (1, mels, T) to read: those up to the last sound and a margin in seconds.

    Padding is what equals the window's last frame, so that the digital silence that ends a recording counts as padding.
    """
    sounds = (features != features[..., -1:]).any(1)[0].nonzero()[:, 0]
    heard = int(sounds[-1]) + 1 if len(sounds) else 0
    return min(math.ceil((heard + margin * FRAMES) / STEP) * STEP, features.shape[-1])


def encode(encoder: Any, features: Tensor, frames: int) -> Tensor:
    """Encode the first `frames` frames of features (B, mels, T) as states (B, S, H), S = frames / 2.

    Stock layers run without the overhead of a stock pass, and in float32 on a CPU by oneDNN.
    """
    x = gelu(encoder.conv1(features[..., :frames]))
    x = gelu(encoder.conv2(x)).transpose(1, 2)
    x = x + encoder.embed_positions.weight[: x.shape[1]]
    for layer in encoder.layers:
        if _stock(layer):
            x = _through(layer, x)
        else:
            read = layer(x, None)
            x = read[0] if isinstance(read, tuple) else read  # some versions of transformers return a tuple
    return encoder.layer_norm(x)


def _stock(layer: nn.Module) -> bool:
    """Return whether a layer is transformers' own, without hooks, and attends by "sdpa"."""
    if type(layer) is not WhisperEncoderLayer or layer.training or hooked(layer):
        return False
    own: Any = layer.self_attn
    if type(own) is not WhisperAttention or hooked(own):
        return False
    settings: Any = own.config
    return settings._attn_implementation == "sdpa"


def _through(layer: Any, x: Tensor) -> Tensor:
    """Run a stock layer over x (B, S, H)."""
    own, y = layer.self_attn, layer.self_attn_layer_norm(x)
    parts = (_linear(own.q_proj, y) * own.scaling, _linear(own.k_proj, y), _linear(own.v_proj, y))
    heads = (part.unflatten(2, (own.num_heads, -1)).transpose(1, 2) for part in parts)
    x = x + _linear(own.out_proj, attention(*heads).transpose(1, 2).flatten(2))
    y = layer.final_layer_norm(x)
    if type(layer.activation_fn) is GELUActivation and plain_linear(layer.fc1):
        y = linear(y, layer.fc1.weight, layer.fc1.bias, "gelu")
    else:
        y = layer.activation_fn(layer.fc1(y))
    return x + _linear(layer.fc2, y)


def _linear(module: Any, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias) if plain_linear(module) else module(x)


def can_shorten(encoder: nn.Module) -> bool:
    """Return whether the encoder has transformers' own `forward`: a replaced one may do more than `encode` does."""
    return not any("forward" in vars(module) for module in encoder.modules())


def runs_away(tokens: Sequence[int], seconds: float, vocab_size: int) -> bool:
    """Return whether text tokens are too many for `seconds` of sound, or repeat themselves: they compress too well."""
    if len(tokens) > TOKENS_A_SECOND * seconds + TOKENS_MORE:
        return True
    size = int(math.log2(vocab_size) / 8) + 1
    content = b"".join(token.to_bytes(size, "little") for token in tokens)
    return bool(content) and len(content) / len(zlib.compress(content)) > COMPRESSIBLE


def ends(tokens: Sequence[int], config: Any) -> bool:
    """Return whether a text has its end token; without it, `generate` has cut the text off."""
    end = config.eos_token_id
    return bool(tokens) and tokens[-1] in (end if isinstance(end, (list, tuple)) else [end])
