"""`mmdec.transcribe`: speech to text by Whisper with speculative decoding.

transformers' own long-form code handles windows, timestamps, prompts, fallback and recordings over 30 s; the text
equals that of `model.generate` with the same arguments. This module turns recordings into features and tokens into
transcripts.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel, WhisperForConditionalGeneration, WhisperProcessor
from typing_extensions import TypedDict, Unpack

from mmdec.audio import SAMPLE_RATE
from mmdec.checks.arguments import check_callable, check_threads, check_whole, naming_options, options_error
from mmdec.decode.budget import Nodes
from mmdec.decode.loop import Round
from mmdec.decode.statistics import DecodingStatistics
from mmdec.decode.verify import RuleName
from mmdec.decode.watch import Stopwatch
from mmdec.drafters.registry import AUTO, drafter_entry, is_dotted
from mmdec.generation.auto_drafter import auto_drafter
from mmdec.generation.model_lock import reading
from mmdec.generation.run import DecodingOptions, DraftedBy
from mmdec.generation.speculation import option_names
from mmdec.hub.ctc import SYSTEM as CTC
from mmdec.hub.find import drafter_by_name, kind
from mmdec.hub.whisper import DEFAULT_MODEL, HEADS, KIND, LoadedWhisper, load_whisper
from mmdec.pipelines.call import MAX_BATCH, Part, System, Usage, as_loaded, fitting, numbered
from mmdec.pipelines.confidence import check_min_confidence, confidence, evidence
from mmdec.pipelines.inputs import Audio, AudioList, read, recordings, silent
from mmdec.pipelines.threads import with_threads
from mmdec.pipelines.transcription.request import (
    AudioContext,
    Spoken,
    Timestamps,
    TranscriptionRequest,
    UsageMeter,
    first_time,
)
from mmdec.pipelines.transcription.transcript import UNSPACED, Segment, Transcript, agree, beginnings, words
from mmdec.targets.whisper import attention_restored, without_own_warnings
from mmdec.targets.whisper_call import can_twin
from mmdec.types import InputError

__all__ = ["AUTO", "HEADS", "KIND", "LoadedTranscriber", "TranscribeOptions", "load_transcriber", "transcribe"]

LoadedTranscriber = LoadedWhisper  # public name in `mmdec.load`
load_transcriber = load_whisper

TRANSCRIPT = "transcript"  # the kind of decoding in confidence.json
UNSURE = 0.7  # a lower confidence of the shipped model names another
FOR_PEOPLE = "openai/whisper-base"
WHISPER = System(
    load_whisper,
    LoadedWhisper,
    Part(WhisperForConditionalGeneration, "a WhisperForConditionalGeneration", "WhisperForConditionalGeneration"),
    Part(WhisperProcessor, "a WhisperProcessor", "WhisperProcessor"),
    integers=True,
)
Model = str | os.PathLike[str] | WhisperForConditionalGeneration | LoadedWhisper
Progress = Callable[[float, float], None]  # (seconds of sound done, seconds of sound in total)


class TranscribeOptions(TypedDict, total=False, extra_items=Any):
    """The keyword arguments of `transcribe`; all other options go to transformers' `generate`."""

    sample_rate: int | None
    model: Model
    processor: WhisperProcessor | None
    drafter: DraftedBy
    timestamps: Timestamps
    language: str | Sequence[str] | None
    task: str | None
    prompt: str | None
    audio_context: AudioContext
    batch_size: int
    rule: RuleName | None
    num_speculative_tokens: Nodes
    seed: int | None
    device: str | torch.device | None
    dtype: torch.dtype | str | None
    threads: int | None
    progress: Progress | None
    statistics: DecodingStatistics | None
    min_confidence: float | None
    on_round: Callable[[Round], None] | None


@overload
def transcribe(audio: Audio, **options: Unpack[TranscribeOptions]) -> Transcript: ...


@overload
def transcribe(audio: AudioList, **options: Unpack[TranscribeOptions]) -> list[Transcript]: ...


