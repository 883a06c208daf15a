"""Checks the options of a `transcribe` call with a Whisper, and makes arguments of transformers' `generate` of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from mmdec.checks.arguments import format_value
from mmdec.errors import InputError
from mmdec.generation.auto_drafter import shipped_folder
from mmdec.generation.speculation import Speculation
from mmdec.hub.find import model_folders
from mmdec.io.audio import SAMPLE_RATE
from mmdec.tasks.confidence import Calibration, read_calibrations
from mmdec.tasks.generate_options import LENGTH_OPTIONS, RESERVED, check_generate_options, sets_length
from mmdec.tasks.loading import load_speculation
from mmdec.whisper.checkpoint import LoadedWhisper
from mmdec.whisper.features import recording_features
from mmdec.whisper.options import Timestamps, TranscribeOptions
from mmdec.whisper.special_tokens import ENGLISH_TOKEN, first_timestamp_token, is_multilingual, language_code
from mmdec.whisper.window_options import CONDITION_TYPES
from mmdec.whisper.words import check_alignment

TIMESTAMPS = (None, "segment", "word")
# the model whose calibration limits the confidence of models without a calibration
FALLBACK_CALIBRATION_MODEL = "whisper-base"
TASK_NAMES = ("transcribe", "translate")
MAX_TEMPERATURE = 100.0  # maximum temperature that is accepted
THRESHOLDS = ("logprob_threshold", "no_speech_threshold", "compression_ratio_threshold")
RESERVED_HERE = {  # option of `generate` -> argument of `transcribe` that sets it, or ""
    **RESERVED,
    "attention_mask": "audio",
    "decoder_input_ids": "prompt",
    "decoder_start_token_id": "task",
    "encoder_outputs": "audio",
    "force_unique_generate_call": "",
    "guidance_scale": "",
    "input_features": "audio",
    "inputs": "audio",
    "is_multilingual": "",
    "monitor_progress": "progress",
    "num_segment_frames": "",
    "output_attentions": "timestamps",
    "prompt_ids": "prompt",
    "return_segments": "timestamps",
    "return_timestamps": "timestamps",
    "return_token_timestamps": "timestamps",
    "stop_strings": "",
    "streamer": "progress",
    "time_precision": "",
    "time_precision_features": "",
}


@final
@dataclass(frozen=True)
class TranscriptionRequest:
    """The options of one call of `transcribe` with a Whisper; they apply to all of its recordings."""

    whisper: LoadedWhisper
    speculation: Speculation
    timestamps: Timestamps
    # a language code for all recordings, or a list with one for each; None: detect
    languages: str | Sequence[str] | None
    options: Mapping[str, Any]  # further arguments of `generate`
    has_timestamps: bool  # whether the model has timestamp tokens; without them only one window is possible
    caller_options: tuple[str, ...] = ()  # names of the options of `generate` that the caller passed, for errors
    calibrations: Mapping[str, Calibration] = field(default_factory=lambda: {})
    margin: float | None = None  # for provisional text: seconds that the encoder reads after the audio; None: to 30 s
    # without a calibration: those of `FALLBACK_CALIBRATION_MODEL`, an upper limit of the confidence
    fallback_calibrations: Mapping[str, Calibration] = field(default_factory=lambda: {})
    caller_limits_length: bool = False  # whether the caller limits the length of a window's text

    @classmethod
    def from_options(
        cls,
        whisper: LoadedWhisper,
        options: TranscribeOptions,
        recordings: int,
        speculation: Speculation | None = None,
    ) -> TranscriptionRequest:
        """Check the options of a call of `transcribe`, and load its drafter.

        Args:
            recordings: Number of recordings.
            speculation: Drafter (one that fits the model), rule and draft size; None: those of the options.

        Raises:
            InputError: For an option that this model does not support.
        """
        settings: Any = whisper.model.generation_config
        timestamps, prompt = options.timestamps, options.prompt
        has_timestamps = first_timestamp_token(whisper.model) < whisper.model.config.vocab_size
        if timestamps is not None and not (isinstance(timestamps, str) and timestamps in TIMESTAMPS):
            raise InputError(
                f'`timestamps` must be None, "segment" or "word", but is {format_value(timestamps)}. Leave it out for '
                "text alone."
            )
        if timestamps and not has_timestamps:
            raise InputError(
                f"`timestamps` must be None for a model without timestamp tokens, but is {timestamps!r}. Leave it out."
            )
        if timestamps == "word":
            check_alignment(whisper.model)
        chosen = _options(whisper, options.generate_options)
        if all(chosen.get(name) is None and getattr(settings, name, None) is None for name in LENGTH_OPTIONS):
            # transformers would cut at 20 tokens; stock Whispers name this number in their generation settings
            chosen["max_length"] = whisper.model.config.max_target_positions
        chosen |= _task(settings, options.task)
        if prompt is not None and not isinstance(prompt, str):
            raise InputError(f"`prompt` must be text, but is {format_value(prompt)}. Leave it out for none.")
        if prompt is not None and prompt.strip():
            chosen["prompt_ids"] = _prompt(whisper, prompt)
        languages = _languages(settings, options.language, recordings)
        if speculation is None:
            speculation = load_speculation(options, options.drafter, whisper, recordings, sound=True)
        calibrations = read_calibrations(whisper.directory) or read_calibrations(shipped_folder(whisper.model))
        fallback = {} if calibrations else read_calibrations(_shipped_model(FALLBACK_CALIBRATION_MODEL))
        return cls(
            whisper=whisper,
            speculation=speculation,
            timestamps=timestamps,
            languages=languages,
            options=chosen,
            has_timestamps=has_timestamps,
            caller_options=tuple(options.generate_options),
            calibrations=calibrations,
            fallback_calibrations=fallback,
            caller_limits_length=sets_length(options.generate_options),
        )

    def check(self, samples: Tensor) -> None:
        """Raise InputError if samples (T,) cannot be transcribed."""
        if self.whisper.is_long(len(samples)) and not self.has_timestamps:
            raise InputError(
                f"`audio` must last at most {self.whisper.extractor.n_samples / SAMPLE_RATE:g} seconds for a model "
                f"without timestamp tokens, but lasts {len(samples) / SAMPLE_RATE:.1f}. Cut it."
            )

    def features(self, recordings: Sequence[Tensor]) -> dict[str, Tensor]:
        """Compute the features of recordings (T,), each as it would be computed without the others.

        Returns:
            `input_features` (B, mels, F) and `attention_mask` (B, F) of F frames.
        """
        extractor, model = self.whisper.extractor, self.whisper.model
        long = self.whisper.is_long(len(recordings[0]))
        features = [recording_features(extractor, samples, SAMPLE_RATE, long) for samples in recordings]
        frames = max(recording["input_features"].shape[-1] for recording in features)
        padded = {
            name: torch.cat(
                [
                    torch.nn.functional.pad(recording[name], (0, frames - recording[name].shape[-1]))
                    for recording in features
                ]
            )
            for name in ("input_features", "attention_mask")
        }
        return {
            "input_features": padded["input_features"].to(model.device, model.dtype),
            "attention_mask": padded["attention_mask"].to(model.device),
        }

    def generate_options(self, index: int, long: bool) -> dict[str, Any]:
        """Return the options of `model.generate` for one recording.

        Args:
            index: Index of the recording in the call.
            long: Whether it is longer than one window.
        """
        options: dict[str, Any] = {**self.options, "return_timestamps": long or self.timestamps is not None}
        if self.languages is not None:
            options["language"] = self.languages if isinstance(self.languages, str) else self.languages[index]
        return options


def _options(whisper: LoadedWhisper, options: Mapping[str, Any]) -> dict[str, Any]:
    """Check the options for transformers' `generate`, and complete them from the model's configuration."""
    settings: Any = whisper.model.generation_config
    chosen = {name: value for name, value in options.items() if value is not None}
    check_generate_options(chosen, whisper.model, RESERVED_HERE, "model.generate")
    for name in ("logits_processor", "stopping_criteria"):
        listed = chosen.get(name, [])
        if not isinstance(listed, list) or not all(callable(item) for item in listed):
            raise InputError(
                f"`{name}` must be a list of functions, but is {format_value(listed)}. Put it into a list."
            )
    beams = chosen.get("num_beams", getattr(settings, "num_beams", None) or 1)
    if type(beams) is not int or beams != 1:
        raise InputError(
            f"`num_beams` must be 1, but is {format_value(beams)}. Drafts are verified for greedy decoding and "
            "sampling; pass num_beams=1, or call `model.generate` for beams."
        )
    for name in ("logprob_threshold", "no_speech_threshold"):  # transformers reads these options in two places
        default = getattr(settings, name, None)
        if default is not None:
            chosen.setdefault(name, default)
    _check_no_speech(chosen.get("no_speech_threshold"), chosen.get("logprob_threshold"))
    condition = chosen.get("condition_on_prev_tokens", getattr(settings, "condition_on_prev_tokens", None))
    _check_condition(chosen.get("prompt_condition_type") or CONDITION_TYPES[0], bool(condition))
    if "logprob_threshold" in chosen:
        chosen.setdefault("temperature", 0.0)
    if "max_new_tokens" in chosen:
        chosen.setdefault("max_length", None)  # else transformers warns about the config's value in each window
    _check_numbers(chosen)
    return chosen


def _check_no_speech(no_speech: float | None, logprob: float | None) -> None:
    """Raise InputError for a `no_speech_threshold` without a `logprob_threshold`; None: not given."""
    if no_speech is not None and logprob is None:
        raise InputError(
            f"`logprob_threshold` must be given with `no_speech_threshold`, which is {format_value(no_speech)}, but is "
            "None: a window is silent only if both say so. Whisper's default is -1.0."
        )


def _check_condition(prompt_kind: object, condition: bool) -> None:
    """Raise InputError for a `prompt_condition_type` that is unknown, or needs `condition_on_prev_tokens`."""
    if prompt_kind not in CONDITION_TYPES:
        raise InputError(
            f"`prompt_condition_type` must be one of {', '.join(CONDITION_TYPES)}, but is {format_value(prompt_kind)}. "
            "Choose one."
        )
    if prompt_kind == "all-segments" and not condition:
        raise InputError(
            "`condition_on_prev_tokens` must be True where `prompt_condition_type` is 'all-segments', but is False. "
            "Set it, or condition only the first segment."
        )


def _check_numbers(options: Mapping[str, Any]) -> None:
    """Raise InputError if a temperature, a length or a threshold is no such number."""
    temperature = options.get("temperature", 0.0)
    temperatures = list(temperature) if isinstance(temperature, (list, tuple)) else [temperature]
    if not temperatures or not all(
        type(item) in (int, float) and 0 <= item <= MAX_TEMPERATURE for item in temperatures
    ):
        raise InputError(
            f"`temperature` must be a number from 0 to {MAX_TEMPERATURE}, or several, but is "
            f"{format_value(temperature)}. 0.0 is greedy."
        )
    for name in LENGTH_OPTIONS:
        value = options.get(name)
        if value is not None and not isinstance(value, Real):
            raise InputError(
                f"`{name}` must be a number of tokens, but is {format_value(value)}. Leave it out for the model's."
            )
    for name in THRESHOLDS:
        value = options.get(name)
        if value is not None and (type(value) not in (int, float) or math.isnan(value)):
            raise InputError(f"`{name}` must be a number, but is {format_value(value)}. Leave it out for none.")


def _task(settings: Any, task: str | None) -> dict[str, Any]:
    if task is None:
        return {}
    if not isinstance(task, str) or task not in TASK_NAMES:
        raise InputError(f"`task` must be one of {', '.join(TASK_NAMES)}, but is {format_value(task)}.")
    table = getattr(settings, "task_to_id", None)
    if not is_multilingual(settings) or not table:
        if task == "transcribe":
            return {}
        raise InputError(f"`task` must be 'transcribe' for a model without other tasks, but is {task!r}. Leave it out.")
    if task == "translate" and [*settings.lang_to_id] == [ENGLISH_TOKEN]:
        raise InputError(
            "`task` must be 'transcribe' for an English-only model, but is 'translate': there is nothing to translate "
            "into English. Leave it out, or use a multilingual model."
        )
    if task not in table:
        raise InputError(f"`task` must be one of {', '.join(table)} for this model, but is {task!r}.")
    return {"task": task}


def _languages(settings: Any, language: str | Sequence[str] | None, recordings: int) -> str | Sequence[str] | None:
    if language is None:
        return None
    names = language_names(language, recordings)
    codes = [language_code(settings, name) for name in names]
    if not is_multilingual(settings):
        return None  # the model has no token for its only language
    return codes if names is language else codes[0]


def language_names(language: str | Sequence[str], recordings: int) -> Sequence[str]:
    """Return the names in the argument `language`, one for all recordings of a call or one for each.

    Raises:
        InputError: For another number of names.
    """
    if isinstance(language, (str, bytes)) or not isinstance(language, Sequence):
        return [language]
    if len(language) != recordings:
        raise InputError(
            f"`language` must be one, or one for each of {recordings} recordings, but has {len(language)}. Add or drop "
            "some."
        )
    return language


def _prompt(whisper: LoadedWhisper, prompt: str) -> Tensor:
    """Encode the argument `prompt` as token ids (P,), which begin with the token that introduces previous text."""
    max_tokens = whisper.model.config.max_target_positions // 2 - 1
    plain, text = whisper.plain, " " + prompt.strip()
    if plain.hides(plain.hide([text])):  # transformers refuses special tokens, and reads timestamps as such
        ids = torch.tensor([whisper.tokenizer.convert_tokens_to_ids("<|startofprev|>"), *plain.encode(text)])
    else:
        ids = whisper.tokenizer.get_prompt_ids(prompt, return_tensors="pt")
    if len(ids) > max_tokens:
        raise InputError(f"`prompt` must have at most {max_tokens} tokens, but has {len(ids)}. Keep its end.")
    return ids.to(whisper.model.device)


def _shipped_model(name: str) -> Path | None:
    """Find the folder of a shipped model; None if it is not installed."""
    return next((home / name for home in model_folders() if (home / name).is_dir()), None)


def can_translate(settings: Any) -> bool:
    """Return whether a Whisper with the generation config `settings` can translate from a language into English."""
    others = is_multilingual(settings) and [*settings.lang_to_id] != [ENGLISH_TOKEN]
    return others and "translate" in (getattr(settings, "task_to_id", None) or ())
