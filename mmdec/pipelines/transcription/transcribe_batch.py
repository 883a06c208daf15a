"""Runs one batch of recordings through Whisper's `generate` with drafts, and turns tokens into transcripts."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, WhisperForConditionalGeneration

from mmdec.audio import SAMPLE_RATE
from mmdec.checks.arguments import options_error
from mmdec.decode.loop import Round
from mmdec.decode.watch import Stopwatch
from mmdec.generation.model_lock import reading
from mmdec.generation.prompt import option_names
from mmdec.generation.run import Speculation
from mmdec.hub.whisper import LoadedWhisper
from mmdec.pipelines.confidence import confidence
from mmdec.pipelines.transcription.request import TranscriptionRequest
from mmdec.pipelines.transcription.transcript import Segment, Transcript
from mmdec.pipelines.transcription.usage import Usage, UsageMeter, first_time
from mmdec.pipelines.transcription.word_timestamps import UNSPACED, agree, words
from mmdec.targets.whisper import attention_restored, without_own_warnings
from mmdec.types import InputError

TRANSCRIPT = "transcript"  # the kind of decoding in confidence.json
Progress = Callable[[float, float], None]  # (seconds of sound done, seconds of sound in total)


def transcribe_batch(
    request: TranscriptionRequest,
    indices: Sequence[int],
    recordings: Sequence[Tensor],
    speculation: Speculation,
    lossless: bool,
    on_window: Callable[[Tensor], None] | None,
) -> list[Transcript]:
    """Transcribe one batch of 16 kHz recordings (T,), either all within one window or all longer.

    indices: of the recordings in the whole call, which select their languages.
    on_window: called before each window with the progress (B, 2) in frames.
    """
    model = request.whisper.model
    stopwatch = Stopwatch(model.device)
    inputs = request.features(recordings)
    features = stopwatch.lap()
    meter = UsageMeter(model, speculation, len(recordings), on_window, _as_own(speculation.on_round))
    arguments = request.arguments(indices, request.is_long(len(recordings[0])))
    with (
        _attention(model, request.timestamps == "word", meter.networks),
        without_own_warnings(),
        meter.running(),
    ):
        stopwatch.lap()  # exclude the time spent waiting for the model's lock
        try:
            output: Any = model.generate(**inputs, **arguments, custom_generate=meter, monitor_progress=meter.window)
        except (InputError, MemoryError, torch.OutOfMemoryError):
            raise
        except _CallerError as error:
            raise error.own from None
        except Exception as error:
            # transformers refuses arguments by ValueError; odd types fail anywhere before the first window.
            if isinstance(error, ValueError) or not meter.prompts:
                raise options_error(request.given, error, option_names(model)) from error
            raise
    codes = _languages(request.whisper, meter.prompts)
    texts = [_segments(request, segments, code) for segments, code in zip(output["segments"], codes, strict=True)]
    counted = sum(usage.encoder + usage.decoder + usage.drafter for usage in meter.usage)
    rest = (stopwatch.lap() - counted) / len(recordings)
    samples_read = sum(map(len, recordings))
    return [
        Transcript(
            text=request.whisper.tokenizer.decode(tokens, skip_special_tokens=True).strip(),
            language=code,
            segments=segments if request.timestamps else [],
            tokens=tokens,
            rounds=usage.rounds,
            tokens_per_round=usage.tokens_per_round,
            timings=_timings(usage, features * len(samples) / samples_read, rest),
            seconds=len(samples) / SAMPLE_RATE,
            lossless=lossless,
            confidence=confidence(seen, request.calibrations, TRANSCRIPT),
            evidence=seen,
            windows=usage.windows,
        )
        for segments, code, usage, samples in zip(texts, codes, meter.usage, recordings, strict=True)
        for tokens in [[token for segment in segments for token in segment.tokens]]
        for seen in [usage.evidence | {"rate": _rate(tokens, first_time(model), len(samples))}]
    ]


def _rate(tokens: Sequence[int], first: int, samples: int) -> float:
    """Log of text tokens per second. first: the first timestamp token; timestamps are not counted."""
    return math.log((sum(token < first for token in tokens) + 1) * SAMPLE_RATE / samples)


def _timings(usage: Usage, features: float, rest: float) -> dict[str, float]:
    parts = {"features": features, "encoder": usage.encoder, "decoder": usage.decoder, "drafter": usage.drafter}
    return {**parts, "total": sum(parts.values()) + rest}


def _segments(request: TranscriptionRequest, timed: Sequence[dict[str, Any]], language: str | None) -> list[Segment]:
    """transformers' segments with their text and, if requested, words whose times are consistent with them."""
    tokenizer, first = request.whisper.tokenizer, first_time(request.whisper.model)
    special = set(tokenizer.all_special_ids)
    segments = []
    for segment in timed:
        tokens: list[int] = segment["tokens"].tolist()
        start, end = round(float(segment["start"]), 3), round(float(segment["end"]), 3)
        spoken = None
        if request.timestamps == "word":
            starts: list[float] = [round(second, 3) for second in segment["token_timestamps"].tolist()]
            ends = [*starts[1:], max(end, *starts)]
            text = [index for index, token in enumerate(tokens) if token < first and token not in special]
            spoken = words(
                [tokens[index] for index in text],
                [starts[index] for index in text],
                [ends[index] for index in text],
                tokenizer.decode,
                language not in UNSPACED,
            )
        segments.append(Segment(start, end, tokenizer.decode(tokens, skip_special_tokens=True).strip(), tokens, spoken))
    return agree(segments) if request.timestamps == "word" else segments


