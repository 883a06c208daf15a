"""The parts of Whisper's `generate` besides the loop: logits processors, languages, attention, warnings."""

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
    """The logits processors of `generate`, in its order, for prompts of `prompt_length` columns.

    timestamps: whether the rules for timestamp tokens apply.
    """
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
    """Restore the model's attention implementation at the end: `generate` with word timestamps sets "eager" and leaves
    it."""
    before = model.config._attn_implementation or "sdpa"
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def without_own_warnings() -> Iterator[None]:
    """Suppress warnings about arguments that `generate` (5.23) itself passes to each window."""
    log = logging.getLogger("transformers.generation.utils")

    def drop(record: logging.LogRecord) -> bool:  # one function per call, so that a thread removes only its own filter
        return not record.getMessage().startswith(OWN_WARNINGS)

    log.addFilter(drop)
    try:
        yield
    finally:
        log.removeFilter(drop)
