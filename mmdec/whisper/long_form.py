"""Decodes one recording window by window, as a generator that asks for everything that runs the model.

A Whisper reads windows of 30 s. `transcribe_windows` decides what happens around them: which tokens a window's text
begins with, where the next window starts, and which segments the timestamps delimit. `window.WindowDecoder` decodes
each. Both yield the passes of the model and continue with their results, so the scheduler drives any number of
recordings in one thread, and their decoder passes are computed together. `prepare_recording` comes before,
`finish_recording` after.

The result equals that of transformers' `generate` for one recording, which encodes a window again for each temperature
and each question; here each window is encoded once, and the probability of silence costs a pass only if the text is
improbable.

References:
    Radford et al. 2022 (Whisper), sections 3.8 and 4.5: the sequence of windows, fallback temperatures and thresholds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from mmdec.checks.arguments import format_value
from mmdec.core.steps import Steps
from mmdec.core.timing import Stopwatch
from mmdec.errors import InputError
from mmdec.generation.drafter_source import DraftInput
from mmdec.io.audio import SAMPLE_RATE
from mmdec.tasks.usage import Usage
from mmdec.whisper.progress import PartProgress
from mmdec.whisper.request import TranscriptionRequest
from mmdec.whisper.special_tokens import first_timestamp_token, language_code
from mmdec.whisper.transcript import UNSPACED_LANGUAGES, Segment, reconcile_times, word_beginnings, words_from_tokens
from mmdec.whisper.window import (
    DecodedWindow,
    PreparedRecording,
    UsageMeter,
    Window,
    WindowDecoder,
    encode_window,
    known_logits,
)
from mmdec.whisper.window_encoder import WindowEncoder
from mmdec.whisper.window_options import WindowOptions
from mmdec.whisper.words import align_window

TIMESTAMP_SECONDS = 0.02  # from one timestamp token to the next
FRAME_SECONDS = 0.01  # from one feature frame to the next
MAX_CONDITION_TEMPERATURE = 0.5  # the next window is not conditioned on text that was sampled at this or more


@dataclass(frozen=True)
class RecordingPart:
    """What is decoded by itself: a recording of a call, or a part of one."""

    index: int  # the recording's, in the call
    samples: Tensor  # (T,) at 16 kHz
    start: int = 0  # number of the recording's samples before it
    total: int = 0  # number of the recording's samples; 0: unknown
    progress: PartProgress | None = None  # gets the seconds before each window


@dataclass(frozen=True)
class DecodedRecording:
    """The text and the cost of one recording, or of one part of it."""

    segments: list[Segment]
    language: str | None  # language code; None if the model has only one language
    usage: Usage
    samples: int  # duration in samples at 16 kHz


@dataclass(frozen=True)
class TimedSegment:
    """The text between two timestamp tokens. Times are seconds from the recording's beginning."""

    start: float
    end: float
    tokens: list[int]  # timestamp tokens included
    token_starts: Tensor | None = None  # start of each token, or None if they were not timed
    token_seconds: Tensor | None = None  # duration of each token, or None if unknown


@dataclass(frozen=True)
class LongFormResult:
    """The text of a recording, and its cost."""

    usage: Usage
    segments: list[TimedSegment] = field(default_factory=lambda: [])
    windows: list[DecodedWindow] = field(default_factory=lambda: [])


