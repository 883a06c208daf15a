"""Transcribes one recording window by window, as a generator that asks for everything that runs the model.

A Whisper reads windows of 30 s. `transcribe_windows` decides what happens around them: which tokens a window's text
begins with, where the next window starts, whether a text is decoded again at a higher temperature or dropped as
silence, and which segments the timestamps delimit. `WindowDecoder` encodes and decodes the windows. Both yield each
pass of the model and continue with its result, so the scheduler drives any number of recordings in one thread, and
their decoder passes are computed together.

The result equals that of transformers' `generate` for one recording, which encodes a window again for each temperature
and each question; here each window is encoded once, and the probability of silence costs a pass only if the text is
improbable.

References:
    Radford et al. 2022 (Whisper), sections 3.8 and 4.5: the sequence of windows, fallback temperatures and thresholds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import pairwise
from typing import Any, Literal, cast, final

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import GenerationConfig, GenerationMixin, WhisperForConditionalGeneration
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperNoSpeechDetection,
    WhisperTimeStampLogitsProcessor,
)
from transformers.modeling_outputs import BaseModelOutput

from mmdec.checks.arguments import show
from mmdec.core.steps import Steps, compute_value
from mmdec.errors import InputError
from mmdec.whisper.repetition import token_compression_ratio
from mmdec.whisper.special_tokens import language_code
from mmdec.whisper.window_decoder import WindowCall, WindowDecoder
from mmdec.whisper.words import TokenAligner, WordBeginnings

TIMESTAMP_SECONDS = 0.02  # from one timestamp token to the next
FRAME_SECONDS = 0.01  # from one feature frame to the next
MAX_CONDITION_TEMPERATURE = 0.5  # the next window is not conditioned on text that was sampled at this or more
CONDITION_TYPES = ("first-segment", "all-segments")

# Times the tokens of a window: (the output object, with `cross_attentions`; the window's features; number of prompt
# tokens; frames with sound, None: all) -> start and duration in seconds of each of the L tokens (L,).
TimeTokens = Callable[[Any, Tensor, int, int | None], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class TimedSegment:
    """The text between two timestamp tokens. Times are seconds from the recording's beginning."""

    start: float
    end: float
    tokens: list[int]  # timestamp tokens included
    window: int  # index in `LongFormResult.windows`
    token_starts: Tensor | None = None  # start of each token; None: tokens were not timed
    token_seconds: Tensor | None = None  # duration of each token; None: unknown


@dataclass(frozen=True)
class DecodedWindow:
    """The text of one window, and how it was decoded."""

    seek: int  # the frame of the recording at which it begins
    frames: int
    prompt: list[int]  # the tokens that the text continues
    tokens: list[int]  # the text, without the end token
    temperature: float | None  # the one of the text; lower ones were tried before it
    attempts: int  # number of temperatures tried
    skipped: bool  # whether the window counts as silence, so that its text was dropped
    compression_ratio: float | None  # None without `compression_ratio_threshold`
    avg_logprob: float | None  # mean over the tokens, the end token included; None without `logprob_threshold`
    no_speech_prob: float | None  # None if nothing depended on it


@dataclass(frozen=True)
class LongFormResult:
    """The text of a recording."""

    segments: list[TimedSegment] = field(default_factory=lambda: [])
    windows: list[DecodedWindow] = field(default_factory=lambda: [])

    @property
    def tokens(self) -> list[int]:
        """The token ids of all segments, which are `generate`'s sequence."""
        return [token for segment in self.segments for token in segment.tokens]


@dataclass(frozen=True, kw_only=True)
class LongFormOptions:
    """The options of transformers' `generate` for one recording, with its defaults."""

    language: str | None = None
    task: str | None = None
    return_timestamps: bool | None = None
    prompt_ids: Tensor | None = None  # (P,)
    prompt_condition_type: Literal["first-segment", "all-segments"] | None = None
    condition_on_prev_tokens: bool | None = None
    temperature: float | Sequence[float] | None = None
    compression_ratio_threshold: float | None = None
    logprob_threshold: float | None = None
    no_speech_threshold: float | None = None
    logits_processor: Sequence[Any] | None = None
    further: Mapping[str, Any] = field(default_factory=lambda: {})  # options of all models' `generate`

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> LongFormOptions:
        """Make options from keyword arguments of `generate`."""
        names = {one.name for one in fields(cls)} - {"further"}
        own = {name: value for name, value in options.items() if name in names}
        return cls(**own, further={name: value for name, value in options.items() if name not in names})


