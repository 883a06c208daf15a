"""Transcribes with audio language models (Qwen2-Audio, Voxtral, ...).

The tokens equal those of `model.generate` with the inputs that the model's processor makes: the recordings, and an
instruction to transcribe them.

These models have no windows, timestamps, tasks or temperature fallback, so these options of Whisper are rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, cast, final

import torch
from torch import Tensor

from mmdec.checks.arguments import format_value
from mmdec.checks.files import error_line
from mmdec.core.scheduler import decode_together
from mmdec.core.steps import Steps
from mmdec.core.timing import Stopwatch
from mmdec.errors import InputError
from mmdec.generation.drafter_source import DraftInput
from mmdec.generation.model_lock import reading
from mmdec.generation.speculation import Speculation
from mmdec.io.audio import SAMPLE_RATE
from mmdec.pretrained.audio_lm import LoadedAudioLm
from mmdec.tasks.batch import InputGroups
from mmdec.tasks.confidence import Calibration, estimate_confidence, read_calibrations, token_evidence
from mmdec.tasks.decoding import decode_inputs
from mmdec.tasks.generate_options import (
    RESERVED,
    check_generate_options,
    length_errors,
    sets_length,
    with_length,
)
from mmdec.tasks.loading import load_speculation
from mmdec.tasks.usage import Usage, renumber_rows
from mmdec.types import Round
from mmdec.whisper.options import TranscribeOptions
from mmdec.whisper.recordings import TRANSCRIPT, silent_transcripts, timings
from mmdec.whisper.request import language_names
from mmdec.whisper.target import LANGUAGE_CODES
from mmdec.whisper.transcript import Transcript

RESERVED_HERE = {  # option of `generate` -> argument of `transcribe` that sets it, or "" if there is none
    **RESERVED,
    "attention_mask": "audio",
    "input_features": "audio",
    "input_ids": "prompt",
    "inputs": "audio",
    "inputs_embeds": "",
    "position_ids": "",
    "streamer": "on_round",
}
WINDOW_OPTIONS = (  # options of `generate` for Whisper's decoding in windows
    "compression_ratio_threshold",
    "condition_on_prev_tokens",
    "logprob_threshold",
    "no_speech_threshold",
    "prompt_condition_type",
)


@final
@dataclass(frozen=True)
class AudioLmRequest:
    """The options of one call of `transcribe` with an audio language model; they apply to all of its recordings."""

    loaded: LoadedAudioLm  # the audio language model with its processor
    speculation: Speculation
    options: Mapping[str, Any]  # further arguments of `generate`
    prompt: str | None  # the instruction in the prompt; None: the processor's own
    # one language for all recordings, or a list with one for each; None: the model detects it
    languages: str | Sequence[str] | None
    calibrations: Mapping[str, Calibration]

    @classmethod
    def from_options(
        cls,
        loaded: LoadedAudioLm,
        options: TranscribeOptions,
        recordings: int,
    ) -> AudioLmRequest:
        """Check the options of a call of `transcribe`.

        Args:
            recordings: Number of recordings.

        Raises:
            InputError: For an option that this model does not support.
        """
        _check_options(loaded, options)
        prompt = options.prompt
        chosen = {key: value for key, value in options.generate_options.items() if value is not None}
        check_generate_options(chosen, loaded.model, RESERVED_HERE, "mmdec.generate")
        return cls(
            loaded=loaded,
            speculation=load_speculation(options, options.drafter, loaded, recordings, True, loaded.checked),
            options=options.generate_options,
            prompt=prompt if prompt and prompt.strip() else None,
            languages=_languages(loaded, options.language, recordings),
            calibrations=read_calibrations(loaded.directory),
        )

    def check(self, samples: Tensor) -> None:
        """Raise InputError if the model cannot take samples (T,)."""
        self.loaded.check(samples)

    def language(self, index: int) -> str | None:
        """Return the language that the caller gave for a recording, or None.

        Args:
            index: Index of the recording in the call.
        """
        languages = self.languages
        return languages if languages is None or isinstance(languages, str) else languages[index]

    def inputs(self, samples: Mapping[int, Tensor]) -> dict[str, Any]:
        """Make the inputs of `generate`.

        Args:
            samples: Index of the recording in the call -> samples (T,).
        """
        languages = None if self.languages is None else [self.language(index) for index in samples]
        return self.loaded.inputs([*samples.values()], self.prompt, languages)


def transcribe_with_audio_lm(
    request: AudioLmRequest,
    samples: Mapping[int, Tensor],
    batch_size: int,
    progress: Callable[[float, float], None] | None,
    errors: dict[int, InputError],
) -> Generator[Mapping[int, Transcript]]:
    """Transcribe recordings, `batch_size` at a time.

    Args:
        samples: Index -> 16 kHz samples (T,).
        progress: Called with the seconds of audio done and in total.
        errors: Index -> error; recordings that exceed the model's maximum length are added.

    Yields:
        Index -> transcript of some recordings, as they end.
    """
    silent = silent_transcripts(request.languages, samples)
    yield silent
    total = sum(map(len, samples.values())) / SAMPLE_RATE
    spoken = [index for index in samples if index not in silent]
    model, options = request.loaded.model, with_length(request.options, request.loaded.model)
    groups = InputGroups.from_indices(model, request.speculation, options, spoken, batch_size)
    decodings = (
        (
            group,
            _group_steps(
                replace(request, speculation=group.speculation),
                {index: samples[index] for index in group.indices},
                errors,
            ),
            len(group.indices),
        )
        for group in groups.groups
    )
    done = {*silent}
    with (
        reading(model, *request.speculation.networks),
        closing(decode_together(decodings, groups.rows, refill=groups.refill)) as decoded,
    ):
        for _, transcripts in decoded:
            yield transcripts
            done |= {*transcripts, *errors}
            if progress is not None:
                progress(sum(len(samples[index]) for index in done & samples.keys()) / SAMPLE_RATE, total)
    if progress is not None and not spoken:
        progress(total, total)


def recording_steps(
    request: AudioLmRequest, samples: Tensor, inputs: Mapping[str, Any] | None = None
) -> Steps[Transcript]:
    """Transcribe one recording (T,) as a generator of passes, for a scheduler that decodes other requests, too.

    The caller holds the locks of the model and of the drafter's networks.

    Args:
        inputs: What `request.inputs` has made of it, or None to make it here.

    Returns:
        The `Transcript`.

    Raises:
        InputError: If the recording exceeds the model's maximum length.
    """
    errors = dict[int, InputError]()
    silent = silent_transcripts(request.languages, {0: samples})
    transcripts: dict[int, Transcript] = silent or (yield from _group_steps(request, {0: samples}, errors, inputs))
    for error in errors.values():
        raise error
    return transcripts[0]


def _group_steps(
    request: AudioLmRequest,
    samples: Mapping[int, Tensor],
    errors: dict[int, InputError],
    inputs: Mapping[str, Any] | None = None,
) -> Steps[dict[int, Transcript]]:
    """Transcribe recordings, whose prompts are read in one pass.

    Args:
        samples: Index -> 16 kHz samples (T,), not silent.
        errors: Index -> error; recordings that exceed the model's maximum length are added.
        inputs: What `request.inputs` has made of them, or None to make it here.

    Returns:
        Index -> transcript.
    """
    loaded = request.loaded
    stopwatch = Stopwatch(loaded.model.device)
    samples, inputs = _short_recordings(request, samples, errors, inputs)
    if not samples:
        return {}
    indices = [*samples]
    features_seconds = stopwatch.lap()
    speculation = request.speculation.for_inputs([DraftInput(index, sound) for index, sound in samples.items()])
    hypothesis_seconds = stopwatch.lap() if speculation is not request.speculation else 0.0
    usage = [Usage() for _ in indices]

    def on_round(round_: Round) -> None:
        if speculation.options.on_round is not None:
            speculation.options.on_round(renumber_rows(round_, indices))

    rest = yield from decode_inputs(
        loaded.model, loaded.tokenizer, speculation, request.options, inputs, usage, on_round
    )
    all_samples = sum(map(len, samples.values()))
    transcripts = dict[int, Transcript]()
    for index, entry in zip(indices, usage, strict=True):
        entry.seconds["features"] = features_seconds * len(samples[index]) / all_samples
        entry.seconds["drafter"] += hypothesis_seconds / len(usage)
        entry.seconds["encoder"] += entry.seconds.pop("prompt", 0.0)
        entry.seconds["rest"] = rest
        transcripts[index] = _transcript(request, entry, samples[index], index)
    return transcripts


def _short_recordings(
    request: AudioLmRequest,
    samples: Mapping[int, Tensor],
    errors: dict[int, InputError],
    inputs: Mapping[str, Any] | None,
) -> tuple[Mapping[int, Tensor], Mapping[str, Any]]:
    """Return those recordings that do not exceed the model's maximum length, and their inputs.

    Args:
        samples: Index -> 16 kHz samples (T,).
        errors: Index -> error; the other recordings are added.
        inputs: What `request.inputs` has made of all recordings, or None to make it here.
    """
    rule = "`audio` and `prompt` must take at most the model's {most} positions, the chat template included"
    while samples:
        inputs = request.inputs(samples) if inputs is None else inputs
        refused = length_errors(request.loaded.model, inputs, rule, "Cut the recording.")
        if not refused:
            return samples, inputs
        indices = [*samples]
        errors |= {indices[row]: error for row, error in refused.items()}
        samples = {index: sound for index, sound in samples.items() if index not in errors}
        inputs = None
    return {}, {}


def _transcript(request: AudioLmRequest, usage: Usage, samples: Tensor, index: int) -> Transcript:
    processor, language = cast(Any, request.loaded.processor), request.language(index)
    text: str = request.loaded.tokenizer.decode(usage.tokens, skip_special_tokens=True).strip()
    if hasattr(processor, "parse_output"):  # the model's output begins with the name of the language
        output = processor.parse_output(text)
        text, language = output["transcription"], language or output["language"]
    evidence = token_evidence(usage.logprobs)
    return Transcript(
        text=text,
        language=language and LANGUAGE_CODES.get(language.lower(), language),
        segments=[],
        tokens=usage.tokens,
        rounds=usage.rounds,
        tokens_per_round=usage.tokens_per_round,
        timings=timings(usage),
        seconds=len(samples) / SAMPLE_RATE,
        lossless=request.speculation.options.lossless,
        confidence=usage.limit_confidence(
            estimate_confidence(evidence, request.calibrations, TRANSCRIPT), sets_length(request.options)
        ),
        note=usage.note,
        finish_reason=usage.finish_reason,
        calibrated=TRANSCRIPT in request.calibrations,
        evidence=evidence,
    )


def _check_options(loaded: LoadedAudioLm, options: TranscribeOptions) -> None:
    """Raise InputError for an option of Whisper, and for a `prompt` that this model does not read."""
    name, prompt = type(loaded.model).__name__, options.prompt
    remedy = "Leave it out, or use a Whisper."
    if options.cut_at_pauses:
        raise InputError(f"`cut_at_pauses` must be False for {name}, but is True. {remedy}")
    windows = {"timestamps": options.timestamps} | {
        option: options.generate_options.get(option) for option in WINDOW_OPTIONS
    }
    for argument, value in windows.items():
        if value is not None:
            raise InputError(f"`{argument}` must be None for {name}, but is {format_value(value)}. {remedy}")
    if options.task not in (None, "transcribe"):
        raise InputError(
            f"`task` must be 'transcribe' for {name}, but is {format_value(options.task)}. Ask for it in `prompt`."
        )
    temperature = options.generate_options.get("temperature")
    if isinstance(temperature, (list, tuple)):
        raise InputError(
            f"`temperature` must be one number for {name}, but is {format_value(temperature)}. Leave it out for "
            "greedy decoding."
        )
    if prompt is not None and loaded.requests and not loaded.written:
        raise InputError(f"`prompt` must be None for {name}, but is {format_value(prompt)}. Leave it out.")
    if prompt is not None and not isinstance(prompt, str):
        raise InputError(f"`prompt` must be text, but is {format_value(prompt)}. Leave it out for none.")


def _languages(
    loaded: LoadedAudioLm, language: str | Sequence[str] | None, recordings: int
) -> str | Sequence[str] | None:
    """Check the languages of a call by calling the processor with each of them.

    Args:
        recordings: Number of recordings.

    Raises:
        InputError: For an unknown language.
    """
    if language is None:
        return None
    if "language" not in loaded.requests:
        raise InputError(
            f"`language` must be left out for {type(loaded.model).__name__}, which detects it, but is "
            f"{format_value(language)}. Name it in `prompt`."
        )
    for name in language_names(language, recordings):
        try:
            settings = {"tokenize": False} if loaded.written else {"model_id": "", "format": ["wav"]}
            request = cast(Any, loaded.processor).apply_transcription_request
            request([torch.zeros(SAMPLE_RATE).numpy()], language=name, **settings)
        except Exception as error:
            raise InputError(
                f"`language` must be one that {type(loaded.model).__name__} knows, but is {format_value(name)} "
                f"({error_line(error)}). Leave it out to have it detected."
            ) from error
    return language
