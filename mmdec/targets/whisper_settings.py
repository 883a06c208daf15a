"""Whisper's `generate` as it hands settings to its superclass: all of them in the generation config.

transformers (5.23) calls itself, for every window, with a generation config and with two settings beside it, which it
deprecates, and warns whoever transcribes. Here these two are put into the config, where it asks for them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from transformers import GenerationConfig, WhisperForConditionalGeneration

NAME = "_prepare_generation_config"
BESIDE = ("suppress_tokens", "begin_suppress_tokens")

_using: WeakKeyDictionary[WhisperForConditionalGeneration, int] = WeakKeyDictionary()  # calls that are under way
_changing = threading.Lock()


@contextmanager
def settings_in_config(model: WhisperForConditionalGeneration) -> Iterator[None]:
    """While open, `model.generate` passes these settings as it would have them passed; in any number of threads."""
    with _changing:
        _using[model] = _using.get(model, 0) + 1
        if _using[model] == 1:
            stock = getattr(model, NAME)

            def prepare(generation_config: GenerationConfig | None, **options: Any) -> Any:
                if generation_config is None:
                    return stock(generation_config, **options)
                beside = {name: options.pop(name) for name in BESIDE if name in options}
                if generation_config.max_new_tokens is not None and generation_config.max_length is None:
                    beside["max_length"] = None  # else the model's own comes back, and a warning that there are two
                config, rest = stock(generation_config, **options)
                config.update(**beside)  # afterwards, as transformers does: None stays None
                return config, rest

            setattr(model, NAME, prepare)
    try:
        yield
    finally:
        with _changing:
            _using[model] -= 1
            if not _using[model]:
                del _using[model]
                delattr(model, NAME)