def transcribe_windows(
    model: WhisperForConditionalGeneration,
    input_features: Tensor,
    decoder: WindowDecoder,
    options: LongFormOptions = LongFormOptions(),
    *,
    attention_mask: Tensor | None = None,
    time_tokens: TimeTokens | None = None,
) -> Steps[LongFormResult]:
    """Transcribe one recording.

    Args:
        model: Its generation config gives defaults. Another attention than "eager" is kept for timed tokens, too.
        input_features: (1, mels, T), one window or more.
        decoder: Runs the model on each window.
        options: Those of the call.
        attention_mask: (1, T), 1 at frames with sound; only `time_tokens` reads it.
        time_tokens: Times the tokens of each window; None: they get no times.

    Yields:
        The passes of the encoder and the decoder.

    Returns:
        Segments and windows.

    Raises:
        InputError: For options that contradict each other or the model.
    """
    is_long = input_features.shape[-1] > _window_width(model)
    call_options = _resolve_options(model, options, is_long, times_tokens=time_tokens is not None)
    frames, width, stride = input_features.shape[-1], _window_width(model), _input_stride(model)
    sound_frames = None if attention_mask is None else int(attention_mask.sum())

    # The language is detected in the first window. All windows' texts begin with the same tokens.
    features = _window_features(input_features, 0, width)
    encoded = yield from decoder.encode(features)
    initial = yield from _initial_tokens(model, call_options, encoded)
    processors, silence, previous_start = _processors(
        call_options.settings, options.logits_processor, len(initial), call_options.thresholds, model
    )
    fallback = _FallbackDecoder(model, decoder, call_options, attention_mask, initial, processors, silence)

    # A window begins where the last complete segment ended.
    result, seek = LongFormResult(), 0
    history = _History(model, call_options, previous_start)
    while seek < frames:
        if seek:
            features = _window_features(input_features, seek, width)
            encoded = yield from decoder.encode(features)
        previous = history.previous_tokens()
        window = _Window(
            features=features,
            encoded=encoded,
            seek=seek,
            frames=min(frames - seek, width),
            ids=torch.tensor([[*previous, *initial]], device=model.device),
            masks_padding=history.continues,
        )
        decoded, output = yield from fallback.decode(window)
        result.windows.append(decoded)
        history.note_temperature(decoded.temperature)
        if decoded.skipped:
            seek += window.frames
            continue
        times = None
        if time_tokens is not None:
            frames_left = None if sound_frames is None else sound_frames - seek
            times = time_tokens(output, features, window.ids.shape[1], frames_left)
        spans, advance = _spans(decoded.tokens, call_options.first_timestamp, window.frames, stride)
        segments = _timed_segments(decoded, spans, seek * TIMESTAMP_SECONDS / stride, len(result.windows) - 1, times)
        result.segments.extend(segments)
        history.texts.extend(segment.tokens for segment in segments)
        seek += advance
    return result


@dataclass(frozen=True)
class _CallOptions:
    """The options of a call. Those that the caller left out come from the model's generation config."""

    settings: Any  # the `GenerationConfig`; its length and temperature are set for each window
    others: Mapping[str, Any]  # options of the caller that are not of a generation config
    thresholds: _Thresholds
    temperatures: Sequence[float | None]  # a window is decoded again at the next one if its text is refused
    condition: bool  # whether a window's text continues those of earlier windows
    prompt_ids: Tensor | None  # (P,) the caller's
    prompt_kind: str  # one of `CONDITION_TYPES`
    language: str | None
    task: str | None
    no_timestamps: int | None  # id of the token that says that a text has no timestamps; timestamp tokens follow it
    first_timestamp: int  # id of the first timestamp token; beyond the vocabulary if there is none


