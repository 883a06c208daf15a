"""`mmdec.transcribe`: speech to text by Whisper, or by an audio language model, with speculative decoding.

The text equals that of `model.generate` with the same arguments. This module checks the call and its drafter.
`recordings` decodes with Whisper, `audio_language_model` with audio language models.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any, overload

import torch
from transformers import PreTrainedModel, ProcessorMixin, WhisperForConditionalGeneration, WhisperProcessor

from mmdec.checks.arguments import suggesting_options
from mmdec.checks.devices import check_dtype
from mmdec.core.budget import DraftSize
from mmdec.core.statistics import DecodingStatistics
from mmdec.core.steps import pass_stop_iteration
from mmdec.core.verify import Relaxation, RuleName
from mmdec.drafters.built_in import AUTO
from mmdec.generation.drafter_choice import DrafterChoice
from mmdec.hub.find import find_model
from mmdec.io.audio import Recording
from mmdec.pretrained.audio_lm import AUDIO_FAMILY_NAMES, LoadedAudioLm, audio_family, load_audio_lm
from mmdec.pretrained.language_model import LANGUAGE_MODEL_FILES as AUDIO_FILES
from mmdec.tasks.audio import Audio, AudioList, as_batch, read_recording, with_notes
from mmdec.tasks.loading import ArgumentKind, ModelOptions, model_of_call
from mmdec.tasks.options import option_names, with_options_of
from mmdec.tasks.threads import with_threads
from mmdec.types import Round
from mmdec.whisper.audio_language_model import AudioLmRequest, transcribe_with_audio_lm
from mmdec.whisper.checkpoint import WHISPER_FILES, WHISPER_KIND, LoadedWhisper, load_whisper
from mmdec.whisper.options import DEFAULT_WHISPER, Model, OnTranscript, Progress, Timestamps, TranscribeOptions
from mmdec.whisper.recordings import transcribe_recordings
from mmdec.whisper.request import TranscriptionRequest
from mmdec.whisper.transcript import Transcript

LoadedTranscriber = LoadedWhisper | LoadedAudioLm  # public name in `mmdec.load`

GENERATION_CLASS_SUFFIX = "ForConditionalGeneration"  # ending of the class names of models that generate
WHISPER = ArgumentKind(
    WhisperForConditionalGeneration, "a WhisperForConditionalGeneration", "WhisperForConditionalGeneration"
)
WHISPER_PROCESSOR = ArgumentKind(WhisperProcessor, "a WhisperProcessor", "WhisperProcessor")
AUDIO_LM = ArgumentKind(PreTrainedModel, "a loaded model of transformers", "AutoModelForMultimodalLM")


@overload
def transcribe(
    audio: Audio,
    *,
    sample_rate: int | None = None,
    model: Model = DEFAULT_WHISPER,
    processor: ProcessorMixin | None = None,
    drafter: DrafterChoice = AUTO,
    timestamps: Timestamps = None,
    language: str | Sequence[str] | None = None,
    task: str | None = "transcribe",
    prompt: str | None = None,
    batch_size: int = 8,
    cut_at_pauses: bool = False,
    strict: bool = False,
    rule: RuleName | Relaxation | None = None,
    num_speculative_tokens: DraftSize = None,
    seed: int | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    on_transcript: OnTranscript | None = None,
    statistics: DecodingStatistics | None = None,
    min_confidence: float | None = None,
    on_round: Callable[[Round], None] | None = None,
    **options: Any,
) -> Transcript: ...
@overload
def transcribe(audio: AudioList, **options: Any) -> list[Transcript]: ...


@with_options_of(TranscribeOptions)
def transcribe(audio: Audio | Sequence[Audio], **options: Any) -> Transcript | list[Transcript]:
    """Transcribe speech: exactly the text of `model.generate` with the same arguments, in fewer passes of the decoder.

    Args:
        audio: A path, a file object, bytes, samples (T,), (T, channels) or (channels, T), or a dict of Hugging Face
            datasets; at most an hour long. A list of these is transcribed together, up to `batch_size` at a time.
        sample_rate: Hz of samples; None for files, whose header has it.
        model: A shipped name, a folder, a Hugging Face id, or a loaded model (then give its `processor`): a Whisper, or
            an audio language model (Qwen2-Audio, Qwen3-ASR, Granite Speech, ...). An audio language model has no
            windows: `timestamps`, `cut_at_pauses`, tasks other than "transcribe", and Whisper's thresholds are rejected
            for it.
        processor: The processor of a loaded model; None otherwise.
        drafter: "medusa" or "ctc" (the heads in the model's folder), "lookup", "recycling" or another registered name,
            a drafter's folder or Hugging Face id, "whisper-tiny.en/ctc" for a shipped one, a dotted path
            "package.module:Class", a smaller Whisper with the same vocabulary, a `Drafter`, or None for plain decoding.
            Default "auto": the first drafter in the model's folder, else one shipped for the model's weights, else
            "lookup"; CTC heads for different languages are joined.
        timestamps: None (default), "segment" or "word" to fill `segments`. "segment" has the model's own times. "word"
            adds the times of words, by an alignment to the sound; a segment begins with its first word and ends with
            its last.
        language: A name or a code; a list has one for each recording. Default None: detected.
        task: "transcribe" (default) or "translate" (into English).
        prompt: For a Whisper, text that might have come before the recording; default None: no text. For an audio
            language model, the request to transcribe or, for Qwen3-ASR, the context; default None: the request that the
            model's processor writes.
        batch_size: Number of recordings that are decoded at the same time. Default 8. Their texts do not depend on it.
        cut_at_pauses: Recordings longer than one window are cut at pauses into pieces of up to 30 s. Each piece is
            transcribed by itself; up to `batch_size` pieces are decoded at the same time. The text may differ from that
            of `model.generate`, whose windows follow each other and overlap. Default False.
        strict: Reject a file that cannot be read completely, because it is damaged or cut off. Default False: the rest
            is transcribed, the missing part becomes silence if sound follows it, and the transcript's `note` says where
            that part is and how long.
        rule, num_speculative_tokens, seed, statistics: Verification rule, draft size, random seed (set again for each
            window; an audio language model samples recording i of a list with `seed + i`), and acceptance rates
            measured in earlier calls, as for `mmdec.generate`.
        device: Where a model given by name runs. Default None: a GPU if there is one, else the CPU.
        dtype: Precision of a model given by name. Default None: float32. "int8", on a CPU: 8-bit weights.
        threads: torch's CPU threads for this call. Default None: the number that the user has set for torch, else a
            number chosen from the model's size and the number of idle CPUs.
        progress: Called with the seconds of audio done and in total. An exception from it ends the call.
        on_transcript: Called with each recording's index and `Transcript`, in the order of the recordings, as soon as
            it and all earlier ones are transcribed.
        min_confidence: In [0, 1]: reject transcripts whose `confidence` is lower; silent recordings, which have none,
            are not rejected. Default None: reject none.
        on_round: Called with each decoding round (a `Round`); its `rows` are indices of the recordings in the call. An
            exception from it ends the call.
        options: Arguments of `generate`: temperature (a tuple: these are tried in order), logprob_threshold,
            compression_ratio_threshold, no_speech_threshold, condition_on_prev_tokens, prompt_condition_type,
            max_new_tokens, repetition_penalty and so on.

    Returns:
        A `Transcript`; for a list, a list of `Transcript`s in the same order. The transcript of a silent recording is
        empty and has no confidence (None), and its `note` gives the reason. Times are those of the file's clock.

    Raises:
        InputError: If an argument or a recording is rejected.
        BatchError: If some recordings of a list are rejected; it holds the results of the others.

    References:
        Whisper (Radford et al. 2022); drafters name their own papers.
    """
    chosen = TranscribeOptions.from_keywords(options)
    batch = as_batch(audio, chosen.sample_rate)
    if _is_audio_lm(chosen.model):
        loaded = model_of_call(chosen, LoadedAudioLm, load_audio_lm, AUDIO_LM)
    else:
        loaded = as_whisper(chosen)
    request = transcription_request(loaded, chosen, len(batch))
    with pass_stop_iteration(), with_threads(chosen.threads, loaded.model):
        recordings = dict[int, Recording]()
        for index, source in enumerate(batch.inputs):
            with batch.collecting_error(index):
                recording = read_recording(source, chosen.sample_rate, silence=True, strict=chosen.strict)
                request.check(recording.samples)
                recordings[index] = recording
        samples = {index: recording.samples for index, recording in recordings.items()}
        if isinstance(request, AudioLmRequest):
            finished = transcribe_with_audio_lm(request, samples, chosen.batch_size, chosen.progress, batch.errors)
        else:
            finished = transcribe_recordings(request, samples, chosen.batch_size, chosen.cut_at_pauses, chosen.progress)
        with closing(finished):
            for transcripts in finished:
                batch.add(with_notes(transcripts, recordings), chosen.on_transcript)
        return batch.finish(chosen.min_confidence)


def transcription_request(
    loaded: LoadedTranscriber, options: TranscribeOptions, recordings: int
) -> TranscriptionRequest | AudioLmRequest:
    """Check the options of a call for its model, a Whisper or an audio language model.

    Args:
        recordings: Number of recordings.

    Raises:
        InputError: For an option that the model does not support.
    """
    with suggesting_options(option_names(TranscribeOptions)):
        if isinstance(loaded, LoadedWhisper):
            return TranscriptionRequest.from_options(loaded, options, recordings)
        return AudioLmRequest.from_options(loaded, options, recordings)


def load_transcriber(
    model: str | os.PathLike[str] = DEFAULT_WHISPER,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
) -> LoadedTranscriber:
    """Load a Whisper or an audio language model.

    It is loaded once for each folder, device and dtype; later calls return the same object.

    Args:
        model: A shipped name, a folder or a Hugging Face id.
        device: None: a GPU if there is one, else the CPU.
        dtype: Dtype of the weights; None: float32.

    Raises:
        InputError: If there is no such model, or its files are damaged, not safetensors, or outside its folder.
    """
    if _is_audio_lm(model):
        return load_audio_lm(model, device, check_dtype(dtype))
    return load_whisper(model, device, check_dtype(dtype, integers=True))


def as_whisper(options: ModelOptions) -> LoadedWhisper:
    """Return the Whisper of a call, which is loaded if it is given by name.

    Raises:
        InputError: If it cannot be loaded, or does not fit `processor`, `device` or `dtype`.
    """
    return model_of_call(options, LoadedWhisper, load_whisper, WHISPER, WHISPER_PROCESSOR, integers=True)


def _is_audio_lm(model: object) -> bool:
    """Return whether the argument `model` is an audio language model; else it is a Whisper."""
    if isinstance(model, (str, os.PathLike)):
        return bool(audio_family(find_model(model, WHISPER_KIND, (*WHISPER_FILES, *AUDIO_FILES))))
    family = type(model).__name__.removesuffix(GENERATION_CLASS_SUFFIX)
    return isinstance(model, LoadedAudioLm) or family in AUDIO_FAMILY_NAMES