def prepare_recording(request: TranscriptionRequest, part: RecordingPart) -> PreparedRecording:
    """Compute the features of a recording, or of a part of one, and choose what decodes it.

    Raises:
        InputError: For options that contradict each other or the model.
    """
    whisper, model = request.whisper, request.whisper.model
    stopwatch = Stopwatch(model.device)
    seconds = dict[str, float]()  # stage -> seconds
    start, total = part.start / SAMPLE_RATE, part.total / SAMPLE_RATE
    speculation = request.speculation.for_inputs([DraftInput(part.index, part.samples, start, total)])
    if speculation is not request.speculation:  # a text of this recording was made to draft from
        seconds["drafter"] = stopwatch.lap()
    inputs = request.features([part.samples])
    seconds["features"] = stopwatch.lap()
    time_tokens = None
    if request.timestamps == "word":
        decode = partial(whisper.tokenizer.decode, skip_special_tokens=True)
        settings: Any = model.generation_config
        time_tokens = partial(
            align_window,
            heads=settings.alignment_heads,
            begins=partial(word_beginnings, decode=decode),
            first_time=first_timestamp_token(model),
        )
    is_long = whisper.is_long(len(part.samples))
    call_options = request.generate_options(part.index, is_long)
    options = WindowOptions.from_options(model, call_options, is_long, time_tokens is not None, request.caller_options)
    seconds["rest"] = stopwatch.lap()
    return PreparedRecording(
        model=model,
        speculation=speculation,
        options=options,
        features=inputs["input_features"],
        frames_per_second=SAMPLE_RATE / whisper.extractor.hop_length,
        margin=request.margin,
        attention_mask=inputs["attention_mask"],
        time_tokens=time_tokens,
        index=part.index,
        progress=part.progress,
        seconds=seconds,
    )


def transcribe_windows(recording: PreparedRecording) -> Steps[LongFormResult]:
    """Transcribe one recording.

    Yields:
        The passes of the encoder and the decoder.

    Returns:
        Segments, windows and cost.

    Raises:
        InputError: For an option that the model rejects.
        Exception: What a callback raised.
    """
    model, options = recording.model, recording.options
    encoder = WindowEncoder(model, recording.margin, recording.frames_per_second)
    meter = UsageMeter(recording)
    frames = recording.features.shape[-1]
    stride = _input_stride(model)
    width = stride * model.config.max_source_positions
    result = LongFormResult(meter.usage)
    texts = _prompt_texts(options)  # earlier texts, which a window may continue
    continues = options.condition  # whether the next one does
    initial = list[int]()  # the tokens that each text begins with
    decoder = None

    seek = 0  # a window begins where the last complete segment ended
    while seek < frames:
        features = recording.features[..., seek : seek + width]
        features = pad(features, (0, width - features.shape[-1]))
        encoded = yield from encode_window(encoder, features, meter)
        if decoder is None:
            initial = yield from _initial_tokens(model, options, encoded, meter)  # the first window tells the language
            decoder = WindowDecoder(recording, initial, encoder, meter)
        has_context = continues and bool(texts)
        ids = torch.tensor([[*_previous_tokens(model, options, texts if has_context else ()), *initial]])
        ids = ids.to(model.device)
        window = Window(
            features=features,
            encoded=encoded,
            seek=seek,
            frames=min(frames - seek, width),
            ids=ids,
            mask=ids != options.settings.pad_token_id if has_context else None,
        )
        if recording.progress is not None:
            recording.progress.reach(seek / recording.frames_per_second)
        decoded, output = yield from decoder.decode(window)
        result.windows.append(decoded)
        continues = options.condition and (decoded.temperature or 0.0) < MAX_CONDITION_TEMPERATURE
        if decoded.skipped:
            seek += window.frames
            continue
        spans, advance = _spans(decoded.tokens, options.first_timestamp, window.frames, stride)
        times = _token_times(recording, window, output)
        segments = _timed_segments(decoded, spans, seek * TIMESTAMP_SECONDS / stride, times)
        result.segments.extend(segments)
        texts.extend(segment.tokens for segment in segments)
        seek += advance
    meter.end()
    return result


def finish_recording(request: TranscriptionRequest, result: LongFormResult, samples: int) -> DecodedRecording:
    """Write the segments of a recording as text, with words if they were requested.

    Args:
        result: From `transcribe_windows`; its usage gets the seconds that this takes.
        samples: The recording's number of samples.
    """
    stopwatch = Stopwatch(request.whisper.model.device)
    language = _language(request, result.windows[0].prompt)
    segments = _segments(request, result.segments, language, samples / SAMPLE_RATE)
    result.usage.seconds["rest"] += stopwatch.lap()
    return DecodedRecording(segments, language, result.usage, samples)