def _resolve_options(
    model: WhisperForConditionalGeneration, options: LongFormOptions, is_long: bool, times_tokens: bool
) -> _CallOptions:
    """Complete the options of a call by the model's generation config, and check them.

    Args:
        is_long: Whether the recording is longer than one window.
        times_tokens: Whether tokens are timed, so that the decoder must return its attention.

    Raises:
        InputError: For options that contradict each other or the model.
    """
    config, others = _generation_config(model, options.further)
    settings: Any = config

    def value_of(name: str) -> Any:
        value = getattr(options, name)
        return value if value is not None else getattr(settings, name, None)

    thresholds = _Thresholds(
        value_of("compression_ratio_threshold"),
        value_of("logprob_threshold"),
        value_of("no_speech_threshold"),
    )
    condition = bool(value_of("condition_on_prev_tokens"))
    timestamps = True if is_long and options.return_timestamps is None else bool(value_of("return_timestamps"))
    no_timestamps: int | None = getattr(settings, "no_timestamps_token_id", None)
    _check(settings, options, is_long=is_long, condition=condition, timestamps=timestamps)
    temperature = options.temperature
    settings.return_timestamps = timestamps
    settings.return_token_timestamps = times_tokens
    settings.output_attentions = times_tokens
    settings.output_scores = thresholds.logprob is not None
    settings.return_dict_in_generate = times_tokens or thresholds.logprob is not None
    return _CallOptions(
        settings=settings,
        others=others,
        thresholds=thresholds,
        temperatures=list(temperature) if isinstance(temperature, Sequence) else [temperature],
        condition=condition,
        prompt_ids=options.prompt_ids,
        prompt_kind=options.prompt_condition_type or CONDITION_TYPES[0],
        language=value_of("language"),
        task=value_of("task"),
        no_timestamps=no_timestamps,
        first_timestamp=model.config.vocab_size + 1 if no_timestamps is None else no_timestamps + 1,
    )


def _initial_tokens(
    model: WhisperForConditionalGeneration, options: _CallOptions, encoded: BaseModelOutput
) -> Steps[list[int]]:
    """Return what each window's text begins with: the start token, the language, the task, and whether it has
    timestamps. A language that nothing names is detected.

    Args:
        encoded: The encoder's states of the first window.
    """
    settings = options.settings
    start = _start_tokens(model, settings, options.language, options.task)
    if start.undetected:
        ids = torch.tensor([[settings.decoder_start_token_id]], device=model.device)
        logits = yield from _known_logits(model, ids, None, encoded)
        languages = sorted(settings.lang_to_id.values())
        start.tokens[1:2] = [languages[int(logits[0, -1, languages].argmax())]]
    return _with_task(start.tokens, settings, options.language, options.task)


@final
class _History:
    """The texts that the next window's may continue.

    Args:
        previous_start: The token that introduces previous text, as a list; empty if the model has none.
    """

    def __init__(
        self, model: WhisperForConditionalGeneration, options: _CallOptions, previous_start: Sequence[int]
    ) -> None:
        self._options, self._previous_start = options, previous_start
        self._most = model.config.max_target_positions // 2 - 1
        self._conditions = options.condition
        self.texts = list[list[int]]()
        ids = options.prompt_ids
        if ids is not None and options.prompt_kind == "first-segment":
            begun = int(ids[0]) == getattr(options.settings, "prev_sot_token_id", None)
            self.texts.append(ids[begun:].tolist())

    @property
    def continues(self) -> bool:
        """Whether the next window's text continues earlier ones."""
        return self._conditions and bool(self.texts)

    def previous_tokens(self) -> list[int]:
        """Return the tokens before the next window's initial ones."""
        ids = self._options.prompt_ids
        if self.continues:
            head = self._previous_start
            if ids is not None and self._options.prompt_kind == "all-segments":
                head = ids.tolist()
            return [*head, *_recent(self.texts, self._options.first_timestamp, self._most)]
        return [] if ids is None else ids.tolist()

    def note_temperature(self, temperature: float | None) -> None:
        """Decide by the temperature of a window's text whether the next window's continues it."""
        is_cool = temperature is None or temperature < MAX_CONDITION_TEMPERATURE
        self._conditions = self._options.condition and is_cool


