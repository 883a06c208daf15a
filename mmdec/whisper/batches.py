"""Decodes the recordings of a `transcribe` call with Whisper, in batches, or cut at pauses into pieces that are decoded
at the same time.

`transcribe_in_batches` decodes each batch by one call of `generate`, as transformers does. `transcribe_in_pieces`
decodes each piece of a recording by its own call of `generate`; calls that run at the same time share the passes of the
decoder.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, WhisperForConditionalGeneration

from mmdec.checks.arguments import options_error
from mmdec.checks.devices import PASSED_ON
from mmdec.core.timing import Stopwatch
from mmdec.generation.model_lock import reading
from mmdec.generation.speculation import option_names
from mmdec.io.audio import SAMPLE_RATE
from mmdec.io.audio.voice_activity import SpeechWindow, cut_at_pauses
from mmdec.tasks.confidence import estimate_confidence, token_evidence
from mmdec.tasks.inputs import describe_silence
from mmdec.tasks.usage import Usage, renumber_rounds
from mmdec.whisper.batcher import PassBatcher
from mmdec.whisper.caching_encoder import can_use_eager_copy
from mmdec.whisper.checkpoint import LoadedWhisper
from mmdec.whisper.options import OnTranscript, Progress
from mmdec.whisper.request import TranscriptionRequest, first_timestamp_token
from mmdec.whisper.target import hide_generate_warnings, restore_attention
from mmdec.whisper.transcript import (
    UNSPACED_LANGUAGES,
    Segment,
    Transcript,
    reconcile_times,
    shift_segment,
    word_beginnings,
    words_from_tokens,
)
from mmdec.whisper.window_decoder import WindowDecoder, compression_ratio

TRANSCRIPT = "transcript"  # the kind of decoding in confidence.json
# below this confidence, the note on an English-only model's transcript recommends `MULTILINGUAL_MODEL`
ADVICE_CONFIDENCE = 0.7
MULTILINGUAL_MODEL = "openai/whisper-base"
NO_SPEECH_NOTE = "without a voice"  # text of the note for a long recording in which no speech was found
Languages = str | Sequence[str] | None


@dataclass(frozen=True)
class DecodedPiece:
    """The result and the cost of decoding one recording, or one piece of it."""

    segments: list[Segment]
    language: str | None  # language code; None if the model has only one language
    usage: Usage
    samples: int  # duration in samples at 16 kHz
    features: float  # seconds for computing the log-mel features
    rest: float  # seconds of decoding outside the stages that are measured


def transcribe_in_batches(
    request: TranscriptionRequest,
    samples: Mapping[int, Tensor],
    batch_size: int,
    progress: Progress | None = None,
    on_transcript: OnTranscript | None = None,
) -> dict[int, Transcript]:
    """Transcribe recordings, `batch_size` at a time.

    Args:
        samples: Index -> 16 kHz samples (T,).
        progress: Called with the seconds of audio done and in total.
        on_transcript: Called with each index and transcript, in order.

    Returns:
        Index -> transcript.
    """
    transcripts = silent_transcripts(request.languages, samples)
    report_finished = ordered_reporter(samples, transcripts, on_transcript)
    done, total = 0.0, sum(map(len, samples.values())) / SAMPLE_RATE
    lengths = {index: len(recording) for index, recording in samples.items() if index not in transcripts}
    for indices in request.batches(lengths, batch_size):
        on_window = None if progress is None else _window_progress(progress, done, total, request.whisper)
        batch = [samples[index] for index in indices]
        transcripts |= zip(indices, transcribe_batch(request, indices, batch, on_window), strict=True)
        done += sum(map(len, batch)) / SAMPLE_RATE
        report_finished()
    report_finished()
    if progress is not None:
        progress(total, total)
    return transcripts


def transcribe_in_pieces(
    request: TranscriptionRequest,
    samples: Mapping[int, Tensor],
    batch_size: int,
    progress: Progress | None = None,
    on_transcript: OnTranscript | None = None,
) -> dict[int, Transcript]:
    """Transcribe recordings.

    Recordings longer than one window (30 s) are cut at pauses into pieces. Up to `batch_size` pieces are decoded at the
    same time.

    Args:
        samples: Index -> 16 kHz samples (T,).
        progress: Called with the seconds of audio done and in total.
        on_transcript: Called with each index and transcript, in order.

    Returns:
        Index -> transcript.
    """
    transcripts = silent_transcripts(request.languages, samples)
    most = request.whisper.extractor.n_samples
    cuts = {
        index: cut_at_pauses(recording, most) if request.is_long(len(recording)) else [SpeechWindow(0, recording)]
        for index, recording in samples.items()
        if index not in transcripts
    }
    transcripts |= {
        index: _empty_transcript(request.languages, index, samples[index], NO_SPEECH_NOTE)
        for index, cut in cuts.items()
        if not cut
    }
    report_finished = ordered_reporter(samples, transcripts, on_transcript)
    pieces = [(index, window) for index, windows in cuts.items() for window in windows]
    decoded_pieces = defaultdict[int, dict[int, DecodedPiece]](dict)  # recording -> first sample -> piece
    pass_batcher = PassBatcher(batch_size)
    jobs = (partial(_decode_batch, request, [index], [window.samples], None, pass_batcher) for index, window in pieces)
    done, total = 0.0, sum(map(len, samples.values())) / SAMPLE_RATE
    report_finished()
    with _decoding_context(request):
        for number, (decoded,) in pass_batcher.run(jobs):
            index, window = pieces[number]
            decoded_pieces[index][window.start] = decoded
            if len(decoded_pieces[index]) == len(cuts[index]):
                whole = _join_pieces(sorted(decoded_pieces.pop(index).items()), len(samples[index]))
                transcripts[index] = _transcript(request, whole)
                report_finished()
            done += len(window.samples) / SAMPLE_RATE
            if progress is not None:
                progress(min(done, total), total)
    if progress is not None:
        progress(total, total)
    return transcripts


def _join_pieces(parts: Sequence[tuple[int, DecodedPiece]], samples: int) -> DecodedPiece:
    """Join the decoded pieces of one recording.

    Args:
        parts: (index of the first sample in the recording, decoded piece) for each.
        samples: The recording's number of samples.
    """
    if len(parts) == 1 and parts[0][1].samples == samples:
        return parts[0][1]
    usage = Usage()
    for _, part in parts:
        usage.add(part.usage)
    segments = [shift_segment(segment, start / SAMPLE_RATE) for start, part in parts for segment in part.segments]
    longest = max((part for _, part in parts), key=lambda part: part.samples)
    features, rest = sum(part.features for _, part in parts), sum(part.rest for _, part in parts)
    return DecodedPiece(segments, longest.language, usage, samples, features, rest)


def ordered_reporter(
    recordings: Mapping[int, Tensor], transcripts: Mapping[int, Transcript], on_transcript: OnTranscript | None
) -> Callable[[], None]:
    """Return a function that passes new transcripts to `on_transcript`, each once, in the order of the recordings.

    Args:
        recordings: Index -> recording (T,).
        transcripts: Index -> finished transcript; the caller adds transcripts to it.
    """
    remaining = list(recordings)

    def report_finished() -> None:
        while on_transcript is not None and remaining and remaining[0] in transcripts:
            index = remaining.pop(0)
            on_transcript(index, transcripts[index])

    return report_finished


def silent_transcripts(languages: Languages, samples: Mapping[int, Tensor]) -> dict[int, Transcript]:
    """Make an empty transcript of each silent recording.

    Args:
        languages: The argument `language` of the call.
        samples: Index -> recording (T,).

    Returns:
        Index -> transcript, of the silent recordings only.
    """
    levels = {index: describe_silence(recording) for index, recording in samples.items()}
    return {
        index: _empty_transcript(languages, index, samples[index], level) for index, level in levels.items() if level
    }


def _empty_transcript(languages: Languages, index: int, samples: Tensor, level: str) -> Transcript:
    """Make the transcript of a recording without speech.

    Such a recording is not decoded, because the model would invent words.

    Args:
        languages: The argument `language` of the call.
        index: Index of the recording.
        level: The end of the note "the recording is ...".
    """
    return Transcript(
        text="",
        language=languages if languages is None or isinstance(languages, str) else languages[index],
        segments=[],
        tokens=[],
        rounds=0,
        tokens_per_round=1.0,
        timings=timings(Usage(), 0.0, 0.0),
        seconds=len(samples) / SAMPLE_RATE,
        confidence=None,
        windows=0,
        note=f"the recording is {level}",
    )


def transcribe_batch(
    request: TranscriptionRequest,
    indices: Sequence[int],
    recordings: Sequence[Tensor],
    on_window: Callable[[Tensor], None] | None,
) -> list[Transcript]:
    """Transcribe one batch of 16 kHz recordings (T,).

    All must be at most one window long, or all must be longer.

    Args:
        indices: Index of each recording in the call, by which its language is selected.
        on_window: Called before each window with a tensor (B, 2): for each recording the frames done and the frames in
            total.
    """
    with _decoding_context(request):
        return [_transcript(request, one) for one in _decode_batch(request, indices, recordings, on_window)]


def _decode_batch(
    request: TranscriptionRequest,
    indices: Sequence[int],
    recordings: Sequence[Tensor],
    on_window: Callable[[Tensor], None] | None,
    pass_batcher: PassBatcher | None = None,
) -> list[DecodedPiece]:
    """Decode one batch of recordings (T,); the caller must be inside `_decoding_context`.

    Args:
        indices: Index of each recording in the call.
        on_window: Called before each window with (B, 2): frames done and frames in total.
        pass_batcher: Lets several calls of `generate` share decoder passes; None: this call shares none.
    """
    model = request.whisper.model
    stopwatch = Stopwatch(model.device)
    inputs = request.features(recordings)
    features = stopwatch.lap()
    speculation = request.speculation
    beginnings = None
    if request.timestamps == "word":
        decode = partial(request.whisper.tokenizer.decode, skip_special_tokens=True)
        beginnings = partial(word_beginnings, decode=decode)
    decoder = WindowDecoder(
        model,
        speculation,
        len(recordings),
        on_window=_wrap_callback(on_window),
        on_round=_wrap_callback(renumber_rounds(speculation.options.on_round, indices)),
        margin=request.margin,
        word_beginnings=beginnings,
        pass_batcher=pass_batcher,
    )
    arguments = request.arguments(indices, request.is_long(len(recordings[0])))
    stopwatch.lap()
    output = _generate(request, decoder, {**inputs, **arguments})
    codes = _languages(request.whisper, decoder.prompts)
    texts = [
        _segments(request, segments, code, len(samples) / SAMPLE_RATE)
        for segments, code, samples in zip(output["segments"], codes, recordings, strict=True)
    ]
    usages = decoder.meter.usage
    counted = sum(sum(usage.seconds.values()) for usage in usages)
    rest = (stopwatch.lap() - counted) / len(recordings)
    samples_read = sum(map(len, recordings))
    return [
        DecodedPiece(segments, code, usage, len(samples), features * len(samples) / samples_read, rest)
        for segments, code, usage, samples in zip(texts, codes, usages, recordings, strict=True)
    ]


def _transcript(request: TranscriptionRequest, decoded: DecodedPiece) -> Transcript:
    """Make the transcript of a decoded recording, and compute its confidence."""
    whisper, usage = request.whisper, decoded.usage
    tokens = [token for segment in decoded.segments for token in segment.tokens]
    text: str = whisper.tokenizer.decode(tokens, skip_special_tokens=True).strip()
    rate = _log_token_rate(tokens, first_timestamp_token(whisper.model), decoded.samples)
    evidence = token_evidence(usage.logprobs) | {"rate": rate, "repeats": log_compression_ratio(text)}
    confidence = estimate_confidence(evidence, request.calibrations, TRANSCRIPT)
    # without a calibration, repeated text would get a high confidence: it consists of probable tokens
    if TRANSCRIPT not in request.calibrations:
        confidence = min(confidence, estimate_confidence(evidence, request.fallback_calibrations, TRANSCRIPT))
    return Transcript(
        text=text,
        language=decoded.language,
        segments=decoded.segments if request.timestamps else [],
        tokens=tokens,
        rounds=usage.rounds,
        tokens_per_round=usage.tokens_per_round,
        timings=timings(usage, decoded.features, decoded.rest),
        seconds=decoded.samples / SAMPLE_RATE,
        lossless=request.speculation.options.lossless,
        confidence=usage.limit_confidence(confidence, request.caller_limits_length),
        calibrated=TRANSCRIPT in request.calibrations,
        evidence=evidence,
        windows=usage.prompts,
        note="; ".join(filter(None, (usage.note, _advice(whisper, confidence)))),
        finish_reason=usage.finish_reason,
    )


def _generate(request: TranscriptionRequest, decoder: WindowDecoder, arguments: Mapping[str, Any]) -> Any:
    """Call `generate` with these arguments, and `decoder` as its decoding loop.

    Raises:
        InputError: For an option that `generate` rejects; exceptions of the caller's callbacks are passed on unchanged.
    """
    try:
        decoder.meter.start()
        return decoder.model.generate(**arguments, custom_generate=decoder, monitor_progress=decoder.begin_window)
    except PASSED_ON:
        raise
    except _CallerError as error:
        raise error.original from None
    except Exception as error:
        # transformers raises ValueError for rejected options, and any exception for wrong types, before the first
        # window
        if isinstance(error, ValueError) or not decoder.prompts:
            raise options_error(request.caller_options, error, option_names(request.whisper.model)) from error
        raise


def _advice(whisper: LoadedWhisper, confidence: float) -> str:
    """Return a note on a transcript of which an English-only model is unsure; else ""."""
    english = not getattr(whisper.model.generation_config, "is_multilingual", True)
    if not english or confidence >= ADVICE_CONFIDENCE:
        return ""
    name = whisper.directory.name if whisper.directory is not None else "this model"
    return f'{name} is English-only and is unsure of this recording; model="{MULTILINGUAL_MODEL}" knows other languages'


def _log_token_rate(tokens: Sequence[int], first: int, samples: int) -> float:
    """Compute the natural logarithm of the text tokens per second of audio.

    Args:
        first: Id of the first timestamp token; timestamp tokens are not counted.
        samples: Number of samples.
    """
    return math.log((sum(token < first for token in tokens) + 1) * SAMPLE_RATE / samples)


def log_compression_ratio(text: str) -> float:
    """Compute the natural logarithm of a text's compression ratio by zlib, at least 0.

    The ratio is high for a text that repeats itself. Models write such text where there is no speech. Characters are
    numbered in the order in which they occur, so that no script counts for more bytes than another.

    References:
        Radford et al. 2022 (Whisper), section 4.5, where the ratio of the text in UTF-8 decides whether it is decoded
        again.
    """
    numbers = {sign: number % 256 for number, sign in enumerate(dict.fromkeys(text))}
    return math.log(max(compression_ratio(bytes(map(numbers.__getitem__, text))), 1.0))


def timings(usage: Usage, features: float, rest: float) -> dict[str, float]:
    """Return a transcript's time by stage, in seconds.

    Args:
        usage: Counts and times of its rounds.
        features: Seconds for computing features.
        rest: Seconds outside all stages.
    """
    parts = {"features": features, **{stage: usage.seconds[stage] for stage in ("encoder", "decoder", "drafter")}}
    return {**parts, "total": sum(parts.values()) + rest}


def _segments(
    request: TranscriptionRequest, timed: Sequence[dict[str, Any]], language: str | None, seconds: float
) -> list[Segment]:
    """Convert transformers' segments to `Segment`s with text, and with words if word timestamps were requested.

    Args:
        timed: transformers' segments, with times in seconds.
        seconds: Duration of the recording. No segment ends after this time, although the model also reads the silence
            after the recording.
    """
    tokenizer, first = request.whisper.tokenizer, first_timestamp_token(request.whisper.model)
    special = set(tokenizer.all_special_ids)
    segments = []
    for segment in timed:
        tokens: list[int] = segment["tokens"].tolist()
        start, end = (min(round(float(segment[name]), 3), seconds) for name in ("start", "end"))
        spoken = None
        if request.timestamps == "word":
            timed_tokens = segment["token_timestamps"]
            ending = timed_tokens + segment["result"]["token_seconds"][slice(*segment["idxs"])]
            starts, ends = (
                [min(round(second, 3), seconds) for second in each.tolist()] for each in (timed_tokens, ending)
            )
            text = [index for index, token in enumerate(tokens) if token < first and token not in special]
            spoken = words_from_tokens(
                [tokens[index] for index in text],
                [starts[index] for index in text],
                [ends[index] for index in text],
                tokenizer.decode,
                language not in UNSPACED_LANGUAGES,
            )
        segments.append(Segment(start, end, tokenizer.decode(tokens, skip_special_tokens=True).strip(), tokens, spoken))
    return reconcile_times(segments) if request.timestamps == "word" else segments


def _languages(whisper: LoadedWhisper, prompts: Sequence[Sequence[int]]) -> list[str | None]:
    # the language is the token after the start token in each recording's prompt
    settings: Any = whisper.model.generation_config
    codes = {number: token[2:-2] for token, number in (getattr(settings, "lang_to_id", None) or {}).items()}
    start: int = settings.decoder_start_token_id
    return [codes.get([*ids, -1][ids.index(start) + 1]) for ids in map(list, prompts)]


class _CallerError(Exception):
    """Wraps an exception of `progress` or `on_round`, so that no option of `generate` is blamed for it."""

    def __init__(self, original: Exception) -> None:
        super().__init__(str(original))
        self.original = original


def _wrap_callback(function: Callable[..., None] | None) -> Callable[..., None] | None:
    """Wrap a callback, so that its exceptions are raised as `_CallerError`. For None, return None."""
    if function is None:
        return None

    def call(*arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:
            raise _CallerError(error) from error

    return call


def _window_progress(progress: Progress, done: float, total: float, whisper: LoadedWhisper) -> Callable[[Tensor], None]:
    """Return an `on_window` for `transcribe_batch` that converts frames to seconds and passes them to `progress`.

    Args:
        done: Seconds of audio in earlier batches.
        total: Seconds of audio in all batches.
    """
    seconds = whisper.extractor.hop_length / SAMPLE_RATE
    return lambda frames: progress(min(done + float(frames.amin(1).sum()) * seconds, total), total)


@contextmanager
def _decoding_context(request: TranscriptionRequest) -> Iterator[None]:
    """Hold the locks of the model and of the drafter's networks, and hide transformers' warnings."""
    model, words = request.whisper.model, request.timestamps == "word"
    with _model_locks(model, words, request.speculation.networks), hide_generate_warnings():
        yield


@contextmanager
def _model_locks(
    model: WhisperForConditionalGeneration, words: bool, others: Sequence[PreTrainedModel]
) -> Iterator[None]:
    """Hold the locks of the model and of the drafter's networks during one call of `generate`.

    With word timestamps a warning of NumPy 2 is silenced. If a module's `forward` was replaced, `generate` with word
    timestamps switches the model's attention to "eager" and does not switch it back. Then the lock is exclusive,
    because an attention mask made for one implementation of attention must not be used by another.

    Args:
        words: Whether word timestamps were requested.
        others: The drafter's networks.
    """
    if not words:
        with reading(model, *others):
            yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array_wrap__ must accept", DeprecationWarning)
        if can_use_eager_copy(model):
            with reading(model, *others):
                yield
            return
        with reading(*others, writing=[model]), restore_attention(model):
            yield