def _prompt_texts(options: WindowOptions) -> list[list[int]]:
    """Return the texts that the first window continues: the caller's prompt, if it is only for this window."""
    if options.prompt_ids is None or options.prompt_kind != "first-segment":
        return []
    begins = int(options.prompt_ids[0]) == getattr(options.settings, "prev_sot_token_id", None)
    return [options.prompt_ids[begins:].tolist()]


def _token_times(recording: PreparedRecording, window: Window, output: Any) -> tuple[Tensor, Tensor | None] | None:
    """Return the start and duration in seconds of each token of a window's prompt and text; None: they are not timed.

    Args:
        output: What `generate` returns for the window.
    """
    if recording.time_tokens is None:
        return None
    mask = recording.attention_mask
    frames_left = None if mask is None else int(mask.sum()) - window.seek
    return recording.time_tokens(output, window.features, window.ids.shape[1], frames_left)


def _initial_tokens(
    model: WhisperForConditionalGeneration,
    options: WindowOptions,
    encoded: BaseModelOutput,
    meter: UsageMeter,
) -> Steps[list[int]]:
    """Return the tokens that each window's text begins with.

    These are the start token, the language, the task, and whether it has timestamps. A language that nothing names is
    detected.

    Args:
        encoded: The encoder's states of the first window.
        meter: Measures the seconds of detecting the language.
    """
    settings, language, task = options.settings, options.language, options.task
    languages: Mapping[str, int] | None = getattr(settings, "lang_to_id", None)
    tasks: Mapping[str, int] | None = getattr(settings, "task_to_id", None)
    no_timestamps = getattr(settings, "no_timestamps_token_id", None)
    tokens: list[Any] = [settings.decoder_start_token_id]
    if language is not None:
        if not languages:
            raise InputError(
                f"`language` must be None for a model without tokens of languages, but is {format_value(language)}. "
                "Leave it out."
            )
        tokens.append(languages[f"<|{language_code(settings, language)}|>"])
    else:
        if task is None:  # the checkpoints of OpenAI still name language (None: no token) and task as forced tokens
            forced = getattr(settings, "forced_decoder_ids", None) or getattr(model.config, "forced_decoder_ids", None)
            places = [place for place, _ in forced or ()]
            if places and places[0] == 1:
                if places != list(range(1, len(places) + 1)):
                    raise InputError(
                        "`forced_decoder_ids` must name the positions 1, 2, ... in order, but is "
                        f"{format_value(forced)}. Leave it out, and give `language` and `task`."
                    )
                tokens += [token for _, token in forced or ()]
        if languages is not None and tokens[1:2] in ([], [None]):
            ids = torch.tensor([tokens[:1]], device=model.device)
            logits = yield from known_logits(model, ids, None, encoded, meter)
            known = sorted(languages.values())
            tokens[1:2] = [known[int(logits[0, -1, known].argmax())]]
    if task is not None:
        if tasks is None or task not in tasks:
            raise InputError(f"`task` must be one of {', '.join(tasks or ())}, but is {format_value(task)}.")
        tokens.append(tasks[task])
    elif language is not None and tasks is not None and not set(tokens) & set(tasks.values()):
        tokens.append(tasks["transcribe"])
    if settings.return_timestamps and tokens[-1] == no_timestamps:
        tokens.pop()
    elif not settings.return_timestamps and no_timestamps is not None and tokens[-1] != no_timestamps:
        tokens.append(no_timestamps)
    return [token for token in tokens if token is not None]