@dataclass(frozen=True)
class _Window:
    """A window to decode."""

    features: Tensor  # (1, mels, F)
    encoded: BaseModelOutput
    seek: int  # the frame of the recording at which it begins
    frames: int  # number of its frames that belong to the recording
    ids: Tensor  # (1, P), what its text continues
    masks_padding: bool  # whether `ids` may hold padding, which the decoder must not see

    def mask(self, pad_token: int) -> Tensor | None:
        """Return the mask (1, P) of `ids`; None if no token is padding."""
        return self.ids != pad_token if self.masks_padding else None


@final
@dataclass(frozen=True)
class _FallbackDecoder:
    """Decodes windows of one recording, at several temperatures if need be."""

    model: WhisperForConditionalGeneration
    decoder: WindowDecoder
    options: _CallOptions
    attention_mask: Tensor | None  # of the recording's features
    initial: Sequence[int]  # the tokens that each text begins with
    processors: Sequence[Any]
    silence: WhisperNoSpeechDetection | None  # notes the probability of silence; None: it costs a pass

    def decode(self, window: _Window) -> Steps[tuple[DecodedWindow, Any]]:
        """Decode a window at one temperature after another, until its text is not refused.

        Returns:
            The text, and what `WindowDecoder.decode` returned for it.
        """
        settings, thresholds = self.options.settings, self.options.thresholds
        prompt = window.ids.shape[1]
        _limit_length(settings, self.model, prompt)
        for processor in self.processors:
            if hasattr(processor, "set_begin_index"):
                processor.set_begin_index(prompt)
        arguments = self._arguments(window)
        decoded, output = None, None
        for attempt, temperature in enumerate(self.options.temperatures):
            settings.do_sample = temperature is not None and temperature > 0
            settings.temperature = temperature if settings.do_sample else 1.0
            ids, inputs, config = _prepare(self.model, settings, arguments)
            output = yield from self.decoder.decode(
                WindowCall(ids, config, inputs, window.features, window.seek, attempt)
            )
            tokens = _new_tokens(output, prompt, settings)
            ratio = logprob = None
            if thresholds.compression_ratio is not None:
                ratio = token_compression_ratio(tokens, self.model.config.vocab_size)
            if thresholds.logprob is not None:
                logprob = _mean_logprob(output.scores, tokens, temperature or 0.0)
            no_speech = None
            if thresholds.no_speech is not None and logprob is not None and logprob < cast(float, thresholds.logprob):
                no_speech = yield from self._no_speech_prob(window)
            skipped = no_speech is not None and no_speech > cast(float, thresholds.no_speech)
            decoded = DecodedWindow(
                seek=window.seek,
                frames=window.frames,
                prompt=window.ids[0].tolist(),
                tokens=tokens[:-1] if tokens[-1] == settings.eos_token_id else tokens,
                temperature=temperature,
                attempts=attempt + 1,
                skipped=skipped,
                compression_ratio=ratio,
                avg_logprob=logprob,
                no_speech_prob=no_speech,
            )
            if skipped or not thresholds.refuse(ratio, logprob):
                break
        assert decoded is not None
        return decoded, output

    def _arguments(self, window: _Window) -> dict[str, Any]:
        """Return the arguments of `generate` for a window."""
        mask = window.mask(self.options.settings.pad_token_id)
        return {
            "inputs": window.features,
            "encoder_outputs": window.encoded,
            "attention_mask": self.attention_mask,
            "decoder_input_ids": window.ids,
            "logits_processor": self.processors,
            # otherwise `generate` would add the model's own processors to those above
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
            **({} if mask is None else {"decoder_attention_mask": mask}),
            **self.options.others,
        }

    def _no_speech_prob(self, window: _Window) -> Steps[float]:
        """Return the probability that a window is silent: of its token after the start token."""
        if self.silence is not None:
            return float(self.silence.no_speech_prob[0])
        mask = window.mask(self.options.settings.pad_token_id)
        logits = yield from _known_logits(self.model, window.ids, mask, window.encoded)
        at_start = logits[0, window.ids.shape[1] - len(self.initial)]
        return float(at_start.float().softmax(-1)[cast(int, self.options.no_timestamps) - 1])


