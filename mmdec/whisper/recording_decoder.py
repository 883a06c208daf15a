"""Decodes one recording as a generator of passes, so that a scheduler can run it together with other recordings.

Features come first, then the windows (`long_form`), then the text of their segments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from mmdec.checks.arguments import options_error
from mmdec.checks.devices import PASSED_ON
from mmdec.core.steps import Steps, timed
from mmdec.core.timing import Stopwatch
from mmdec.generation.drafter_choice import DraftInput
from mmdec.generation.generate import generate_option_names
from mmdec.io.audio import SAMPLE_RATE
from mmdec.tasks.usage import Usage
from mmdec.whisper.long_form import LongFormOptions, TimedSegment, align_tokens, transcribe_windows
from mmdec.whisper.request import TranscriptionRequest
from mmdec.whisper.special_tokens import first_timestamp_token
from mmdec.whisper.transcript import UNSPACED_LANGUAGES, Segment, reconcile_times, word_beginnings, words_from_tokens
from mmdec.whisper.window_decoder import CallbackError, WindowDecoder


@dataclass(frozen=True)
class DecodedRecording:
    """The text and the cost of one recording, or of one piece of it."""

    segments: list[Segment]
    language: str | None  # language code; None if the model has only one language
    usage: Usage
    samples: int  # duration in samples at 16 kHz
    features: float  # seconds for computing the log-mel features
    rest: float  # seconds of decoding outside the stages that are measured


def decode_recording(
    request: TranscriptionRequest,
    index: int,
    samples: Tensor,
    on_window: Callable[[float], None] | None = None,
    start: float = 0.0,
    total: float = 0.0,
) -> Steps[DecodedRecording]:
    """Decode one recording of a `transcribe` call, or a piece of one, and ask for each pass.

    Args:
        request: The options of the call.
        index: The recording's index in the call.
        samples: (T,) at 16 kHz.
        on_window: Called before each window with the number of seconds before it.
        start: For a piece of a recording: seconds before it.
        total: For a piece of a recording: seconds of the whole recording.

    Returns:
        A `DecodedRecording`.

    Raises:
        InputError: For an option that the model rejects.
        Exception: What a callback raised.
    """
    model = request.whisper.model
    stopwatch = Stopwatch(model.device)
    speculation = request.speculation.for_inputs([DraftInput(index, samples, start, total)])
    decoder = WindowDecoder(model, speculation, index, request.margin, on_window)
    usage = decoder.meter.usage
    if speculation is not request.speculation:  # a text of the recording was made
        usage.seconds["drafter"] += stopwatch.lap()
    inputs = request.features([samples])
    features = stopwatch.lap()
    times = None
    if request.timestamps == "word":
        decode = partial(request.whisper.tokenizer.decode, skip_special_tokens=True)
        times = align_tokens(model, partial(word_beginnings, decode=decode))
    windows = transcribe_windows(
        model,
        inputs["input_features"],
        decoder,
        LongFormOptions.of(request.window_options(index, request.is_long(len(samples)))),
        attention_mask=inputs["attention_mask"],
        time_tokens=times,
    )
    try:
        result, seconds = yield from timed(windows, model.device, usage.seconds)
    except PASSED_ON:
        raise
    except CallbackError as error:
        raise error.original from None
    except Exception as error:
        # transformers raises ValueError for rejected options, and any exception for wrong types, before the first
        # window
        if isinstance(error, ValueError) or not decoder.has_begun:
            raise options_error(request.caller_options, error, generate_option_names(model)) from error
        raise
    rest = max(seconds - decoder.meter.loop_seconds, 0.0)
    stopwatch.lap()
    language = _language(request, result.windows[0].prompt)
    segments = _segments(request, result.segments, language, len(samples) / SAMPLE_RATE)
    return DecodedRecording(segments, language, usage, len(samples), features, rest + stopwatch.lap())


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
