"""The checked options of a `transcribe` call, and their translation to arguments of Whisper's `generate`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor

from mmdec.audio import SAMPLE_RATE
from mmdec.checks.arguments import show
from mmdec.hub.whisper import LoadedWhisper
from mmdec.pipelines.confidence import Calibration, read_calibrations
from mmdec.pipelines.transcription.usage import first_time
from mmdec.targets.whisper import LANGUAGE_CODES
from mmdec.types import InputError

Timestamps = Literal["segment", "word"] | None
TIMESTAMPS = (None, "segment", "word")
TASKS = ("transcribe", "translate")
HOTTEST = 100.0
THRESHOLDS = ("logprob_threshold", "no_speech_threshold", "compression_ratio_threshold")
RESERVED = {  # option of `generate` -> the argument of `transcribe` that sets it, or "" if there is none
    "assistant_model": "drafter",
    "attention_mask": "audio",
    "custom_generate": "drafter",
    "decoder_input_ids": "prompt",
    "encoder_outputs": "audio",
    "force_unique_generate_call": "",
    "generation_config": "options",
    "input_features": "audio",
    "inputs": "audio",
    "is_multilingual": "",
    "monitor_progress": "progress",
    "num_return_sequences": "",
    "num_segment_frames": "",
    "output_attentions": "timestamps",
    "output_hidden_states": "",
    "prompt_ids": "prompt",
    "return_dict_in_generate": "",
    "return_segments": "timestamps",
    "return_timestamps": "timestamps",
    "return_token_timestamps": "timestamps",
    "stop_strings": "",
    "streamer": "progress",
    "time_precision": "",
    "time_precision_features": "",
    "token_healing": "",
    "tokenizer": "",
}


@final
@dataclass(frozen=True)
class TranscriptionRequest:
    """The options that hold for every recording of a call."""

    whisper: LoadedWhisper
    timestamps: Timestamps
    languages: str | Sequence[str] | None  # codes; a sequence has one for each recording
    options: Mapping[str, Any]  # for `generate`
    has_timestamps: bool  # whether the model has timestamps; without them it can only transcribe one window
    given: tuple[str, ...] = ()  # names of the options that the caller passed
    calibrations: Mapping[str, Calibration] = field(default_factory=lambda: {})

    @classmethod
    def of(
        cls,
        whisper: LoadedWhisper,
        timestamps: Timestamps,
        language: str | Sequence[str] | None,
        task: str | None,
        prompt: str | None,
        options: Mapping[str, Any],
        recordings: int,
    ) -> TranscriptionRequest:
        """Check a call's options. Raises InputError if this model does not support one."""
        settings: Any = whisper.model.generation_config
        has_timestamps = first_time(whisper.model) < whisper.model.config.vocab_size
        if timestamps is not None and not (isinstance(timestamps, str) and timestamps in TIMESTAMPS):
            raise InputError(f'`timestamps` must be None, "segment" or "word", but is {show(timestamps)}. Choose one.')
        if timestamps and not has_timestamps:
            raise InputError(
                f"`timestamps` must be None for a model without timestamp tokens, but is {timestamps!r}. Leave it out."
            )
        if timestamps == "word" and not getattr(settings, "alignment_heads", None):
            raise InputError(
                "`timestamps` must be None or 'segment' for a model whose generation config names no "
                "`alignment_heads`, but is 'word'. Set them, or ask for segments."
            )
        chosen = _options(settings, options)
        chosen |= _task(settings, task)
        if prompt is not None and not isinstance(prompt, str):
            raise InputError(f"`prompt` must be text, but is {show(prompt)}. Leave it out for none.")
        if prompt is not None and prompt.strip():
            chosen["prompt_ids"] = _prompt(whisper, prompt)
        languages = _languages(settings, language, recordings)
        calibrations = read_calibrations(whisper.directory)
        return cls(whisper, timestamps, languages, chosen, has_timestamps, tuple(options), calibrations)

    def is_long(self, samples: int) -> bool:
        """Whether this number of samples exceeds one window."""
        extractor = self.whisper.extractor
        return samples // extractor.hop_length > extractor.nb_max_frames

    def check(self, samples: Tensor) -> Tensor:
        """Raise InputError if samples (T,) cannot be transcribed."""
        if self.is_long(len(samples)) and not self.has_timestamps:
            raise InputError(
                f"`audio` must last at most {self.whisper.extractor.n_samples / SAMPLE_RATE:g} seconds for a model "
                f"without timestamp tokens, but lasts {len(samples) / SAMPLE_RATE:.1f}. Cut it."
            )
        return samples

    def batches(self, lengths: Mapping[int, int], batch_size: int) -> list[list[int]]:
        """Group recordings into batches of indices. lengths: samples of each recording, by index.

        Recordings within one window and longer ones are separated, because `generate` decodes them differently.
        """
        temperature = self.options.get("temperature")
        if self.timestamps == "word" and isinstance(temperature, (list, tuple)) and len(temperature) > 1:
            # on a fallback, transformers uses the lengths of the whole batch for the rows that are decoded again
            batch_size = 1
        kinds = [[index for index, length in lengths.items() if self.is_long(length) == long] for long in (False, True)]
        return [indices[at : at + batch_size] for indices in kinds for at in range(0, len(indices), batch_size)]

    def features(self, recordings: Sequence[Tensor]) -> dict[str, Tensor]:
        """The features of one batch: input_features (B, mels, T) and attention_mask (B, T), equal to those of single
        calls."""
        extractor, model = self.whisper.extractor, self.whisper.model
        whole: dict[str, Any] = {"padding": "longest", "truncation": False} if self.is_long(len(recordings[0])) else {}
        features = [
            extractor(
                samples.numpy(), sampling_rate=SAMPLE_RATE, return_tensors="pt", return_attention_mask=True, **whole
            )
            for samples in recordings
        ]
        frames = max(recording.input_features.shape[-1] for recording in features)
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

    def arguments(self, indices: Sequence[int], long: bool) -> dict[str, Any]:
        """The arguments of `generate`, except features and the custom loop. long: longer than one window."""
        arguments: dict[str, Any] = {**self.options, "return_segments": True, "return_dict_in_generate": False}
        if isinstance(self.languages, str):
            arguments["language"] = self.languages
        elif self.languages is not None:
            arguments["language"] = [self.languages[index] for index in indices]
        if self.timestamps == "word":
            arguments["return_token_timestamps"] = True
        return {**arguments, "return_timestamps": long or self.timestamps is not None}