def _timed_segments(
    decoded: DecodedWindow,
    spans: Sequence[_Span],
    offset: float,
    index: int,
    times: tuple[Tensor, Tensor | None] | None,
) -> list[TimedSegment]:
    """Return the segments of a window's text.

    Args:
        spans: Where they begin and end, from `_spans`.
        offset: Seconds of the recording before the window.
        index: The window's.
        times: Start and duration of each token of prompt and text, in seconds; None: they were not timed.
    """
    starts, seconds = (None, None) if times is None else times
    prompt, segments = len(decoded.prompt), list[TimedSegment]()
    for span in spans:
        places = slice(prompt + span.begin, prompt + span.end)
        segments.append(
            TimedSegment(
                start=offset + span.first * TIMESTAMP_SECONDS,
                end=offset + span.last * TIMESTAMP_SECONDS,
                tokens=decoded.tokens[span.begin : span.end],
                window=index,
                token_starts=None if starts is None else starts[places] + offset,
                token_seconds=None if seconds is None else seconds[places],
            )
        )
    return segments


def check_no_speech(no_speech: float | None, logprob: float | None) -> None:
    """Raise InputError for a `no_speech_threshold` without a `logprob_threshold`; None: not given."""
    if no_speech is not None and logprob is None:
        raise InputError(
            f"`logprob_threshold` must be given with `no_speech_threshold`, which is {show(no_speech)}, but is None: a "
            "window is silent only if both say so. Whisper's default is -1.0."
        )


@dataclass(frozen=True)
class _Thresholds:
    """The limits beyond which a window's text is refused; None: no limit."""

    compression_ratio: float | None
    logprob: float | None
    no_speech: float | None

    def __post_init__(self) -> None:
        check_no_speech(self.no_speech, self.logprob)

    def refuse(self, ratio: float | None, logprob: float | None) -> bool:
        """Return whether a text repeats itself too much or is too improbable."""
        repeats = ratio is not None and ratio > cast(float, self.compression_ratio)
        return repeats or (logprob is not None and logprob < cast(float, self.logprob))


def _generation_config(
    model: WhisperForConditionalGeneration, options: Mapping[str, Any]
) -> tuple[GenerationConfig, dict[str, Any]]:
    """Return the model's generation config with these options, and the options that are not of a generation config."""
    config = copy.deepcopy(cast(GenerationConfig, model.generation_config))
    others = config.update(**options)
    if config.max_length is None and config.max_new_tokens is None:
        config.max_length = model.config.max_target_positions
    return config, others


def _check(settings: Any, options: LongFormOptions, *, is_long: bool, condition: bool, timestamps: bool) -> None:
    """Raise InputError for options that contradict each other or the model.

    Args:
        settings: The generation config.
        options: Those of the call.
        is_long: Whether the recording is longer than one window.
        condition: Whether a window's text continues those of earlier windows.
        timestamps: Whether texts have timestamps.
    """
    language, task, prompt_kind = options.language, options.task, options.prompt_condition_type or CONDITION_TYPES[0]
    if (language is not None or task is not None) and not getattr(settings, "is_multilingual", True):
        raise InputError(
            f"`language` and `task` must be None for an English-only model, but are {show(language)} and {show(task)}. "
            "Leave them out."
        )
    if prompt_kind not in CONDITION_TYPES:
        raise InputError(
            f"`prompt_condition_type` must be one of {', '.join(CONDITION_TYPES)}, but is {show(prompt_kind)}. Choose "
            "one."
        )
    if prompt_kind == "all-segments" and not condition:
        raise InputError(
            "`condition_on_prev_tokens` must be True where `prompt_condition_type` is 'all-segments', but is False. "
            "Set it, or condition only the first segment."
        )
    if is_long and not timestamps:
        raise InputError(
            "`return_timestamps` must be True for a recording longer than one window, but is False: the next window "
            "begins at a timestamp. Leave it out."
        )
    if timestamps and getattr(settings, "no_timestamps_token_id", None) is None:
        raise InputError(
            "`return_timestamps` must be False for a model whose generation config has no `no_timestamps_token_id`, "
            "but is True. Set this id, or leave timestamps out."
        )


