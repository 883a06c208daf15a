"""`mmdec.translate_speech`: translates French recordings of any length (files, arrays) into English."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor

from mmdec.checks.arguments import format_value
from mmdec.checks.devices import check_device, check_dtype
from mmdec.core.summary import format_result, pluralise
from mmdec.daspeech.checkpoint import VOCODER_RULE, read_parts, resolve
from mmdec.daspeech.options import DEFAULT_TRANSLATOR, TranslateOptions
from mmdec.daspeech.passes import OnPass
from mmdec.daspeech.translator import STAGES, SpeechTranslator, SpokenTranslation
from mmdec.errors import InputError
from mmdec.hub.cache import LoadedModels, path_version
from mmdec.hub.find import path_text
from mmdec.io import audio as sound
from mmdec.tasks.audio import INAUDIBLE, SILENCE, Audio, AudioList, as_batch, peak, read_recording
from mmdec.tasks.confidence import read_calibrations
from mmdec.tasks.loading import check_placement
from mmdec.tasks.options import with_options_of
from mmdec.tasks.threads import with_threads

PAUSE_SECONDS = 0.3  # seconds of silence that are put between two translated segments of a recording


@dataclass(frozen=True)
class Translation:
    """The translation of one recording: English speech and text."""

    text: str
    audio: np.ndarray = field(repr=False)  # (T,) float32 in [-1, 1], the English speech
    sample_rate: int  # Hz
    units: list[str] = field(repr=False)  # phones or word pieces of the translation, in order
    # stage -> seconds; the time of a padded batch (on a GPU) is divided equally among its recordings
    timings: dict[str, float] = field(repr=False)
    source_seconds: float = 0.0  # duration of the French recording in seconds
    passes: int = 1  # number of passes of the decoder that writes units, summed over all segments
    confidence: float = 0.0  # in [0, 1]: expected share of right words, see `mmdec.tasks.confidence`
    note: str = ""  # what of the French recording's file could not be read

    @property
    def units_per_pass(self) -> float:
        """The mean number of units for each pass of the decoder."""
        return len(self.units) / max(self.passes, 1)

    def __str__(self) -> str:
        """Write three lines: the text, the number of passes, the time."""
        passes = f"{pluralise(self.passes, 'pass', 'passes')}, {self.units_per_pass:.2f} units a pass"
        return format_result(self.text, passes, self.timings)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the English speech to a sound file, 16 bits per sample.

        Args:
            path: The file; its suffix chooses the format. If writing fails, an existing file stays as it was.

        Returns:
            The path.
        """
        return sound.save_audio(path, self.audio, self.sample_rate)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields except the audio, as lists, numbers and text."""
        content = {entry.name: getattr(self, entry.name) for entry in fields(self) if entry.name != "audio"}
        return content | {"units": list(self.units), "timings": dict(self.timings)}


@overload
def translate_speech(
    audio: Audio,
    *,
    sample_rate: int | None = None,
    model: str | os.PathLike[str] | SpeechTranslator = DEFAULT_TRANSLATOR,
    strategy: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    threads: int | None = None,
    vocoder: str | os.PathLike[str] | None = None,
    min_confidence: float | None = None,
    strict: bool = False,
    on_pass: OnPass | None = None,
) -> Translation: ...


@overload
def translate_speech(audio: AudioList, **options: Any) -> list[Translation]: ...


@with_options_of(TranslateOptions)
def translate_speech(audio: Audio | Sequence[Audio], **options: Any) -> Translation | list[Translation]:
    """Translate French speech into English speech and text.

    Args:
        audio: A path, a file object, bytes, samples (T,), (T, channels) or (channels, T), floats or integers up to 32
            bit, or a dict of Hugging Face datasets. A list holds several recordings; on a CPU its results equal single
            calls exactly.
        sample_rate: Hz of samples; None for files, whose header has it.
        model: A shipped name, a folder, a Hugging Face id, or a translator from `load`.
        strategy: Lookahead, greedy, viterbi, joint-viterbi, beam, reranked, autoregressive or verified (exactly the
            autoregressive decoder's units, in few passes, because the graph drafts them). Default None: the model's
            own, which is reranked for the shipped one.
        device: Where a model given by name runs. Default None: a GPU if there is one, else the CPU.
        dtype: Dtype of matrix products; the vocoder always uses float32. Default None: float32.
        threads: torch's CPU threads for this call. Default None: the number from OMP_NUM_THREADS or
            `torch.set_num_threads`, else a number chosen from the model's size and the number of idle CPUs.
        vocoder: Published HiFi-GAN weights: a folder or a Hugging Face id. Default None: the model's own.
        min_confidence: In [0, 1]: reject translations whose `confidence` is lower. Default None: reject none.
        strict: Reject a file that cannot be read completely, because it is damaged or cut off. Default False: the rest
            is translated, and the translation's `note` says which part is missing and how long it is.
        on_pass: Called after each pass of the decoder with a `Pass`: the units that it made final, its time, and the
            graph; for one recording only. An exception from it ends the call.

    Returns:
        A `Translation`; for a list, a list of `Translation`s in the same order.

    Raises:
        InputError: For a recording that cannot be translated, or in which the model finds no phone or word piece.
        BatchError: If some recordings of a list are rejected; it holds the results of the others.
    """
    chosen = TranslateOptions.from_keywords(options)
    batch = as_batch(audio, chosen.sample_rate)
    batch.check_listener("on_pass", chosen.on_pass, "a function of a pass", "Translate them one by one.")
    translator = as_translator(chosen)
    with with_threads(chosen.threads, *translator.networks):
        recordings = dict[int, sound.Recording]()
        for index, source in enumerate(batch.inputs):
            with batch.collecting_error(index):
                recordings[index] = read_recording(source, chosen.sample_rate, strict=chosen.strict)
        segments = [
            (index, segment) for index, recording in recordings.items() for segment in _segments(recording.samples)
        ]
        spoken = translator.translate([segment for _, segment in segments], chosen.strategy, chosen.on_pass)
        for index, recording in recordings.items():
            results = [result for (owner, _), result in zip(segments, spoken, strict=True) if owner == index]
            translation = _join_segments(results, recording)
            batch.add({index: translation})
            if not translation.units:
                batch.errors[index] = InputError(
                    "`audio` must hold speech that the model recognises, but it found none in "
                    f"{translation.source_seconds:.2f} seconds. Check the recording: its language, its level, its "
                    "noise."
                )
        return batch.finish(chosen.min_confidence)


_translators = LoadedModels[SpeechTranslator]()


def load_translator(
    model: str | os.PathLike[str] = DEFAULT_TRANSLATOR,
    device: str | torch.device | None = None,
    *,
    vocoder: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | str | None = None,
) -> SpeechTranslator:
    """Load a translator.

    It is loaded once for each folder, device, dtype and vocoder, and again if the folder's files have changed.

    Args:
        model: A shipped name, a folder or a Hugging Face id.
        device: None: a GPU if there is one.
        vocoder: None: the model's own; or a folder or Hugging Face id of HiFi-GAN weights.
        dtype: None: float32. bfloat16 and float16 apply to matrix products only; features, weights, the graph's
            probabilities and the vocoder stay in float32.

    Raises:
        InputError: If model or vocoder is not found (the message says how to get it), is damaged, lies outside its
            folder or has no safetensors, and for a device that this machine does not have.
    """
    directory = resolve(model)
    checked, products = check_device(device), _products(dtype)
    if vocoder is not None:
        path_text(vocoder, "vocoder", VOCODER_RULE)
    key = (path_version(directory), str(checked), str(products), None if vocoder is None else path_version(vocoder))
    return _translators.get(
        key, lambda: SpeechTranslator(read_parts(directory, checked, vocoder), read_calibrations(directory), products)
    )


def as_translator(options: TranslateOptions) -> SpeechTranslator:
    """Return the translator of a call, which is loaded if it is given by name.

    Raises:
        InputError: If the model cannot be loaded; if it is loaded, and `vocoder` is given, or `device` or `dtype` is
            not the model's.
    """
    model = options.model
    if not isinstance(model, SpeechTranslator):
        return load_translator(model, options.device, vocoder=options.vocoder, dtype=options.dtype)
    if options.vocoder is not None:
        raise InputError(
            f"`vocoder` must be left out with a loaded `model`, which has one, but is {format_value(options.vocoder)}. "
            "Give it to `load`."
        )
    check_placement(model, options.device, options.dtype, "Leave it out, or load the model there.")
    return model


def _products(dtype: torch.dtype | str | None) -> torch.dtype:
    product_dtype = check_dtype(dtype)
    if product_dtype == torch.float64:
        raise InputError(f"`dtype` must be float32, bfloat16 or float16 for a translator, but is {product_dtype}.")
    return product_dtype


def _segments(samples: Tensor) -> list[Tensor]:
    """Cut a recording (T,) at pauses into segments.

    Silent segments are left out, because the model would invent words for them.
    """
    parts = [sound.trim_silence(samples[start:end]) for start, end in sound.split_at_pauses(samples)]
    threshold = SILENCE if peak(samples) >= SILENCE else INAUDIBLE
    return [part for part in parts if peak(part) >= threshold]


def _join_segments(segments: Sequence[SpokenTranslation], recording: sound.Recording) -> Translation:
    """Join the translations of a recording's segments, with pauses between their voices."""
    pause = np.zeros(int(PAUSE_SECONDS * sound.SAMPLE_RATE), dtype=np.float32)
    voiced = [segment.samples.numpy() for segment in segments if len(segment.samples)]
    sounds = [part for voice in voiced for part in (pause, voice)][1:]
    units = [unit for segment in segments for unit in segment.units]
    weighted = sum(segment.confidence * len(segment.units) for segment in segments)
    return Translation(
        text=" ".join(segment.text for segment in segments if segment.text),
        audio=np.concatenate(sounds) if sounds else pause,
        sample_rate=sound.SAMPLE_RATE,
        units=units,
        timings={stage: sum(segment.timings[stage] for segment in segments) for stage in STAGES},
        source_seconds=len(recording.samples) / sound.SAMPLE_RATE,
        passes=sum(segment.passes for segment in segments),
        confidence=weighted / len(units) if units else 0.0,
        note=recording.note,
    )