def _options(settings: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {name: value for name, value in options.items() if value is not None}
    for name in chosen:
        if name in RESERVED:
            remedy = f"Use `{RESERVED[name]}`." if RESERVED[name] else "Call `model.generate` for it."
            raise InputError(f"`{name}` must be left out, but is {show(chosen[name])}. {remedy}")
    for name in ("logits_processor", "stopping_criteria"):
        listed = chosen.get(name, [])
        if not isinstance(listed, list) or not all(callable(item) for item in listed):
            raise InputError(f"`{name}` must be a list of functions, but is {show(listed)}. Put it into a list.")
    beams = chosen.get("num_beams", getattr(settings, "num_beams", None) or 1)
    if type(beams) is not int or beams != 1:
        raise InputError(
            f"`num_beams` must be 1, but is {show(beams)}. Drafts are verified for greedy decoding and sampling; pass "
            "num_beams=1, or call `model.generate` for beams."
        )
    for name in ("logprob_threshold", "no_speech_threshold"):  # transformers reads these in two places
        own = getattr(settings, name, None)
        if own is not None:
            chosen.setdefault(name, own)
    if "no_speech_threshold" in chosen and "logprob_threshold" not in chosen:
        raise InputError(
            "`logprob_threshold` must be given with `no_speech_threshold`, which is "
            f"{show(chosen['no_speech_threshold'])}, but is None: silence is where both say so. Whisper's own is -1.0."
        )
    if "logprob_threshold" in chosen:
        chosen.setdefault("temperature", 0.0)
    if "max_new_tokens" in chosen:
        chosen.setdefault("max_length", None)  # otherwise transformers warns about the config's value in every window
    temperature = chosen.get("temperature", 0.0)
    temperatures = list(temperature) if isinstance(temperature, (list, tuple)) else [temperature]
    if not temperatures or not all(type(item) in (int, float) and 0 <= item <= HOTTEST for item in temperatures):
        raise InputError(
            f"`temperature` must be a number from 0 to {HOTTEST}, or several, but is {show(temperature)}. "
            "0.0 is greedy."
        )
    for name in THRESHOLDS:
        value = chosen.get(name)
        if value is not None and (type(value) not in (int, float) or math.isnan(value)):
            raise InputError(f"`{name}` must be a number, but is {show(value)}. Leave it out for none.")
    return chosen


def _task(settings: Any, task: str | None) -> dict[str, Any]:
    if task is None:
        return {}
    if not isinstance(task, str) or task not in TASKS:
        raise InputError(f"`task` must be one of {', '.join(TASKS)}, but is {show(task)}. Choose one.")
    table = getattr(settings, "task_to_id", None)
    if not _multilingual(settings) or not table:
        if task == "transcribe":
            return {}
        raise InputError(f"`task` must be 'transcribe' for a model that knows no other, but is {task!r}. Leave it out.")
    if task not in table:
        raise InputError(f"`task` must be one of {', '.join(table)} for this model, but is {task!r}. Choose one.")
    return {"task": task}


def _languages(settings: Any, language: str | Sequence[str] | None, recordings: int) -> str | Sequence[str] | None:
    if language is None:
        return None
    if not _multilingual(settings):
        raise InputError(
            f"`language` must be left out for a model of one language, but is {show(language)}. Use a multilingual "
            "model."
        )
    if isinstance(language, (str, bytes)) or not isinstance(language, Sequence):
        return language_code(settings, language)
    if len(language) != recordings:
        raise InputError(
            f"`language` must be one, or one for each of {recordings} recordings, but has {len(language)}. Add or drop "
            "some."
        )
    return [language_code(settings, name) for name in language]


def language_code(settings: Any, language: object) -> str:
    """ "English", "en" or "<|en|>" -> "en". Raises InputError for a language that the model does not know."""
    codes = [token.removeprefix("<|").removesuffix("|>") for token in settings.lang_to_id]
    names = {code: name for name, code in reversed(LANGUAGE_CODES.items())}
    if isinstance(language, str):
        wanted = language.lower().strip().removeprefix("<|").removesuffix("|>")
        code = LANGUAGE_CODES.get(wanted, wanted)
        if code in codes:
            return code
    listed = ", ".join(f"{code} ({names[code]})" if code in names else code for code in sorted(codes))
    raise InputError(f"`language` must be one that the model knows, but is {show(language)}. It knows {listed}.")


def _prompt(whisper: LoadedWhisper, prompt: str) -> Tensor:
    """Token ids (P,) of the previous text, with the token that introduces it."""
    most = whisper.model.config.max_target_positions // 2 - 1
    try:
        ids: Tensor = whisper.tokenizer.get_prompt_ids(prompt, return_tensors="pt")
    except ValueError as error:
        raise InputError(f"`prompt` must be plain text, but holds a special token ({error}). Leave it out.") from error
    if len(ids) > most:
        raise InputError(f"`prompt` must have at most {most} tokens, but has {len(ids)}. Keep its end.")
    return ids.to(whisper.model.device)


def _multilingual(settings: Any) -> bool:
    return bool(getattr(settings, "is_multilingual", True)) and bool(getattr(settings, "lang_to_id", None))
