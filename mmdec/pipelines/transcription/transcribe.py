"""Speech to text with a Whisper whose decoder is drafted for: `mmdec.transcribe`.

Windows, timestamps, prompts, fallback and recordings over 30 s are transformers' own long-form code; the text is that
of `model.generate` with the same arguments. Here recordings become features and tokens become transcripts.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast, overload

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, WhisperForConditionalGeneration, WhisperProcessor

from mmdec import hub
from mmdec.audio import SAMPLE_RATE
from mmdec.checks.arguments import check_callable, check_threads, check_whole, options_error, show
from mmdec.decode.statistics import DecodingStatistics
from mmdec.decode.verify import LOSSY, RuleName
from mmdec.drafters.registry import drafter_entry, is_dotted
from mmdec.generation.drafter_choice import DraftedBy
from mmdec.generation.model_lock import reading
from mmdec.generation.speculation import Nodes, Speculation, speculate
from mmdec.hub.whisper import DEFAULT_MODEL, HEADS, Whisper, load_whisper
from mmdec.pipelines.inputs import Audio, BatchError, read
from mmdec.pipelines.transcription.request import Call, Timestamps
from mmdec.pipelines.transcription.transcript import Segment, Transcript
from mmdec.pipelines.transcription.usage import Usage, UsageMeter
from mmdec.pipelines.transcription.word_timestamps import UNSPACED, agree, words
from mmdec.runtime import Stopwatch, check_device, with_threads
from mmdec.targets.model_source import source_folder
from mmdec.targets.registry import target_of
from mmdec.targets.whisper_generate import attention_restored
from mmdec.targets.whisper_settings import settings_in_config
from mmdec.types import InputError

__all__ = ["transcribe"]

Model = str | os.PathLike[str] | WhisperForConditionalGeneration | Whisper
MAX_BATCH = 4096  # recordings decoded together
Progress = Callable[[float, float], None]


@overload
def transcribe(
    audio: Audio,
    *,
    sample_rate: int | None = None,
    model: Model = DEFAULT_MODEL,
    processor: WhisperProcessor | None = None,
    drafter: DraftedBy = HEADS,
    timestamps: Timestamps = None,
    language: str | Sequence[str] | None = None,
    task: str | None = "transcribe",
    prompt: str | None = None,
    batch_size: int = 8,
    rule: RuleName | None = None,
    num_speculative_tokens: Nodes = None,
    device: str | torch.device | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    statistics: DecodingStatistics | None = None,
    **options: Any,
) -> Transcript: ...


@overload
def transcribe(
    audio: list[Audio] | tuple[Audio, ...] | list[str] | list[Path] | list[np.ndarray] | list[Tensor],
    *,
    sample_rate: int | None = None,
    model: Model = DEFAULT_MODEL,
    processor: WhisperProcessor | None = None,
    drafter: DraftedBy = HEADS,
    timestamps: Timestamps = None,
    language: str | Sequence[str] | None = None,
    task: str | None = "transcribe",
    prompt: str | None = None,
    batch_size: int = 8,
    rule: RuleName | None = None,
    num_speculative_tokens: Nodes = None,
    device: str | torch.device | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    statistics: DecodingStatistics | None = None,
    **options: Any,
) -> list[Transcript]: ...


def transcribe(
    audio: Audio | Sequence[Audio],
    *,
    sample_rate: int | None = None,
    model: Model = DEFAULT_MODEL,
    processor: WhisperProcessor | None = None,
    drafter: DraftedBy = HEADS,
    timestamps: Timestamps = None,
    language: str | Sequence[str] | None = None,
    task: str | None = "transcribe",
    prompt: str | None = None,
    batch_size: int = 8,
    rule: RuleName | None = None,
    num_speculative_tokens: Nodes = None,
    device: str | torch.device | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    statistics: DecodingStatistics | None = None,
    **options: Any,
) -> Transcript | list[Transcript]:
    """Speech to text: exactly what `model.generate` gives for the same arguments, in fewer passes of the decoder.

    `audio` is what `translate_speech` takes, of any length up to an hour; a list gives a list back, in order, and
    `batch_size` recordings are decoded together, those within one window (30 s) apart from longer ones. `model` is a
    shipped name, a directory, a hub id, or a loaded model with its `processor`.

    `drafter` is "medusa" (the heads in the model's folder `medusa`), "lookup", "recycling" or another registered name,
    a folder with a drafter's weights, a dotted path "package.module:Class", a smaller Whisper of the same vocabulary,
    an `mmdec.types.Drafter`, or None for plain decoding; `rule`, `num_speculative_tokens` and `statistics` are those of
    `mmdec.speculate`.

    `timestamps` "segment" or "word" fills the segments: "segment" with the model's own times, "word" with words, where
    a segment begins with its first word and ends, with its last, where the model says. `language` is a name or a code,
    a list has one for each recording, and None has it detected. `task` is "transcribe" or "translate" (into English).
    `prompt` is text that might have come before. `options` go to `generate`: temperature (a tuple is the fallback
    ladder), logprob_threshold, compression_ratio_threshold, no_speech_threshold, condition_on_prev_tokens,
    prompt_condition_type, max_new_tokens, repetition_penalty and so on. With a ladder and word timestamps recordings
    are decoded one by one. `progress` is called with the seconds of sound that are done and those that there are.

    Raises InputError for what cannot be done, and BatchError, with the other results, for recordings of a list.
    """
    batch_size = check_whole("batch_size", batch_size, 1, MAX_BATCH, "Leave it out for 8.")
    check_threads(threads)
    check_callable("progress", progress, "a function of the seconds done and all seconds")
    alone = not isinstance(audio, (list, tuple))
    batch: list[Audio] = [cast(Audio, audio)] if alone else list(cast(Sequence[Audio], audio))
    if sample_rate is not None and batch and not any(isinstance(item, (np.ndarray, Tensor)) for item in batch):
        raise InputError(
            f"`sample_rate` must be left out for files, whose headers name it, but is {show(sample_rate)}. Leave it "
            "out."
        )
    whisper = _whisper(model, processor, device)
    call = Call.of(whisper, timestamps, language, task, prompt, options, len(batch))
    target = target_of(whisper.model)
    speculation = speculate(_drafter(whisper, drafter), rule, num_speculative_tokens, statistics=statistics)
    chosen = speculation.drafter_for(whisper.model)
    if chosen is not None:  # before any recording is read
        chosen.check(target)
    readable: dict[int, Tensor] = {}
    errors: dict[int, InputError] = {}
    made: dict[int, Transcript] = {}
    with with_threads(threads):
        for place, item in enumerate(batch):
            try:
                readable[place] = call.check(read(item, sample_rate))
            except InputError as error:
                errors[place] = error
        done, whole = 0.0, sum(map(len, readable.values())) / SAMPLE_RATE
        for places in call.batches({place: len(samples) for place, samples in readable.items()}, batch_size):
            heard = None if progress is None else _progress(progress, done, whole, whisper)
            recordings = [readable[place] for place in places]
            results = _transcribe(call, places, recordings, speculation, rule not in LOSSY, heard)
            made |= zip(places, results, strict=True)
            done += sum(map(len, recordings)) / SAMPLE_RATE
        if progress is not None:
            progress(whole, whole)
    if alone:
        for error in errors.values():
            raise error
        return made[0]
    if errors:
        raise BatchError([made.get(place) for place in range(len(batch))], errors)
    return [made[place] for place in range(len(batch))]


def _transcribe(
    call: Call,
    places: Sequence[int],
    recordings: Sequence[Tensor],
    speculation: Speculation,
    lossless: bool,
    heard: Callable[[Tensor], None] | None,
) -> list[Transcript]:
    """One batch of 16 kHz recordings (T,), all within one window or all longer."""
    model = call.whisper.model
    stopwatch = Stopwatch(model.device)
    inputs = call.features(recordings)
    features = stopwatch.lap()
    meter = UsageMeter(model, speculation, len(recordings), heard)
    arguments = call.arguments(places, call.is_long(len(recordings[0])))
    with (
        _attention(model, call.timestamps == "word", meter.networks),
        settings_in_config(model),
        meter.running(),
    ):
        stopwatch.lap()  # waiting for the model's lock is not the model's time
        try:
            found: Any = model.generate(**inputs, **arguments, custom_generate=meter, monitor_progress=meter.window)
        except (InputError, MemoryError, torch.OutOfMemoryError):
            raise
        except _ProgressError as error:
            raise error.own from None
        except Exception as error:
            # transformers refuses arguments by ValueError; odd types fail anywhere before the first window.
            if isinstance(error, ValueError) or not meter.prompts:
                raise options_error(call.given, error) from error
            raise
    codes = _languages(call.whisper, meter.prompts)
    texts = [_segments(call, segments, code) for segments, code in zip(found["segments"], codes, strict=True)]
    known = sum(usage.encoder + usage.decoder + usage.drafter for usage in meter.usage)
    rest = (stopwatch.lap() - known) / len(recordings)
    samples_read = sum(map(len, recordings))
    return [
        Transcript(
            text=call.whisper.tokenizer.decode(tokens, skip_special_tokens=True).strip(),
            language=code,
            segments=segments if call.timestamps else [],
            tokens=tokens,
            rounds=usage.rounds,
            tokens_per_round=usage.tokens_per_round,
            timings=_timings(usage, features * len(samples) / samples_read, rest),
            seconds=len(samples) / SAMPLE_RATE,
            lossless=lossless,
            windows=usage.windows,
        )
        for segments, code, usage, samples in zip(texts, codes, meter.usage, recordings, strict=True)
        for tokens in [[token for segment in segments for token in segment.tokens]]
    ]


def _timings(usage: Usage, features: float, rest: float) -> dict[str, float]:
    parts = {"features": features, "encoder": usage.encoder, "decoder": usage.decoder, "drafter": usage.drafter}
    return {**parts, "total": sum(parts.values()) + rest}


def _segments(call: Call, found: Sequence[dict[str, Any]], language: str | None) -> list[Segment]:
    """transformers' segments, with their text and, where they were asked for, words whose times agree with them."""
    tokenizer, known = call.whisper.tokenizer, cast(Any, call.whisper.model.generation_config)
    first = getattr(known, "no_timestamps_token_id", call.whisper.model.config.vocab_size) + 1
    special = set(tokenizer.all_special_ids)
    segments = []
    for one in found:
        tokens: list[int] = one["tokens"].tolist()
        start, end = round(float(one["start"]), 3), round(float(one["end"]), 3)
        spoken = None
        if call.timestamps == "word":
            starts: list[float] = [round(second, 3) for second in one["token_timestamps"].tolist()]
            ends = [*starts[1:], max(end, *starts)]
            text = [place for place, token in enumerate(tokens) if token < first and token not in special]
            spoken = words(
                [tokens[place] for place in text],
                [starts[place] for place in text],
                [ends[place] for place in text],
                tokenizer.decode,
                language not in UNSPACED,
            )
        segments.append(Segment(start, end, tokenizer.decode(tokens, skip_special_tokens=True).strip(), tokens, spoken))
    return agree(segments) if call.timestamps == "word" else segments


def _languages(whisper: Whisper, prompts: Sequence[Sequence[int]]) -> list[str | None]:
    """What stands in each recording's prompt after the token that begins a transcript."""
    known: Any = whisper.model.generation_config
    codes = {number: token[2:-2] for token, number in (getattr(known, "lang_to_id", None) or {}).items()}
    start: int = known.decoder_start_token_id
    return [codes.get([*ids, -1][ids.index(start) + 1]) for ids in map(list, prompts)]


def _whisper(model: Model, processor: WhisperProcessor | None, device: str | torch.device | None) -> Whisper:
    if isinstance(model, (str, bytes, os.PathLike)):
        if processor is not None:
            raise InputError("`processor` must be left out for a `model` that is named, which has one, but is given.")
        return load_whisper(model, device)
    if not isinstance(model, Whisper):
        if not isinstance(model, WhisperForConditionalGeneration):
            raise InputError(
                "`model` must be a name, a directory, a hub id or a WhisperForConditionalGeneration, but is "
                f"{show(model)}. Load it with `WhisperForConditionalGeneration.from_pretrained`."
            )
        if not isinstance(processor, WhisperProcessor):
            raise InputError(
                f"`processor` must be a WhisperProcessor with a loaded `model`, but is {show(processor)}. Load it with "
                "`WhisperProcessor.from_pretrained`."
            )
        model = Whisper(model, processor, source_folder(model))
    if device is not None and check_device(device).type != model.model.device.type:
        raise InputError(
            f"`device` must be that of the loaded `model`, {model.model.device}, but is {show(str(device))}. Leave "
            "it out."
        )
    return model


def _drafter(whisper: Whisper, drafter: DraftedBy) -> DraftedBy:
    if isinstance(drafter, str) and drafter != HEADS and (drafter_entry(drafter) is not None or is_dotted(drafter)):
        return drafter
    if isinstance(drafter, (str, os.PathLike)) and drafter != HEADS and hub.kind(Path(drafter)) not in ("", HEADS):
        return drafter  # another system's folder: `speculate` reads it
    if isinstance(drafter, (str, bytes, os.PathLike)):
        return whisper.heads(None if drafter == HEADS else drafter)
    return drafter


class _ProgressError(Exception):
    """What the caller's `progress` raised: no option of `generate` is to blame."""

    def __init__(self, own: Exception) -> None:
        super().__init__(str(own))
        self.own = own


def _progress(progress: Progress, done: float, whole: float, whisper: Whisper) -> Callable[[Tensor], None]:
    step = whisper.extractor.hop_length / SAMPLE_RATE

    def heard(frames: Tensor) -> None:
        try:
            progress(min(done + float(frames.amin(1).sum()) * step, whole), whole)
        except Exception as error:
            raise _ProgressError(error) from error

    return heard


@contextmanager
def _attention(
    model: WhisperForConditionalGeneration, words: bool, others: Sequence[PreTrainedModel]
) -> Iterator[None]:
    """Hold the model for one call of `generate`, and the drafter's own networks, `others`.

    For word timestamps `generate` sets the model's attention to "eager" and leaves it there: nobody else may be between
    a mask made for one kind and its use by the other. In batches of several lengths it hands numpy a tensor, of which
    numpy 2 warns."""
    if not words:
        with reading(model, *others):
            yield
        return
    with reading(*others, writing=[model]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array_wrap__ must accept", DeprecationWarning)
        with attention_restored(model):
            yield
