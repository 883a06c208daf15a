"""Checks settings in a model's folder that would fail during a call, be ignored, or exhaust the memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmdec.checks.weights import read_settings
from mmdec.types import InputError

LARGEST = {  # maxima for the feature extractor; published models have 128 mels and FFTs of 400
    "feature_size": 1024,
    "n_fft": 2**14,
    "hop_length": 2**14,
    "chunk_length": 3600,
    "sampling_rate": 192_000,
}
EXTRACTORS = ("processor_config.json", "preprocessor_config.json")  # the current name, and the earlier one


def check_generation(settings: Any, config: Any, folder: Path) -> None:
    """Raise InputError if a value of the generation config, or of the model's config, is impossible for this model."""

    def is_id(value: Any) -> bool:
        return type(value) is int and 0 <= value < config.vocab_size

    def is_ids(value: Any) -> bool:
        return isinstance(value, list) and all(type(item) is int and -1 <= item < config.vocab_size for item in value)

    def is_table(value: Any) -> bool:
        return isinstance(value, dict) and all(isinstance(name, str) and is_id(item) for name, item in value.items())

    def is_heads(value: Any) -> bool:
        return isinstance(value, list) and all(
            isinstance(pair, list)
            and [type(item) for item in pair] == [int, int]
            and 0 <= pair[0] < config.decoder_layers
            and 0 <= pair[1] < config.decoder_attention_heads
            for pair in value
        )

    def is_length(value: Any) -> bool:
        return type(value) is int and 1 <= value <= 2**31

    def is_switch(value: Any) -> bool:
        return isinstance(value, bool)

    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        **dict.fromkeys(
            ("bos_token_id", "decoder_start_token_id", "no_timestamps_token_id", "pad_token_id", "prev_sot_token_id"),
            (is_id, f"a token from 0 to {config.vocab_size - 1}"),
        ),
        "eos_token_id": (lambda value: is_id(value) or is_ids(value), "a token, or a list of tokens"),
        **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), (is_ids, "a list of tokens")),
        **dict.fromkeys(("lang_to_id", "task_to_id"), (is_table, "names with their tokens")),
        "alignment_heads": (is_heads, "pairs of a decoder layer and a head that exist"),
        **dict.fromkeys(("max_length", "max_new_tokens"), (is_length, "a whole number of at least 1")),
        "max_initial_timestamp_index": (lambda value: type(value) is int and value >= 0, "a whole number"),
        **dict.fromkeys(("is_multilingual", "return_timestamps", "do_sample"), (is_switch, "true or false")),
    }
    for name, (fits, rule) in rules.items():
        value = getattr(settings, name, None)
        if value is not None and not fits(value):
            raise InputError(
                f"`{name}` must be {rule}, but the generation config of '{folder}' has {value!r:.100}. Fetch it again."
            )
    try:
        settings.validate()
    except Exception as error:  # wrong types fail wherever they are first compared
        raise InputError(
            f"`model` must have a generation config that `generate` takes, but that of '{folder}' is refused "
            f"({error!s:.300}). Fetch it again."
        ) from error


def check_extractor(folder: Path) -> None:
    """Raise InputError for sizes that no Whisper feature extractor has, whose filters would exhaust the memory."""
    for name in EXTRACTORS:
        if not (folder / name).is_file():
            continue
        settings = read_settings(folder / name)
        sizes = settings.get("feature_extractor", settings)
        for key, most in LARGEST.items():
            value = sizes.get(key, 1) if isinstance(sizes, dict) else None
            if type(value) is not int or not 1 <= value <= most:
                raise InputError(
                    f"`{key}` must be a whole number from 1 to {most}, but {name} of '{folder}' has {value!r:.100}. "
                    "Fetch it again."
                )
