"""The options of `generate` for one recording's windows, completed by the model's generation config."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast, final

from torch import Tensor
from transformers import GenerationConfig, WhisperForConditionalGeneration

from mmdec.errors import InputError
from mmdec.generation.inputs import options_errors

CONDITION_TYPES = ("first-segment", "all-segments")
# options that are read here; the generation config and the model take all others
WINDOW_OPTION_NAMES = frozenset(
    {
        "compression_ratio_threshold",
        "condition_on_prev_tokens",
        "language",
        "logits_processor",
        "logprob_threshold",
        "no_speech_threshold",
        "prompt_condition_type",
        "prompt_ids",
        "return_timestamps",
        "task",
        "temperature",
    }
)


@final
@dataclass(frozen=True)
class WindowOptions:
    """The options of a recording's windows. Those that the caller left out come from the model's generation config."""

    settings: Any  # the `GenerationConfig`; a copy gets the length and temperature of each window
    others: Mapping[str, Any]  # options of the caller that are not of a generation config
    temperatures: Sequence[float | None]  # a window is decoded again at the next one if its text is refused
    # limits beyond which a window's text is refused, or dropped as silence; None: no limit
    compression_ratio_threshold: float | None
    logprob_threshold: float | None
    no_speech_threshold: float | None
    condition: bool  # whether a window's text continues those of earlier windows
    prompt_ids: Tensor | None  # (P,) the caller's
    prompt_kind: str  # one of `CONDITION_TYPES`
    language: str | None
    task: str | None
    logits_processor: Sequence[Any]  # the caller's
    previous_start: list[int]  # the token that introduces previous text; empty if the model has none
    first_timestamp: int  # id of the first timestamp token; beyond the vocabulary if there is none
    caller_options: Collection[str]  # names of the options that the caller passed, for errors

    @classmethod
    def from_options(
        cls,
        model: WhisperForConditionalGeneration,
        options: Mapping[str, Any],
        is_long: bool,
        times_tokens: bool = False,
        caller_options: Collection[str] = (),
    ) -> WindowOptions:
        """Complete the arguments of `generate` that a `TranscriptionRequest` has checked, and check timestamps.

        Args:
            is_long: Whether the recording is longer than one window.
            times_tokens: Whether tokens are timed, so that the decoder must return its attention.
            caller_options: Names of the options that the caller passed, for errors.

        Raises:
            InputError: For options that the model rejects, or timestamps that recording or model do not allow.
        """
        config = copy.deepcopy(cast(GenerationConfig, model.generation_config))
        with options_errors(model, caller_options):
            others = config.update(
                **{name: value for name, value in options.items() if name not in WINDOW_OPTION_NAMES}
            )
        if config.max_length is None and config.max_new_tokens is None:
            config.max_length = model.config.max_target_positions
        settings: Any = config

        def value_of(name: str) -> Any:
            value = options.get(name)
            return value if value is not None else getattr(settings, name, None)

        timestamps = bool(value_of("return_timestamps")) or (is_long and options.get("return_timestamps") is None)
        no_timestamps: int | None = getattr(settings, "no_timestamps_token_id", None)
        _check_timestamps(timestamps, is_long, no_timestamps)

        scores = value_of("logprob_threshold") is not None
        settings.return_timestamps = timestamps
        settings.return_token_timestamps = settings.output_attentions = times_tokens
        settings.output_scores = scores
        settings.return_dict_in_generate = times_tokens or scores
        temperature = options.get("temperature")
        return cls(
            settings=settings,
            others=others,
            temperatures=list(temperature) if isinstance(temperature, Sequence) else [temperature],
            compression_ratio_threshold=value_of("compression_ratio_threshold"),
            logprob_threshold=value_of("logprob_threshold"),
            no_speech_threshold=value_of("no_speech_threshold"),
            condition=bool(value_of("condition_on_prev_tokens")),
            prompt_ids=options.get("prompt_ids"),
            prompt_kind=options.get("prompt_condition_type") or CONDITION_TYPES[0],
            language=value_of("language"),
            task=value_of("task"),
            logits_processor=options.get("logits_processor") or (),
            previous_start=_previous_start(settings),
            first_timestamp=model.config.vocab_size + 1 if no_timestamps is None else no_timestamps + 1,
            caller_options=caller_options,
        )

    def errors(self, model: WhisperForConditionalGeneration) -> AbstractContextManager[None]:
        """Return a context manager that names the caller's options in what transformers raises for them."""
        return options_errors(model, self.caller_options)

    def refuses(self, compression_ratio: float | None, avg_logprob: float | None) -> bool:
        """Return whether a text repeats itself too much or is too improbable; None: it was not measured."""
        repeats = compression_ratio is not None and compression_ratio > cast(float, self.compression_ratio_threshold)
        return repeats or (avg_logprob is not None and avg_logprob < cast(float, self.logprob_threshold))


def _previous_start(settings: Any) -> list[int]:
    """Return the token that introduces previous text; [] if the model has none."""
    token: int | None = getattr(settings, "prev_sot_token_id", None)
    suppressed = settings.suppress_tokens
    if token is None and suppressed is not None and len(suppressed) >= 2:
        token = int(suppressed[-2])  # as in the checkpoints of OpenAI
    return [] if token is None else [token]


def _check_timestamps(timestamps: bool, is_long: bool, no_timestamps: int | None) -> None:
    """Raise InputError if timestamps are needed and missing, or asked for and not possible.

    Args:
        timestamps: Whether the text has timestamps.
        is_long: Whether the recording is longer than one window.
        no_timestamps: Id of the token of texts without them; None: the model has none.
    """
    if is_long and not timestamps:
        raise InputError(
            "`return_timestamps` must be True for a recording longer than one window, but is False: the next "
            "window begins at a timestamp. Leave it out."
        )
    if timestamps and no_timestamps is None:
        raise InputError(
            "`return_timestamps` must be False for a model whose generation config has no "
            "`no_timestamps_token_id`, but is True. Set this id, or leave timestamps out."
        )
