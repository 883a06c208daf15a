"""Recognises texts that cannot be speech: texts that repeat themselves, or that are too long for their sound."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

MAX_TOKENS_PER_SECOND, EXTRA_TOKENS = 12, 24  # a text with more than 12 tokens per second, plus 24, cannot be speech
# maximum compression ratio of the token ids as bytes, Whisper's threshold; above it, text repeats
MAX_COMPRESSION_RATIO = 1.35


def is_runaway(tokens: Sequence[int], seconds: float, vocab_size: int) -> bool:
    """Return whether a text has too many tokens for `seconds` of sound, or repeats itself by its compression ratio."""
    if len(tokens) > MAX_TOKENS_PER_SECOND * seconds + EXTRA_TOKENS:
        return True
    return token_compression_ratio(tokens, vocab_size) > MAX_COMPRESSION_RATIO


def token_compression_ratio(tokens: Sequence[int], vocab_size: int) -> float:
    """Return the compression ratio of token ids, each written in as few bytes as hold the vocabulary's ids."""
    size = int(math.log2(vocab_size) / 8) + 1
    return compression_ratio(b"".join(token.to_bytes(size, "little") for token in tokens))


def compression_ratio(content: bytes) -> float:
    """Return the ratio of the sizes before and after zlib: high for a text that repeats itself, 0 for an empty text."""
    return len(content) / len(zlib.compress(content))


def has_end_token(tokens: Sequence[int], config: Any) -> bool:
    """Return whether a text ends with an end-of-text token, that is, was not cut off at the maximum length."""
    end = config.eos_token_id
    return bool(tokens) and tokens[-1] in (end if isinstance(end, (list, tuple)) else [end])
