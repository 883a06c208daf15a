"""The special tokens of a Whisper, by its generation config: its languages, and where timestamps begin."""

from __future__ import annotations

from typing import Any

from transformers import WhisperForConditionalGeneration

from mmdec.checks.arguments import format_value
from mmdec.errors import InputError
from mmdec.whisper.target import LANGUAGE_CODES

ENGLISH_TOKEN = "<|en|>"  # the language of a Whisper that has no tokens of languages


def is_multilingual(settings: Any) -> bool:
    """Return whether a Whisper with the generation config `settings` has tokens of languages."""
    return bool(getattr(settings, "is_multilingual", True)) and bool(getattr(settings, "lang_to_id", None))


def language_code(settings: Any, language: object) -> str:
    """Convert a language ("English", "en" or "<|en|>") to its code, "en".

    Raises:
        InputError: If it is unknown.
    """
    known = settings.lang_to_id if is_multilingual(settings) else [ENGLISH_TOKEN]
    codes = [token.removeprefix("<|").removesuffix("|>") for token in known]
    names = {code: name for name, code in reversed(LANGUAGE_CODES.items())}
    if isinstance(language, str):
        wanted = language.lower().strip().removeprefix("<|").removesuffix("|>")
        code = LANGUAGE_CODES.get(wanted, wanted)
        if code in codes:
            return code
    listed = ", ".join(f"{code} ({names[code]})" if code in names else code for code in sorted(codes))
    raise InputError(
        f"`language` must be one that the model knows, but is {format_value(language)}. It knows {listed}."
    )


def first_timestamp_token(model: WhisperForConditionalGeneration) -> int:
    """Return the id of the first timestamp token; the vocabulary's size if the model has none.

    The confidence ignores timestamp tokens.
    """
    settings: Any = model.generation_config
    mark: int | None = getattr(settings, "no_timestamps_token_id", None)
    return int(model.config.vocab_size) if mark is None else mark + 1
