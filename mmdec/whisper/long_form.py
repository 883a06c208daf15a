"""Decodes one recording window by window, as a generator that asks for everything that runs the model.

A Whisper reads windows of 30 s. `transcribe_windows` decides what happens around them: which tokens a window's text
begins with, where the next window starts, and which segments the timestamps delimit. `window.WindowDecoder` decodes
each. All yield the passes of the model and continue with their results, so the scheduler drives any number of
recordings in one thread, and their decoder passes are computed together.

The result equals that of transformers' `generate` for one recording, which encodes a window again for each temperature
and each question; here each window is encoded once, and the probability of silence costs a pass only if the text is
improbable.

References:
    Radford et al. 2022 (Whisper), sections 3.8 and 4.5: the sequence of windows, fallback temperatures and thresholds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
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
from mmdec.core.steps import Steps, time_steps
from mmdec.core.timing import Stopwatch
from mmdec.errors import InputError
from mmdec.generation.drafter_source import DraftInput
from mmdec.generation.speculation import Speculation
from mmdec.io.audio import SAMPLE_RATE
from mmdec.tasks.usage import Usage
from mmdec.whisper.features import FRAMES_PER_SECOND, WindowEncoder
from mmdec.whisper.progress import PartProgress
from mmdec.whisper.request import TranscriptionRequest
from mmdec.whisper.special_tokens import first_timestamp_token, language_code
from mmdec.whisper.transcript import UNSPACED_LANGUAGES, Segment, reconcile_times, word_beginnings, words_from_tokens
from mmdec.whisper.window import DecodedWindow, UsageMeter, Window, WindowDecoder, encode_window, known_logits
from mmdec.whisper.window_options import WindowOptions
from mmdec.whisper.words import TokenAligner, WordBeginnings

TIMESTAMP_SECONDS = 0.02  # from one timestamp token to the next
FRAME_SECONDS = 0.01  # from one feature frame to the next
MAX_CONDITION_TEMPERATURE = 0.5  # the next window is not conditioned on text that was sampled at this or more

# Times the tokens of a window: (the output object, with `cross_attentions`; the window's features; number of prompt
# tokens; frames with sound, None: all) -> start and duration in seconds of each of the L tokens (L,).
TimeTokens = Callable[[Any, Tensor, int, int | None], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class DecodedRecording:
    """The text and the cost of one recording, or of one piece of it."""

    segments: list[Segment]
    language: str | None  # language code; None if the model has only one language
    usage: Usage
    samples: int  # duration in samples at 16 kHz
    features: float  # seconds for computing the log-mel features
    rest: float  # seconds of decoding outside the measured stages


@dataclass(frozen=True)
class TimedSegment:
    """The text between two timestamp tokens. Times are seconds from the recording's beginning."""

    start: float
    end: float
    tokens: list[int]  # timestamp tokens included
    window: int  # index in `LongFormResult.windows`
    token_starts: Tensor | None = None  # start of each token, or None if they were not timed
    token_seconds: Tensor | None = None  # duration of each token, or None if unknown


@dataclass(frozen=True)
class LongFormResult:
    """The text of a recording."""

    segments: list[TimedSegment] = field(default_factory=lambda: [])
    windows: list[DecodedWindow] = field(default_factory=lambda: [])

    @property
    def tokens(self) -> list[int]:
        """The token ids of all segments, which are `generate`'s sequence."""
        return [token for segment in self.segments for token in segment.tokens]


def decode_recording(
    request: TranscriptionRequest,
    index: int,
    samples: Tensor,
    progress: PartProgress | None = None,
    start: float = 0.0,
    total: float = 0.0,
) -> Steps[DecodedRecording]:
    """Decode one recording of a `transcribe` call, or a piece of one, and ask for each pass.

    Args:
        request: The options of the call.
        index: The recording's index in the call.
        samples: (T,) at 16 kHz.
        progress: Gets the seconds before each window.
        start: For a piece of a recording: seconds before it.
        total: For a piece of a recording: seconds of the whole recording.

    Returns:
        A `DecodedRecording`.

    Raises:
        InputError: For an option that the model rejects.
        Exception: What a callback raised.
    """
    whisper, model = request.whisper, request.whisper.model
    stopwatch = Stopwatch(model.device)
    speculation = request.speculation.for_inputs([DraftInput(index, samples, start, total)])
    meter = UsageMeter(first_timestamp_token(model), speculation.drafter_for(model) is not None)
    if speculation is not request.speculation:  # a text of this recording was made to draft from
        meter.usage.seconds["drafter"] += stopwatch.lap()
    inputs = request.features([samples])
    features = stopwatch.lap()
    times = None
    if request.timestamps == "word":
        decode = partial(whisper.tokenizer.decode, skip_special_tokens=True)
        times = align_tokens(model, partial(word_beginnings, decode=decode))
    is_long = request.is_long(len(samples))
    windows = transcribe_windows(
        model,
        speculation,
        inputs["input_features"],
        WindowOptions.of(
            model, request.generate_options(index, is_long), is_long, times is not None, request.caller_options
        ),
        attention_mask=inputs["attention_mask"],
        time_tokens=times,
        frames_per_second=SAMPLE_RATE / whisper.extractor.hop_length,
        margin=request.margin,
        meter=meter,
        index=index,
        progress=progress,
    )
    result, seconds = yield from time_steps(windows, model.device)
    rest = max(seconds - meter.loop_seconds, 0.0)
    stopwatch.lap()
    language = _language(request, result.windows[0].prompt)
    segments = _segments(request, result.segments, language, len(samples) / SAMPLE_RATE)
    return DecodedRecording(segments, language, meter.usage, len(samples), features, rest + stopwatch.lap())