def transcribe(
    audio: Audio | Sequence[Audio],
    *,
    sample_rate: int | None = None,
    model: Model = DEFAULT_MODEL,
    processor: WhisperProcessor | None = None,
    drafter: DraftedBy = AUTO,
    timestamps: Timestamps = None,
    language: str | Sequence[str] | None = None,
    task: str | None = "transcribe",
    prompt: str | None = None,
    audio_context: AudioContext = None,
    batch_size: int = 8,
    rule: RuleName | None = None,
    num_speculative_tokens: Nodes = None,
    seed: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    statistics: DecodingStatistics | None = None,
    min_confidence: float | None = None,
    on_round: Callable[[Round], None] | None = None,
    **options: Any,
) -> Transcript | list[Transcript]:
    """Transcribe speech: exactly the text of `model.generate` with the same arguments, in fewer passes of the decoder.

    audio: as for `translate_speech`, at most an hour long. A list is transcribed in batches.
    sample_rate: Hz of samples; None for files, which name their own.
    model: a shipped name, a directory, a hub id, or a loaded Whisper (then give its `processor`).
    processor: the `WhisperProcessor` of a loaded model; None otherwise.
    drafter: "medusa" or "ctc" (the heads in the model's folder), "lookup", "recycling" or another registered name, a
        drafter's folder or hub id, "whisper-phrasebook/medusa" for the shipped one, a dotted path
        "package.module:Class", a smaller Whisper with the same vocabulary, a `Drafter`, or None for plain decoding.
        Default "auto": the first drafter in the model's folder, else one shipped for its weights, else "lookup".
    timestamps: None (default), "segment" or "word" to fill `segments`. "segment" has the model's own times. "word" adds
        the times of words, by an alignment to the sound; a segment begins with its first word and ends with its last.
    language: a name or a code; a list has one for each recording. Default None: detected.
    task: "transcribe" (default) or "translate" (into English).
    prompt: text that might have come before the recording. Default None.
    audio_context: NOT the stock model: the encoder reads the sound and so many seconds after it, instead of 30 s, which
        makes short recordings faster; "auto" for 12 s. A text that does not end, or that repeats itself, is decoded
        again with all of the window. Recordings are then decoded one by one. Default None: whole windows.
    batch_size: recordings decoded together. Default 8. Those longer than one window (30 s) are batched separately.
    rule, num_speculative_tokens, seed, statistics: as for `mmdec.generate`. Each window restarts from the seed.
    device: where a model given by name runs. Default None: a GPU if there is one, else the CPU.
    dtype: precision of a model given by name. Default None: float32. "int8", on a CPU: linear layers in 8 bits.
    threads: as for `translate_speech`.
    progress: called with the seconds of sound done and in total. An exception from it ends the call.
    min_confidence: in [0, 1]: refuse transcripts whose `confidence` is lower. Default None: refuse none.
    on_round: called with each `Round` of the decoder; its `rows` count the recordings of the call. An exception from it
        ends the call.
    options: arguments of `generate`: temperature (a tuple is the fallback ladder), logprob_threshold,
        compression_ratio_threshold, no_speech_threshold, condition_on_prev_tokens, prompt_condition_type,
        max_new_tokens,
        repetition_penalty and so on. With a ladder and word timestamps recordings are decoded one by one.
    Returns: a `Transcript`, or for a list a list of them in the same order. That of a silent recording is empty, and
        its `note` says so.
    Raises: InputError if an argument or a recording is refused; BatchError for a list with such recordings; it holds
        the results of the others.
    Source: Whisper (Radford et al. 2022); drafters name their own papers.
    """
    batch_size = check_whole("batch_size", batch_size, 1, MAX_BATCH, "Leave it out for 8.")
    check_threads(threads)
    least = check_min_confidence(min_confidence)
    batch = recordings(audio, sample_rate)
    check_callable("progress", progress, "a function of the seconds done and all seconds")
    check_callable("on_round", on_round, "a function of a round")
    whisper = as_loaded(WHISPER, model, processor, device, dtype)
    decoding = DecodingOptions(as_drafter(whisper, drafter), rule, num_speculative_tokens, seed, statistics, on_round)
    spoken = Spoken(timestamps, language, task, prompt, audio_context)
    request = TranscriptionRequest.of(whisper, fitting(decoding, whisper.model), options, len(batch), spoken)
    with with_threads(threads, whisper.model), naming_options(TranscribeOptions.__annotations__):
        return batch.run(
            lambda given: request.check(read(given, sample_rate, silence=True)),
            lambda samples: in_batches(request, samples, batch_size, progress),
            least,
        )


