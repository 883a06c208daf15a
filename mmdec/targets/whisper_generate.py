"""What Whisper's own `generate` does besides the decoding loop: logits processors, languages, attention, warnings."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers import WhisperForConditionalGeneration
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)
from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

OWN_WARNINGS = ("Passing `generation_config` together with", "Both `max_new_tokens`")
LANGUAGE_CODES: dict[str, str] = TO_LANGUAGE_CODE  # English name in lower case -> code: "french" -> "fr"


def generate_processors(
    model: WhisperForConditionalGeneration, prompt_length: int, timestamps: bool
) -> list[Callable[[Tensor, Tensor], Tensor]]:
    """The logits processors of `generate`, in its order, for prompts of `prompt_length` columns. timestamps: whether
    the text is under the rules for timestamp tokens."""
    config: Any = model.generation_config
    device: Any = model.device  # transformers declares a str
    processors: list[Any] = []
    if config.begin_suppress_tokens is not None:
        begin = SuppressTokensAtBeginLogitsProcessor(config.begin_suppress_tokens, prompt_length, device=device)
        processors.append(begin)
    if config.suppress_tokens is not None:
        processors.append(SuppressTokensLogitsProcessor(config.suppress_tokens, device=device))
    if timestamps:
        processors.append(WhisperTimeStampLogitsProcessor(config, begin_index=prompt_length))
    return processors


@contextmanager
def attention_restored(model: WhisperForConditionalGeneration) -> Iterator[None]:
    """At the end the model has the attention implementation that it has now: `generate` with word timestamps sets
    "eager" and leaves it there."""
    before = model.config._attn_implementation or "sdpa"
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def without_own_warnings() -> Iterator[None]:
    """Drop what `generate` (5.23) warns of its own calls: it hands every window a generation config and settings beside
    it, which it deprecates."""
    log = logging.getLogger("transformers.generation.utils")

    def drop(record: logging.LogRecord) -> bool:  # one for each call: a thread that ends takes away its own alone
        return not record.getMessage().startswith(OWN_WARNINGS)

    log.addFilter(drop)
    try:
        yield
    finally:
        log.removeFilter(drop)