def transcribe_windows(
    model: WhisperForConditionalGeneration,
    speculation: Speculation,
    input_features: Tensor,
    options: WindowOptions,
    *,
    attention_mask: Tensor | None = None,
    time_tokens: TimeTokens | None = None,
    frames_per_second: float = FRAMES_PER_SECOND,
    margin: float | None = None,
    meter: UsageMeter | None = None,
    index: int = 0,
    progress: PartProgress | None = None,
) -> Steps[LongFormResult]:
    """Transcribe one recording.

    Args:
        model: Another attention than "eager" is kept for timed tokens, too.
        speculation: The decoding loop.
        input_features: (1, mels, T), one window or more.
        options: The recording's options.
        attention_mask: (1, T), 1 at frames with sound; only `time_tokens` reads it.
        time_tokens: Times the tokens of each window, or None to leave tokens without times.
        frames_per_second: Feature frames per second of audio.
        margin: A window is encoded up to this many seconds after its sound, or to its end if None.
        meter: Counts the rounds.
        index: The recording's index in the call, for `speculation.options.on_round`.
        progress: Gets the seconds before each window.

    Yields:
        The passes of the encoder and the decoder.

    Returns:
        Segments and windows.

    Raises:
        InputError: For options that contradict each other or the model.
    """
    frames, stride = input_features.shape[-1], _input_stride(model)
    width = stride * model.config.max_source_positions
    sound_frames = None if attention_mask is None else int(attention_mask.sum())
    encoder = WindowEncoder(model, margin, frames_per_second)
    meter = meter or UsageMeter(options.first_timestamp, drafts=True)
    decoder, initial = None, list[int]()
    texts = list[list[int]]()  # texts of earlier windows, on which the next one may be conditioned
    if options.prompt_ids is not None and options.prompt_kind == "first-segment":
        begins = int(options.prompt_ids[0]) == getattr(options.settings, "prev_sot_token_id", None)
        texts.append(options.prompt_ids[begins:].tolist())
    conditions = options.condition

    # A window begins where the last complete segment ended.
    result, seek = LongFormResult(), 0
    while seek < frames:
        features = input_features[..., seek : seek + width]
        features = pad(features, (0, width - features.shape[-1]))
        encoded = yield from encode_window(encoder, features, meter.usage.seconds)
        if decoder is None:  # the language is detected in the first window; all texts begin with the same tokens
            initial = yield from _initial_tokens(model, options, encoded, meter.usage.seconds)
            decoder = WindowDecoder(model, speculation, options, initial, encoder, meter, attention_mask, index)
        continues = conditions and bool(texts)
        ids = torch.tensor([[*_previous_tokens(model, options, texts if continues else ()), *initial]])
        ids = ids.to(model.device)
        window = Window(
            features=features,
            encoded=encoded,
            seek=seek,
            frames=min(frames - seek, width),
            ids=ids,
            mask=ids != options.settings.pad_token_id if continues else None,
        )
        if progress is not None:
            progress.reach(seek / frames_per_second)
        decoded, output = yield from decoder.decode(window)
        result.windows.append(decoded)
        conditions = options.condition and (decoded.temperature or 0.0) < MAX_CONDITION_TEMPERATURE
        if decoded.skipped:
            seek += window.frames
            continue
        times = None
        if time_tokens is not None:
            frames_left = None if sound_frames is None else sound_frames - seek
            times = time_tokens(output, features, ids.shape[1], frames_left)
        spans, advance = _spans(decoded.tokens, options.first_timestamp, window.frames, stride)
        segments = _timed_segments(decoded, spans, seek * TIMESTAMP_SECONDS / stride, len(result.windows) - 1, times)
        result.segments.extend(segments)
        texts.extend(segment.tokens for segment in segments)
        seek += advance
    return result


def _initial_tokens(
    model: WhisperForConditionalGeneration,
    options: WindowOptions,
    encoded: BaseModelOutput,
    seconds: MutableMapping[str, float],
) -> Steps[list[int]]:
    """Return what each window's text begins with: the start token, the language, the task, and whether it has
    timestamps. A language that nothing names is detected.

    Args:
        encoded: The encoder's states of the first window.
        seconds: Stage -> seconds; those of detecting the language are added to "decoder".
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
            logits = yield from known_logits(model, ids, None, encoded, seconds)
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
    index: int,
    times: tuple[Tensor, Tensor | None] | None,
) -> list[TimedSegment]:
    """Return the segments of a window's text.

    Args:
        spans: Where the segments begin and end, from `_spans`.
        offset: Seconds of the recording before the window.
        index: The window's index.
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
                window=index,
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