def as_drafter(whisper: LoadedWhisper, drafter: DraftedBy) -> DraftedBy:
    """Resolve `transcribe`'s argument `drafter` to one that `speculate` takes.

    "auto" becomes the drafter that `auto_drafter` finds. "medusa" becomes the heads in the model's folder, "ctc" the
    CTC head there, and a folder or hub id of heads those heads, loaded once in the model's device and precision.
    Anything else is returned unchanged.
    Raises: InputError if there are no heads for this model.
    """
    if isinstance(drafter, str) and drafter == AUTO:
        return auto_drafter(whisper.model, whisper.directory, whisper.read_drafter)
    if isinstance(drafter, str) and drafter == CTC:
        return whisper.drafter_folder(CTC)
    if isinstance(drafter, str) and drafter != HEADS and (drafter_entry(drafter) is not None or is_dotted(drafter)):
        return drafter
    drafter = drafter_by_name(drafter, "drafter") or drafter
    if isinstance(drafter, (str, os.PathLike)) and drafter != HEADS and kind(Path(drafter)) not in ("", HEADS):
        return drafter  # a folder of another system: `speculate` reads it
    if isinstance(drafter, (str, bytes, os.PathLike)):
        return whisper.heads(None if drafter == HEADS else drafter)
    return drafter


def in_batches(
    request: TranscriptionRequest, samples: Mapping[int, Tensor], batch_size: int, progress: Progress | None
) -> dict[int, Transcript]:
    """Transcribe recordings (T,), keyed by index, `batch_size` at a time. Returns the transcripts by index."""
    levels = {index: silent(recording) for index, recording in samples.items()}
    transcripts = {index: _nothing(request, index, samples[index], level) for index, level in levels.items() if level}
    done, total = 0.0, sum(map(len, samples.values())) / SAMPLE_RATE
    lengths = {index: len(recording) for index, recording in samples.items() if index not in transcripts}
    for indices in request.batches(lengths, batch_size):
        on_window = None if progress is None else _window_progress(progress, done, total, request.whisper)
        batch = [samples[index] for index in indices]
        transcripts |= zip(indices, transcribe_batch(request, indices, batch, on_window), strict=True)
        done += sum(map(len, batch)) / SAMPLE_RATE
    if progress is not None:
        progress(total, total)
    return transcripts


def _nothing(request: TranscriptionRequest, index: int, samples: Tensor, level: str) -> Transcript:
    """An empty transcript for a silent recording, which the model is not given: it would invent words. level: how
    silent, in words."""
    languages = request.languages
    return Transcript(
        text="",
        language=languages if languages is None or isinstance(languages, str) else languages[index],
        segments=[],
        tokens=[],
        rounds=0,
        tokens_per_round=1.0,
        timings=_timings(Usage(), 0.0, 0.0),
        seconds=len(samples) / SAMPLE_RATE,
        confidence=1.0,
        windows=0,
        note=f"the recording is {level}",
    )


def transcribe_batch(
    request: TranscriptionRequest,
    indices: Sequence[int],
    recordings: Sequence[Tensor],
    on_window: Callable[[Tensor], None] | None,
) -> list[Transcript]:
    """Transcribe one batch of 16 kHz recordings (T,), either all within one window or all longer.

    indices: positions of the recordings in the whole call, which select their languages.
    on_window: called before each window with the progress (B, 2) in frames.
    """
    model = request.whisper.model
    stopwatch = Stopwatch(model.device)
    inputs = request.features(recordings)
    features = stopwatch.lap()
    speculation = request.speculation
    listeners = (_of_caller(on_window), _of_caller(numbered(speculation.options.on_round, indices)))
    begins = None
    if request.timestamps == "word":
        begins = partial(beginnings, decode=partial(request.whisper.tokenizer.decode, skip_special_tokens=True))
    meter = UsageMeter(model, speculation, len(recordings), *listeners, request.margin, begins)
    arguments = request.arguments(indices, request.is_long(len(recordings[0])))
    locks = _attention(model, request.timestamps == "word", speculation.networks)
    with locks, without_own_warnings():
        stopwatch.lap()  # exclude the time spent waiting for the model's lock
        meter.start()
        output = _generated(request, meter, {**inputs, **arguments})
    codes = _languages(request.whisper, meter.prompts)
    texts = [
        _segments(request, segments, code, len(samples) / SAMPLE_RATE)
        for segments, code, samples in zip(output["segments"], codes, recordings, strict=True)
    ]
    counted = sum(sum(usage.seconds.values()) for usage in meter.usage)
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
            lossless=speculation.options.lossless,
            confidence=sure,
            calibrated=TRANSCRIPT in request.calibrations,
            evidence=seen,
            windows=usage.prompts,
            note=_advice(request.whisper, sure),
        )
        for segments, code, usage, samples in zip(texts, codes, meter.usage, recordings, strict=True)
        for tokens in [[token for segment in segments for token in segment.tokens]]
        for seen in [evidence(usage.logprobs) | {"rate": _rate(tokens, first_time(model), len(samples))}]
        for sure in [confidence(seen, request.calibrations, TRANSCRIPT)]
    ]