@dataclass(frozen=True)
class _StartTokens:
    """The first tokens of each window's text, without the task."""

    tokens: list[Any]  # the start token, the language (None: no token), and what an old generation config forces
    undetected: bool  # whether the language is to be detected and inserted after the start token


def _start_tokens(
    model: WhisperForConditionalGeneration, settings: Any, language: str | None, task: str | None
) -> _StartTokens:
    tokens: list[Any] = [settings.decoder_start_token_id]
    if language is not None:
        if not getattr(settings, "lang_to_id", None):
            raise InputError(
                f"`language` must be None for a model without tokens of languages, but is {show(language)}. Leave it "
                "out."
            )
        return _StartTokens([*tokens, settings.lang_to_id[f"<|{language_code(settings, language)}|>"]], False)
    if task is None:  # the checkpoints of OpenAI still name language and task as tokens that are forced
        forced = getattr(settings, "forced_decoder_ids", None) or getattr(model.config, "forced_decoder_ids", None)
        places = [place for place, _ in forced or ()]
        if places and places[0] == 1:
            if places != list(range(1, len(places) + 1)):
                raise InputError(
                    f"`forced_decoder_ids` must name the positions 1, 2, ... in order, but is {show(forced)}. Leave "
                    "it out, and give `language` and `task`."
                )
            tokens += [token for _, token in cast(Any, forced)]
    names_language = len(tokens) > 1 and tokens[1] is not None
    return _StartTokens(tokens, getattr(settings, "lang_to_id", None) is not None and not names_language)


def _with_task(tokens: Sequence[Any], settings: Any, language: str | None, task: str | None) -> list[int]:
    """Append the task token and, without timestamps, the token that says so."""
    tokens = list(tokens)
    tasks: Mapping[str, int] | None = getattr(settings, "task_to_id", None)
    if task is not None:
        if tasks is None or task not in tasks:
            raise InputError(f"`task` must be one of {', '.join(tasks or ())}, but is {show(task)}. Choose one.")
        tokens.append(tasks[task])
    elif language is not None and tasks is not None and not set(tokens) & set(tasks.values()):
        tokens.append(tasks["transcribe"])
    no_timestamps = getattr(settings, "no_timestamps_token_id", None)
    if settings.return_timestamps and tokens[-1] == no_timestamps:
        tokens.pop()
    elif not settings.return_timestamps and no_timestamps is not None and tokens[-1] != no_timestamps:
        tokens.append(no_timestamps)
    return [token for token in tokens if token is not None]


def _processors(
    settings: Any,
    given: Sequence[Any] | None,
    begin: int,
    thresholds: _Thresholds,
    model: WhisperForConditionalGeneration,
) -> tuple[list[Any], WhisperNoSpeechDetection | None, list[int]]:
    """Make the logits processors of all windows, in transformers' order, and clear the settings that they replace.

    Args:
        given: The caller's processors.
        begin: Number of tokens that each text begins with.

    Returns:
        The processors; the one that notes the probability of silence, if the first logits hold it, else None; the
        token that introduces previous text, as a list, empty if the model has none.
    """
    device: Any = model.device  # typed as `Any`, because transformers' type is str
    processors, silence = list[Any](), None
    if thresholds.no_speech is not None and begin == 1:
        # the probability is that after the start token, whose logits are those of the first new token
        silence = WhisperNoSpeechDetection(settings.no_timestamps_token_id - 1, begin)
        processors.append(silence)
    if settings.begin_suppress_tokens is not None:
        processors.append(SuppressTokensAtBeginLogitsProcessor(settings.begin_suppress_tokens, begin, device=device))
    suppressed = settings.suppress_tokens
    if suppressed is not None:
        processors.append(SuppressTokensLogitsProcessor(suppressed, device=device))
    if settings.return_timestamps:
        processors.append(WhisperTimeStampLogitsProcessor(settings, begin_index=begin))
    settings.begin_suppress_tokens = settings.suppress_tokens = None
    previous_start: int | None = getattr(settings, "prev_sot_token_id", None)
    if previous_start is None and suppressed is not None and len(suppressed) >= 2:
        previous_start = int(suppressed[-2])  # as in the checkpoints of OpenAI
    return [*processors, *(given or ())], silence, [] if previous_start is None else [previous_start]