def _previous_tokens(
    model: WhisperForConditionalGeneration, options: WindowOptions, texts: Sequence[Sequence[int]]
) -> list[int]:
    """Return the tokens before a window's initial ones: the caller's prompt, and the end of the texts it continues.

    A text that ends with two timestamps loses the last one, which is the next text's first.
    """
    prompt = [] if options.prompt_ids is None else options.prompt_ids.tolist()
    if not texts:
        return prompt
    is_head = options.prompt_ids is not None and options.prompt_kind == "all-segments"
    head = prompt if is_head else options.previous_start
    doubled = (len(text) > 2 and text[-2] >= options.first_timestamp for text in texts)
    joined = [token for text, twice in zip(texts, doubled, strict=True) for token in text[: len(text) - twice]]
    return [*head, *joined[-(model.config.max_target_positions // 2 - 1) :]]


def _timed_segments(
    decoded: DecodedWindow,
    spans: Sequence[_Span],
    offset: float,
    times: tuple[Tensor, Tensor | None] | None,
) -> list[TimedSegment]:
    """Return the segments of a window's text.

    Args:
        spans: Where the segments begin and end, from `_spans`.
        offset: Seconds of the recording before the window.
        times: Start and duration of each token of prompt and text, in seconds, or None if they were not timed.
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
                token_starts=None if starts is None else starts[places] + offset,
                token_seconds=None if seconds is None else seconds[places],
            )
        )
    return segments


def _input_stride(model: WhisperForConditionalGeneration) -> int:
    """Return the number of feature frames for each encoder state."""
    encoder: Any = model.model.encoder
    return int(encoder.conv1.stride[0] * encoder.conv2.stride[0])


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
    is_timestamp = [token >= first_time for token in tokens]
    cuts = [place for place, are_timestamps in enumerate(pairwise(is_timestamp), 1) if all(are_timestamps)]
    if not cuts:  # the whole text is one segment, up to its last timestamp
        # in single precision, as in transformers, because the result is rounded down
        last = int(torch.tensor(frames) * FRAME_SECONDS / TIMESTAMP_SECONDS)
        timestamps = [token for token in tokens if token >= first_time]
        if timestamps and timestamps[-1] != first_time:
            last = timestamps[-1] - first_time
        return [_Span(0, len(tokens), 0, last)], frames
    ends_alone = is_timestamp[-2:] == [False, True]  # no speech after the last timestamp
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


def _language(request: TranscriptionRequest, prompt: Sequence[int]) -> str | None:
    """Return the language code in a prompt, the token after the start token; None if the model has one language."""
    settings: Any = request.whisper.model.generation_config
    codes: Mapping[int, str]
    codes = {number: token[2:-2] for token, number in (getattr(settings, "lang_to_id", None) or {}).items()}
    start: int = settings.decoder_start_token_id
    ids = [*prompt, -1]
    return codes.get(ids[ids.index(start) + 1])


def _segments(
    request: TranscriptionRequest, timed: Sequence[TimedSegment], language: str | None, seconds: float
) -> list[Segment]:
    """Convert timed tokens to `Segment`s with text, and with words if word timestamps were requested.

    Args:
        seconds: Duration of the recording. No segment ends after this time, although the model also reads the silence
            after the recording.
    """
    tokenizer, first = request.whisper.tokenizer, first_timestamp_token(request.whisper.model)
    special = set(tokenizer.all_special_ids)
    segments = list[Segment]()
    for segment in timed:
        tokens = segment.tokens
        start, end = (min(round(time, 3), seconds) for time in (segment.start, segment.end))
        words = None
        if segment.token_starts is not None and segment.token_seconds is not None:
            starts, ends = (
                [min(round(time, 3), seconds) for time in times.tolist()]
                for times in (segment.token_starts, segment.token_starts + segment.token_seconds)
            )
            text = [index for index, token in enumerate(tokens) if token < first and token not in special]
            words = words_from_tokens(
                [tokens[index] for index in text],
                [starts[index] for index in text],
                [ends[index] for index in text],
                tokenizer.decode,
                language not in UNSPACED_LANGUAGES,
            )
        segments.append(Segment(start, end, tokenizer.decode(tokens, skip_special_tokens=True).strip(), tokens, words))
    return reconcile_times(segments) if request.timestamps == "word" else segments
