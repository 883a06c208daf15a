"""Transcribes the recordings of a `transcribe` call with Whisper: together, whole or cut at pauses into parts.

Each recording, or each part, is decoded by itself, as `model.generate` decodes it alone. The scheduler runs up to
`batch_size` of them in one thread; they share the passes of the decoder.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

from torch import Tensor

from mmdec.core.scheduler import decode_together
from mmdec.core.steps import Steps
from mmdec.generation.hf_bridge import keeps_state
from mmdec.generation.model_lock import reading
from mmdec.io.audio import SAMPLE_RATE
from mmdec.io.audio.voice_activity import SpeechWindow, cut_at_pauses
from mmdec.tasks.audio import describe_silence
from mmdec.tasks.confidence import estimate_confidence, token_evidence
from mmdec.tasks.usage import Usage
from mmdec.whisper.checkpoint import LoadedWhisper
from mmdec.whisper.decoder import can_use_eager_copy
from mmdec.whisper.long_form import (
    DecodedRecording,
    RecordingPart,
    finish_recording,
    prepare_recording,
    transcribe_windows,
)
from mmdec.whisper.options import Progress
from mmdec.whisper.progress import ProgressReport
from mmdec.whisper.repetition import compression_ratio
from mmdec.whisper.request import TranscriptionRequest
from mmdec.whisper.special_tokens import first_timestamp_token
from mmdec.whisper.target import hide_generate_warnings, restore_attention
from mmdec.whisper.transcript import Segment, Transcript, shift_segment

STAGES = ("features", "encoder", "decoder", "drafter")
TRANSCRIPT = "transcript"  # the kind of decoding in confidence.json
# below this confidence, the note on an English-only model's transcript recommends `MULTILINGUAL_MODEL`
ADVICE_CONFIDENCE = 0.7
MULTILINGUAL_MODEL = "openai/whisper-base"
NO_SPEECH_NOTE = "without a voice"  # text of the note for a long recording in which no speech was found
Languages = str | Sequence[str] | None


def transcribe_recordings(
    request: TranscriptionRequest,
    samples: Mapping[int, Tensor],
    batch_size: int,
    at_pauses: bool = False,
    progress: Progress | None = None,
) -> Generator[Mapping[int, Transcript]]:
    """Transcribe recordings, up to `batch_size` of them at the same time.

    Args:
        samples: Index -> 16 kHz samples (T,).
        at_pauses: Whether recordings longer than one window (30 s) are cut at pauses into parts, which are decoded by
            themselves, at the same time.
        progress: Called with the seconds of audio done and in total.

    Yields:
        Index -> transcript of some recordings, as they end.
    """
    transcripts = silent_transcripts(request.languages, samples)
    report = ProgressReport(progress, sum(map(len, samples.values())) / SAMPLE_RATE)
    parts = {
        index: _recording_parts(request, index, recording, at_pauses, report)
        for index, recording in samples.items()
        if index not in transcripts
    }
    transcripts |= {
        index: _empty_transcript(request.languages, index, samples[index], NO_SPEECH_NOTE)
        for index, recording_parts in parts.items()
        if not recording_parts
    }
    yield transcripts
    decodings = (  # a part is prepared when there is room for it, not before
        (part, transcribe_windows(prepare_recording(request, part)), 1)
        for recording_parts in parts.values()
        for part in recording_parts
    )
    max_rows = 1 if keeps_state(request.options) else batch_size
    finished = {index: list[tuple[RecordingPart, DecodedRecording]]() for index in parts}
    with _decoding_context(request):
        for part, result in decode_together(decodings, max_rows):
            decoded = finished[part.index]
            decoded.append((part, finish_recording(request, result, len(part.samples))))
            if part.progress is not None:
                part.progress.end()
            if len(decoded) == len(parts[part.index]):
                joined = _join_parts(finished.pop(part.index), len(samples[part.index]))
                yield {part.index: _transcript(request, joined)}
    report.end()


def transcription_steps(request: TranscriptionRequest, samples: Tensor) -> Steps[Transcript]:
    """Transcribe one recording (T,) as a generator of passes, for a scheduler that decodes other requests, too.

    The caller holds the locks of the model and of the drafter's networks.

    Returns:
        The `Transcript`.
    """
    reason = describe_silence(samples)
    if reason:
        return _empty_transcript(request.languages, 0, samples, reason)
    with hide_generate_warnings():
        result = yield from transcribe_windows(prepare_recording(request, RecordingPart(0, samples)))
    return _transcript(request, finish_recording(request, result, len(samples)))


def _recording_parts(
    request: TranscriptionRequest, index: int, samples: Tensor, at_pauses: bool, report: ProgressReport
) -> list[RecordingPart]:
    """Return what of a recording (T,) is decoded by itself: all of it, or parts between pauses; [] without a voice."""
    windows = [SpeechWindow(0, samples)]
    if at_pauses and request.whisper.is_long(len(samples)):
        windows = cut_at_pauses(samples, request.whisper.extractor.n_samples)
    return [
        RecordingPart(index, window.samples, window.start, len(samples), report.part(len(window.samples) / SAMPLE_RATE))
        for window in windows
    ]


def _join_parts(parts: Sequence[tuple[RecordingPart, DecodedRecording]], samples: int) -> DecodedRecording:
    """Join the decoded parts of one recording.

    Args:
        parts: In any order.
        samples: The recording's number of samples.
    """
    if len(parts) == 1 and parts[0][1].samples == samples:
        return parts[0][1]
    parts = sorted(parts, key=lambda part: part[0].start)
    usage, segments = Usage(), list[Segment]()
    for part, decoded in parts:
        usage.add(decoded.usage)
        segments += [shift_segment(segment, part.start / SAMPLE_RATE) for segment in decoded.segments]
    longest = max((decoded for _, decoded in parts), key=lambda decoded: decoded.samples)
    return DecodedRecording(segments, longest.language, usage, samples)


def silent_transcripts(languages: Languages, samples: Mapping[int, Tensor]) -> dict[int, Transcript]:
    """Make an empty transcript of each silent recording.

    Args:
        languages: The argument `language` of the call.
        samples: Index -> recording (T,).

    Returns:
        Index -> transcript, of the silent recordings only.
    """
    reasons = {index: describe_silence(recording) for index, recording in samples.items()}
    return {
        index: _empty_transcript(languages, index, samples[index], reason)
        for index, reason in reasons.items()
        if reason
    }


def _empty_transcript(languages: Languages, index: int, samples: Tensor, reason: str) -> Transcript:
    """Make the transcript of a recording without speech.

    Such a recording is not decoded, because the model would invent words.

    Args:
        languages: The argument `language` of the call.
        index: Index of the recording.
        reason: The end of the note "the recording is ...".
    """
    return Transcript(
        text="",
        language=languages if languages is None or isinstance(languages, str) else languages[index],
        segments=[],
        tokens=[],
        rounds=0,
        tokens_per_round=1.0,
        timings=timings(Usage()),
        seconds=len(samples) / SAMPLE_RATE,
        confidence=None,
        windows=0,
        note=f"the recording is {reason}",
    )


def _transcript(request: TranscriptionRequest, decoded: DecodedRecording) -> Transcript:
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
        timings=timings(usage),
        seconds=decoded.samples / SAMPLE_RATE,
        lossless=request.speculation.options.lossless,
        confidence=usage.limit_confidence(confidence, request.caller_limits_length),
        calibrated=TRANSCRIPT in request.calibrations,
        evidence=evidence,
        windows=usage.prompts,
        note="; ".join(filter(None, (usage.note, _advice(whisper, confidence)))),
        finish_reason=usage.finish_reason,
    )


def _advice(whisper: LoadedWhisper, confidence: float) -> str:
    """Return a note on a transcript of which an English-only model is unsure; else ""."""
    english = not getattr(whisper.model.generation_config, "is_multilingual", True)
    if not english or confidence >= ADVICE_CONFIDENCE:
        return ""
    name = whisper.directory.name if whisper.directory is not None else "this model"
    return (
        f'{name} is English-only and is unsure of this recording; `model="{MULTILINGUAL_MODEL}"` knows other languages'
    )


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


def timings(usage: Usage) -> dict[str, float]:
    """Return a transcript's time by stage, in seconds; "total" includes the time outside the stages, "rest"."""
    stages = {stage: usage.seconds[stage] for stage in STAGES}
    return {**stages, "total": sum(stages.values()) + usage.seconds["rest"]}


@contextmanager
def _decoding_context(request: TranscriptionRequest) -> Iterator[None]:
    """Hold the locks of the model and of the drafter's networks, and hide transformers' warnings.

    With word timestamps a warning of NumPy 2 is silenced. Words need attention maps: if a module's `forward` was
    replaced, the model itself is switched to "eager" attention meanwhile. Then the lock is exclusive, because an
    attention mask made for one implementation of attention must not be used by another.
    """
    model, others, words = request.whisper.model, request.speculation.networks, request.timestamps == "word"
    with hide_generate_warnings(), warnings.catch_warnings() if words else nullcontext():
        if words:
            warnings.filterwarnings("ignore", "__array_wrap__ must accept", DeprecationWarning)
        if not words or can_use_eager_copy(model):
            with reading(model, *others):
                yield
            return
        with reading(*others, writing=[model]), restore_attention(model):
            model.set_attn_implementation("eager")
            yield