def _input_stride(model: WhisperForConditionalGeneration) -> int:
    """Return the number of feature frames for each encoder state."""
    encoder: Any = model.model.encoder
    return int(encoder.conv1.stride[0] * encoder.conv2.stride[0])


def _window_width(model: WhisperForConditionalGeneration) -> int:
    """Return the number of feature frames of a window."""
    return _input_stride(model) * model.config.max_source_positions


def _window_features(features: Tensor, seek: int, width: int) -> Tensor:
    """Cut a window of `width` frames out of features (1, mels, T), padded with zeros at the recording's end."""
    window = features[..., seek : seek + width]
    return pad(window, (0, width - window.shape[-1]))


def _known_logits(
    model: WhisperForConditionalGeneration, ids: Tensor, mask: Tensor | None, encoded: BaseModelOutput
) -> Steps[Tensor]:
    """Compute the decoder's logits (1, P, V) after each of the P tokens of a known text.

    Args:
        ids: (1, P).
        mask: (1, P), False where a token is padding; None: nowhere.
        encoded: The encoder's states.
    """
    options: dict[str, Tensor] = {}
    if mask is not None:
        positions = (mask.long().cumsum(-1) - 1).masked_fill(~mask, 0)
        options = {"decoder_attention_mask": mask, "decoder_position_ids": positions}
    run = partial(cast(Any, model), encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False, **options)
    output = yield from compute_value(ids.device, run, "decoder")
    return output.logits


def _recent(written: Sequence[Sequence[int]], first_time: int, most: int) -> list[int]:
    """Join previous texts, and return their last tokens, at most `most`.

    A text that ends with two timestamps loses the last one, which is the next text's first.
    """
    doubled = (len(text) > 2 and text[-2] >= first_time for text in written)
    joined = [token for text, twice in zip(written, doubled, strict=True) for token in text[: len(text) - twice]]
    return joined[-most:]