def _generated(request: TranscriptionRequest, meter: UsageMeter, arguments: Mapping[str, Any]) -> Any:
    """The output of `generate`. Raises InputError for an option that it refuses, and the caller's own exceptions."""
    try:
        return meter.model.generate(**arguments, custom_generate=meter, monitor_progress=meter.window)
    except (InputError, MemoryError, torch.OutOfMemoryError):
        raise
    except _CallerError as error:
        raise error.own from None
    except Exception as error:
        # transformers refuses arguments by ValueError; odd types fail anywhere before the first window.
        if isinstance(error, ValueError) or not meter.prompts:
            raise options_error(request.given, error, option_names(request.whisper.model)) from error
        raise


def _advice(whisper: LoadedWhisper, sure: float) -> str:
    """Which model to take where the shipped one, which learned from synthetic voices, is unsure; else ""."""
    shipped = whisper.directory is not None and whisper.directory.name == DEFAULT_MODEL
    if not shipped or sure >= UNSURE:
        return ""
    return f'{DEFAULT_MODEL} is unsure of this voice; model="{FOR_PEOPLE}" knows recordings of people'


def _rate(tokens: Sequence[int], first: int, samples: int) -> float:
    """Log of text tokens per second. first: the first timestamp token; timestamps are not counted."""
    return math.log((sum(token < first for token in tokens) + 1) * SAMPLE_RATE / samples)


def _timings(usage: Usage, features: float, rest: float) -> dict[str, float]:
    parts = {"features": features, **{stage: usage.seconds[stage] for stage in ("encoder", "decoder", "drafter")}}
    return {**parts, "total": sum(parts.values()) + rest}


def _segments(
    request: TranscriptionRequest, timed: Sequence[dict[str, Any]], language: str | None, seconds: float
) -> list[Segment]:
    """transformers' segments with their text and, if requested, words whose times are consistent with them.

    seconds: the recording's length, the latest end of a segment: the model also reads the silence after the sound.
    """
    tokenizer, first = request.whisper.tokenizer, first_time(request.whisper.model)
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


def _of_caller(function: Callable[..., None] | None) -> Callable[..., None] | None:
    """Wrap a callback so that its exceptions are recognised as the caller's."""
    if function is None:
        return None

    def called(*arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:
            raise _CallerError(error) from error

    return called


def _window_progress(progress: Progress, done: float, total: float, whisper: LoadedWhisper) -> Callable[[Tensor], None]:
    """Make the callback `on_window`, which turns a window's progress in frames into a call of `progress`, in seconds of
    sound.

    done: seconds of sound in earlier batches. total: seconds of sound in all batches.
    """
    seconds = whisper.extractor.hop_length / SAMPLE_RATE
    return lambda frames: progress(min(done + float(frames.amin(1).sum()) * seconds, total), total)


@contextmanager
def _attention(
    model: WhisperForConditionalGeneration, words: bool, others: Sequence[PreTrainedModel]
) -> Iterator[None]:
    """Hold the locks of the model and of the drafter's networks (`others`) for one call of `generate`.

    words: word timestamps are wanted, which hides a NumPy 2 warning. If modules have a `forward` of their own,
        `generate` sets the model's attention to "eager" and leaves it, so the lock is exclusive: a mask made for one
        implementation must not be used by another.
    """
    if not words:
        with reading(model, *others):
            yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array_wrap__ must accept", DeprecationWarning)
        if can_twin(model):
            with reading(model, *others):
                yield
            return
        with reading(*others, writing=[model]), attention_restored(model):
            yield