def _languages(whisper: LoadedWhisper, prompts: Sequence[Sequence[int]]) -> list[str | None]:
    """The language of each recording: the token after the start token in its prompt."""
    settings: Any = whisper.model.generation_config
    codes = {number: token[2:-2] for token, number in (getattr(settings, "lang_to_id", None) or {}).items()}
    start: int = settings.decoder_start_token_id
    return [codes.get([*ids, -1][ids.index(start) + 1]) for ids in map(list, prompts)]


class _CallerError(Exception):
    """Wraps an exception of the caller's `progress` or `on_round`, so that it is not attributed to an option."""

    def __init__(self, own: Exception) -> None:
        super().__init__(str(own))
        self.own = own


def window_progress(progress: Progress, done: float, total: float, whisper: LoadedWhisper) -> Callable[[Tensor], None]:
    """Wrap `progress` for `transcribe_batch`. done: seconds of earlier batches. total: seconds of all batches."""
    seconds = whisper.extractor.hop_length / SAMPLE_RATE

    def on_window(frames: Tensor) -> None:
        try:
            progress(min(done + float(frames.amin(1).sum()) * seconds, total), total)
        except Exception as error:
            raise _CallerError(error) from error

    return on_window


def _as_own(on_round: Callable[[Round], None] | None) -> Callable[[Round], None] | None:
    """Wrap `on_round` so that its exceptions are recognised as the caller's."""
    if on_round is None:
        return None

    def called(round_: Round) -> None:
        try:
            on_round(round_)
        except Exception as error:
            raise _CallerError(error) from error

    return called


@contextmanager
def _attention(
    model: WhisperForConditionalGeneration, words: bool, others: Sequence[PreTrainedModel]
) -> Iterator[None]:
    """Hold the locks of the model and of the drafter's networks (`others`) for one call of `generate`.

    words: word timestamps are wanted. `generate` then sets the model's attention to "eager" and leaves it, so the lock
        is
    exclusive: a mask made for one implementation must not be used by another. Also hides a NumPy 2 warning.
    """
    if not words:
        with reading(model, *others):
            yield
        return
    with reading(*others, writing=[model]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array_wrap__ must accept", DeprecationWarning)
        with attention_restored(model):
            yield