def _limit_length(settings: Any, model: WhisperForConditionalGeneration, prompt: int) -> None:
    """Set how long this window's text may become.

    Args:
        settings: The generation config. Its `max_length` counts new tokens; the prompt of each window is added to it,
            and stays in it for the next window, as in transformers.
        prompt: Number of tokens before the new ones.
    """
    room = model.config.max_target_positions
    if settings.max_new_tokens is None:
        settings.max_length = min(settings.max_length + min(room // 2 - 1, prompt), room)
    elif settings.max_new_tokens + prompt > room:
        raise InputError(
            f"`max_new_tokens` must be at most {room - prompt} after {prompt} tokens of prompt and previous text, but "
            f"is {settings.max_new_tokens}. Lower it, or shorten the prompt."
        )


@dataclass(frozen=True)
class _Prepared:
    """A decoding loop for `generate` that decodes nothing, and returns what `generate` has prepared."""

    def __call__(
        self, model: Any, input_ids: Tensor, generation_config: GenerationConfig, **inputs: Any
    ) -> tuple[Tensor, dict[str, Any], GenerationConfig]:
        return input_ids, inputs, generation_config


def _prepare(
    model: WhisperForConditionalGeneration, config: GenerationConfig, arguments: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Any], GenerationConfig]:
    """Let the `generate` of all models, not Whisper's own, prepare the decoding of one window."""
    generate = cast(Any, GenerationMixin).generate
    return generate(model, **arguments, generation_config=config, custom_generate=_Prepared())


def _new_tokens(output: Any, prompt: int, settings: Any) -> list[int]:
    """Return the new tokens of what `WindowDecoder.decode` returned, with their end token, but without padding."""
    ids: Tensor = output if isinstance(output, Tensor) else output.sequences
    tokens: list[int] = ids[0, prompt:].tolist()
    if tokens[-1] == settings.pad_token_id:
        padding = tokens.count(settings.pad_token_id) - (settings.pad_token_id == settings.eos_token_id)
        tokens = tokens[: len(tokens) - padding]
    return tokens


def _mean_logprob(scores: Sequence[Tensor], tokens: Sequence[int], temperature: float) -> float:
    """Return the mean log-probability of the tokens, the end token included.

    Args:
        scores: (1, V) for each new token, the logits after all processors, which divide by the temperature.
    """
    logits = torch.stack(list(scores))[: len(tokens), 0]
    chosen = torch.tensor(tokens[-len(logits) :], device=logits.device)
    scaled = (logits * (temperature or 1)).float()
    logprobs = scaled.log_softmax(-1).to(logits.dtype).gather(1, chosen[:, None])[:, 0].cpu()
    return float(sum(logprobs) / len(chosen))  # summed in order, as in transformers: the last bit may decide


@dataclass(frozen=True)
class _Span:
    """The tokens of one segment in a window's text, and its times in timestamp steps from the window's beginning."""

    begin: int
    end: int
    first: int
    last: int


def _spans(tokens: Sequence[int], first_time: int, frames: int, stride: int) -> tuple[list[_Span], int]:
    """Cut a window's text into segments at its pairs of timestamps.

    Args:
        frames: Number of frames of the recording in the window.
        stride: Frames for each timestamp step.

    Returns:
        The segments, and by how many frames the next window begins later.
    """
    times = [token >= first_time for token in tokens]
    cuts = [place for place, (one, other) in enumerate(pairwise(times), 1) if one and other]
    if not cuts:  # the whole text is one segment, up to its last timestamp
        # in single precision, as in transformers, because the result is rounded down
        last = int(torch.tensor(frames) * FRAME_SECONDS / TIMESTAMP_SECONDS)
        timestamps = [token for token in tokens if token >= first_time]
        if timestamps and timestamps[-1] != first_time:
            last = timestamps[-1] - first_time
        return [_Span(0, len(tokens), 0, last)], frames
    ends_alone = times[-2:] == [False, True]  # no speech after the last timestamp
    # Otherwise the text after the last pair is dropped: the window cut it off, so the next window begins with it. The
    # pair's second timestamp stays, to show that there was a pair.
    bounds = [0, *cuts, len(tokens)] if ends_alone else [0, *cuts[:-1], cuts[-1] + 1]
    spans = [
        _Span(begin, end, tokens[begin] - first_time, tokens[end - 1] - first_time) for begin, end in pairwise(bounds)
    ]
    if ends_alone:
        return spans, frames
    last = tokens[bounds[-1] - 2] - first_time
    spans[-1] = _Span(spans[-1].begin, spans[-1].end, spans[-1].first, last)
    return spans, last * stride


def align_tokens(model: WhisperForConditionalGeneration, begins: WordBeginnings) -> TimeTokens:
    """Return a `time_tokens` that aligns tokens to attention and loudness.

    Args:
        begins: Called with token ids; returns for each whether it begins a word, None for a token without sound.
    """
    settings: Any = model.generation_config
    layers, first_time = model.config.decoder_layers, settings.no_timestamps_token_id + 1

    def times(output: Any, features: Tensor, prompt: int, frames: int | None) -> tuple[Tensor, Tensor]:
        aligner = TokenAligner(layers, begins, lambda: features, first_time)
        starts = aligner(output, settings.alignment_heads, num_frames=frames, num_input_ids=prompt)
        return starts[0], output["token_seconds"][0]

    return times
