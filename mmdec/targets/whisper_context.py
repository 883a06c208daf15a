"""Whisper's encoder at the length of the sound and a margin, instead of always 30 s.

This is not the stock model: the decoder was trained on windows of 30 s, and a shorter one gives other states. By the
silence after the sound it knows where to end; without it, it repeats itself. `runs_away` recognises that.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import gelu

FRAMES = 100  # frames of features in a second
STEP = FRAMES  # lengths are whole seconds, so that few shapes occur
TOKENS_A_SECOND, TOKENS_MORE = 12, 24  # more tokens than this are no speech
COMPRESSIBLE = 1.35  # Whisper's own threshold of the compression ratio, in tokens


def context_frames(features: Tensor, margin: float) -> int:
    """How many frames of a window (1, mels, T) to read: those up to the last sound and a margin in seconds.

    Padding is what equals the window's last frame, so that the digital silence that ends a recording counts as padding.
    """
    sounds = (features != features[..., -1:]).any(1)[0].nonzero()[:, 0]
    heard = int(sounds[-1]) + 1 if len(sounds) else 0
    return min(math.ceil((heard + margin * FRAMES) / STEP) * STEP, features.shape[-1])


def encode(encoder: Any, features: Tensor, frames: int) -> Tensor:
    """The states (B, S, H) of the first `frames` frames of features (B, mels, T), S = frames / 2."""
    x = gelu(encoder.conv1(features[..., :frames]))
    x = gelu(encoder.conv2(x)).transpose(1, 2)
    x = x + encoder.embed_positions.weight[: x.shape[1]]
    for layer in encoder.layers:
        read = layer(x, None)
        x = read[0] if isinstance(read, tuple) else read  # as transformers' versions have it
    return encoder.layer_norm(x)


def can_shorten(encoder: nn.Module) -> bool:
    """Whether the encoder's own `forward` runs: one that was replaced may do more than `encode` knows."""
    return not any("forward" in vars(module) for module in encoder.modules())


def runs_away(tokens: Sequence[int], seconds: float, vocab_size: int) -> bool:
    """Whether text tokens are too many for the sound, or repeat themselves: they compress too well."""
    if len(tokens) > TOKENS_A_SECOND * seconds + TOKENS_MORE:
        return True
    size = int(math.log2(vocab_size) / 8) + 1
    content = b"".join(token.to_bytes(size, "little") for token in tokens)
    return bool(content) and len(content) / len(zlib.compress(content)) > COMPRESSIBLE


def ends(tokens: Sequence[int], config: Any) -> bool:
    """Whether a text has its end token; `generate` cuts it off otherwise."""
    end = config.eos_token_id
    return bool(tokens) and tokens[-1] in (end if isinstance(end, (list, tuple)) else [end])
