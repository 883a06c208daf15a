"""`mmdec.transcribe`: speech to text by Whisper with speculative decoding.

transformers' own long-form code handles windows, timestamps, prompts, fallback and recordings over 30 s; the text is
that of `model.generate` with the same arguments. This module turns recordings into features and tokens into
transcripts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from transformers import WhisperProcessor
from typing_extensions import TypedDict, Unpack

from mmdec.audio import SAMPLE_RATE
from mmdec.checks.arguments import check_callable, check_threads, check_whole, naming_options
from mmdec.decode.budget import Nodes
from mmdec.decode.loop import Round
from mmdec.decode.statistics import DecodingStatistics
from mmdec.decode.verify import LOSSY, RuleName
from mmdec.generation.drafter_choice import DraftedBy
from mmdec.generation.run import Speculation
from mmdec.generation.speculation import speculate
from mmdec.hub.whisper import DEFAULT_MODEL, HEADS
from mmdec.pipelines.confidence import check_min_confidence, refuse_unsure
from mmdec.pipelines.inputs import Audio, AudioList, Batch
from mmdec.pipelines.threads import with_threads
from mmdec.pipelines.transcription.load import Model, as_drafter, as_whisper
from mmdec.pipelines.transcription.request import Timestamps, TranscriptionRequest
from mmdec.pipelines.transcription.transcribe_batch import Progress, transcribe_batch, window_progress
from mmdec.pipelines.transcription.transcript import Transcript
from mmdec.targets.registry import target_of
from mmdec.types import InputError

__all__ = ["TranscribeOptions", "transcribe"]

MAX_BATCH = 4096  # recordings decoded together at most


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
    drafter: DraftedBy = HEADS,
    timestamps: Timestamps = None,
    language: str | Sequence[str] | None = None,
    task: str | None = "transcribe",
    prompt: str | None = None,
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
    drafter: "medusa" (default: the heads in the model's folder), "lookup", "recycling" or another registered name, a
        drafter's folder or hub id, "whisper-phrasebook/medusa" for the shipped one, a dotted path
        "package.module:Class",
        a smaller Whisper with the same vocabulary, a `Drafter`, or None for plain decoding.
    timestamps: None (default), "segment" or "word" to fill `segments`. "segment" has the model's own times. "word" adds
        the times of words: a segment begins with its first word and ends where the model says; so does its last word.
    language: a name or a code; a list has one for each recording. Default None: detected.
    task: "transcribe" (default) or "translate" (into English).
    prompt: text that might have come before the recording. Default None.
    batch_size: recordings decoded together. Default 8. Those longer than one window (30 s) are batched separately.
    rule, num_speculative_tokens, seed, statistics: as for `mmdec.generate`. Each window restarts from the seed.
    device: where a model given by name runs. Default None: a GPU if there is one, else the CPU.
    dtype: precision of a model given by name. Default None: float32.
    threads: as for `translate_speech`.
    progress: called with the seconds of sound done and in total. An exception from it ends the call.
    min_confidence: in [0, 1]: refuse transcripts whose `confidence` is lower. Default None: refuse none.
    on_round: called with each `Round` of the decoder; for one recording only. An exception from it ends the call.
    options: arguments of `generate`: temperature (a tuple is the fallback ladder), logprob_threshold,
        compression_ratio_threshold, no_speech_threshold, condition_on_prev_tokens, prompt_condition_type,
        max_new_tokens,
        repetition_penalty and so on. With a ladder and word timestamps recordings are decoded one by one.
    Returns: a `Transcript`, or for a list a list of them in the same order.
    Raises: InputError if an argument or a recording is refused; BatchError for a list with such recordings; it holds
        the results of the others.
    Source: Whisper (Radford et al. 2022); drafters name their own papers.
    """
    batch_size = check_whole("batch_size", batch_size, 1, MAX_BATCH, "Leave it out for 8.")
    check_threads(threads)
    least = check_min_confidence(min_confidence)
    batch = Batch(audio, sample_rate)
    _check_listeners(progress, on_round, batch.single)
    whisper = as_whisper(model, processor, device, dtype)
    request = TranscriptionRequest.of(whisper, timestamps, language, task, prompt, options, len(batch))
    chosen = as_drafter(whisper, drafter)
    speculation = speculate(chosen, rule, num_speculative_tokens, seed, on_round, None, statistics)
    loaded = speculation.drafter_for(whisper.model)
    if loaded is not None:  # fail before any recording is read
        loaded.check(target_of(whisper.model))
    with with_threads(threads, whisper.model), naming_options(TranscribeOptions.__annotations__):
        recordings = batch.read(request.check)
        transcripts = _in_batches(request, recordings, batch_size, speculation, rule not in LOSSY, progress)
    _refuse(transcripts, least, batch)
    return batch.results(transcripts)


def _refuse(transcripts: dict[int, Transcript], least: float | None, batch: Batch) -> None:
    """Move transcripts whose confidence is below `least` to the batch's errors."""
    refuse_unsure(transcripts, batch.errors, least, "audio")


def _check_listeners(progress: object, on_round: object, single: bool) -> None:
    check_callable("progress", progress, "a function of the seconds done and all seconds")
    check_callable("on_round", on_round, "a function of a round")
    if on_round is not None and not single:
        raise InputError("`on_round` must be None for a list of recordings, but is given. Transcribe them one by one.")


def _in_batches(
    request: TranscriptionRequest,
    recordings: Mapping[int, Tensor],
    batch_size: int,
    speculation: Speculation,
    lossless: bool,
    progress: Progress | None,
) -> dict[int, Transcript]:
    """Transcribe recordings (T,), keyed by index, `batch_size` at a time."""
    transcripts: dict[int, Transcript] = {}
    done, total = 0.0, sum(map(len, recordings.values())) / SAMPLE_RATE
    for indices in request.batches({index: len(samples) for index, samples in recordings.items()}, batch_size):
        on_window = None if progress is None else window_progress(progress, done, total, request.whisper)
        samples = [recordings[index] for index in indices]
        results = transcribe_batch(request, indices, samples, speculation, lossless, on_window)
        transcripts |= zip(indices, results, strict=True)
        done += sum(map(len, samples)) / SAMPLE_RATE
    if progress is not None:
        progress(total, total)
    return transcripts
