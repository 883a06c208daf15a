"""The one-call functions. They turn what people have (files, arrays, long recordings) into utterances and back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast, overload

import numpy as np
import torch
from torch import Tensor

from mmdec import audio as sound
from mmdec.checks.arguments import check_switch, check_threads, show
from mmdec.drafters.dag import DagDrafter
from mmdec.hub import DEFAULT_MODEL, load
from mmdec.pipelines.translation.translator import SpeechTranslator, check_strategy, total_timings
from mmdec.runtime import check_device, with_threads
from mmdec.types import InputError

__all__ = ["BatchError", "Translation", "load", "translate_speech"]

Audio = str | os.PathLike[str] | BinaryIO | np.ndarray | Tensor
PAUSE = 0.3  # seconds between two translated pieces
MIN_SECONDS = 0.1
SILENCE = 5e-4  # of full scale: -66 dB
MAX_CHANNELS = 8


@dataclass(frozen=True)
class Translation:
    """English speech and text for one recording."""

    text: str
    audio: np.ndarray = field(repr=False)  # (T,) float32 in [-1, 1]
    sample_rate: int  # Hz
    units: list[str] = field(repr=False)  # phones; the pieces of a long recording follow one another
    timings: dict[str, float] = field(repr=False)  # own seconds of each stage; of a padded batch (GPU) an equal share
    seconds_source: float = 0.0  # length of the French recording
    passes: int = 1  # of the linguistic decoder, over all pieces

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the speech as 16-bit audio, whole or not at all; the suffix names the format."""
        return sound.save_audio(path, self.audio, self.sample_rate)


class BatchError(InputError):
    """Some recordings of a batch were refused; the others are in `results`."""

    def __init__(self, results: list[Any], errors: dict[int, InputError]) -> None:
        self.results = results  # translations or transcripts in order, None where refused
        self.errors = errors  # by place in the batch
        first = next(iter(errors))
        super().__init__(
            f"{len(errors)} of {len(results)} recordings were refused, the first at place {first}: {errors[first]} "
            "The others are in `results` of this error."
        )


@overload
def translate_speech(
    audio: Audio,
    *,
    sample_rate: int | None = None,
    model: str | os.PathLike[str] | SpeechTranslator = DEFAULT_MODEL,
    strategy: str | None = None,
    verify: bool = False,
    device: str | torch.device | None = None,
    threads: int | None = None,
    vocoder: str | os.PathLike[str] | None = None,
) -> Translation: ...


@overload
def translate_speech(
    audio: list[Audio] | tuple[Audio, ...] | list[str] | list[Path] | list[np.ndarray] | list[Tensor],
    *,
    sample_rate: int | None = None,
    model: str | os.PathLike[str] | SpeechTranslator = DEFAULT_MODEL,
    strategy: str | None = None,
    verify: bool = False,
    device: str | torch.device | None = None,
    threads: int | None = None,
    vocoder: str | os.PathLike[str] | None = None,
) -> list[Translation]: ...


def translate_speech(
    audio: Audio | Sequence[Audio],
    *,
    sample_rate: int | None = None,
    model: str | os.PathLike[str] | SpeechTranslator = DEFAULT_MODEL,
    strategy: str | None = None,
    verify: bool = False,
    device: str | torch.device | None = None,
    threads: int | None = None,
    vocoder: str | os.PathLike[str] | None = None,
) -> Translation | list[Translation]:
    """French speech to English speech and text.

    `audio` is a path, a file object, or samples with their `sample_rate` in Hz: (T,), (T, channels) or (channels, T),
    floats or integers up to 32 bit. A list gives a list back, in order; on a CPU it equals one by one exactly.
    `model` is a shipped name, a directory, a hub id, or what `load` gave. `strategy` is lookahead (None means that),
    greedy, viterbi, joint-viterbi, autoregressive or verified. `verify` asks for the last: exactly the autoregressive
    decoder's units, in a few passes over drafts from the graph. `threads` sets torch's threads for this call. `vocoder`
    None is the model's own, "griffin-lim" needs no weights; else it names published HiFi-GAN weights: a directory or a
    hub id.

    Raises InputError for what cannot be translated, sound in which the model finds no unit too, and BatchError, with
    the other results, in a list.
    """
    check_threads(threads)
    strategy = _strategy(strategy, verify)
    alone = not isinstance(audio, (list, tuple))
    batch: list[Audio] = [cast(Audio, audio)] if alone else list(cast(Sequence[Audio], audio))
    if sample_rate is not None and batch and not any(isinstance(item, (np.ndarray, Tensor)) for item in batch):
        raise InputError(
            f"`sample_rate` must be left out for files, whose headers name it, but is {show(sample_rate)}. Leave it "
            "out."
        )
    translator = _translator(model, device, vocoder)
    readable: dict[int, Tensor] = {}
    errors: dict[int, InputError] = {}
    with with_threads(threads):
        for place, item in enumerate(batch):
            try:
                readable[place] = read(item, sample_rate)
            except InputError as error:
                errors[place] = error
        results = zip(readable, _translate(translator, list(readable.values()), strategy), strict=True)
    done: dict[int, Translation] = {}
    for place, result in results:
        if result.units:
            done[place] = result
        else:
            errors[place] = InputError(
                "`audio` must hold speech that the model knows, but it found no unit to say in "
                f"{result.seconds_source:.2f} seconds. Check the recording: its language, its level, its noise."
            )
    if alone:
        for error in errors.values():
            raise error
        return done[0]
    if errors:
        raise BatchError([done.get(place) for place in range(len(batch))], dict(sorted(errors.items())))
    return [done[place] for place in range(len(batch))]


def _strategy(strategy: str | None, verify: bool) -> str:
    if not check_switch("verify", verify):
        strategy = "lookahead" if strategy is None else strategy
    elif strategy is None:
        strategy = "verified"
    if verify and strategy != "verified":
        raise InputError(f"`strategy` must be left out with `verify`, but is {show(strategy)}. Choose one of the two.")
    check_strategy(strategy)
    return strategy


def read(audio: Audio, sample_rate: int | None = None) -> Tensor:
    """One recording in any accepted form to 16 kHz mono (T,), or an InputError that says what is wrong with it."""
    if isinstance(audio, (np.ndarray, Tensor)):
        samples = from_array(audio, sample_rate)
    elif isinstance(audio, (str, os.PathLike)) or callable(getattr(audio, "read", None)):
        try:
            samples = sound.load_audio(audio)
        except InputError:
            raise
        except (OSError, TypeError, ValueError) as error:  # a name that no file can have
            raise InputError(
                f"`audio` must be an existing file, but {show(audio)} cannot be looked for ({error}). Check the path."
            ) from error
    else:
        raise InputError(
            f"`audio` must be a path, a file object, an array or a list of these, but is {show(audio)}. "
            "Convert it with numpy.asarray."
        )
    seconds = len(samples) / sound.SAMPLE_RATE
    if seconds < MIN_SECONDS:
        raise InputError(
            f"`audio` must last at least {MIN_SECONDS} seconds, but lasts {seconds:.4f}. Check the recording."
        )
    peak = _peak(samples)
    if peak < SILENCE:
        raise InputError(
            f"`audio` must hold speech, but is silent: its peak is {_decibels(peak)}, below {_decibels(SILENCE)}. "
            "Check the microphone, or turn the recording up."
        )
    return samples


def from_array(audio: np.ndarray | Tensor, sample_rate: int | None) -> Tensor:
    """Samples of any usual type and layout to 16 kHz mono (T,). Integers are scaled by their type's range."""
    if sample_rate is None:
        raise InputError(
            "`sample_rate` must be given with an array, but is None. Pass sample_rate=16000, for instance."
        )
    rate = _rate(sample_rate)
    sound.check_rate(rate)
    array = audio.detach().cpu() if isinstance(audio, Tensor) else audio
    if isinstance(array, Tensor):
        array = (array.float() if array.dtype == torch.bfloat16 else array).numpy()
    data = _mono(array)  # (T,) float64 or float32
    sound.check_seconds(len(data) / rate)
    samples = torch.from_numpy(np.ascontiguousarray(data))
    sound.check_samples(samples)
    if np.issubdtype(array.dtype, np.floating):
        sound.check_peak(max(float(array.max()), -float(array.min())))  # of all channels: two may cancel
        samples = sound.full_scale(samples)
    return sound.resample(samples.float(), rate)


def _rate(sample_rate: object) -> int:
    """A whole number of Hz; 16000.0 and numpy's numbers are some, too."""
    number = sample_rate.item() if isinstance(sample_rate, np.generic) else sample_rate
    if type(number) is float and number.is_integer():
        number = int(number)
    if type(number) is not int:
        raise InputError(f"`sample_rate` must be a whole number of Hz, but is {show(sample_rate)}. Round it.")
    return number


def _mono(array: np.ndarray) -> np.ndarray:
    kind = array.dtype
    if kind.kind not in "fiu" or (kind.kind in "iu" and kind.itemsize > 4):
        raise InputError(
            f"`audio` must hold floats or integers of at most 32 bit, but holds {kind}. "
            "Convert it with astype to the type it was recorded in."
        )
    if array.ndim not in (1, 2):
        raise InputError(
            f"`audio` must have shape (T,), (T, channels) or (channels, T), but has {array.shape}. "
            "Pass a list of arrays for a batch."
        )
    if array.ndim == 2 and array.size and min(array.shape) > MAX_CHANNELS:
        raise InputError(
            f"`audio` must have at most {MAX_CHANNELS} channels, but has shape {array.shape}. "
            "Pass a list of arrays for a batch."
        )
    if not array.size:
        return np.zeros(0)
    data = array.astype(np.float64)
    if kind.kind in "iu":
        half = 2.0 ** (8 * kind.itemsize - 1)
        data = (data - half if kind.kind == "u" else data) / half
    if data.ndim == 2:
        with np.errstate(all="ignore"):  # infinities are counted later
            data = data.mean(axis=int(np.argmin(data.shape)))
    return data


def _translate(translator: SpeechTranslator, recordings: list[Tensor], strategy: str) -> list[Translation]:
    """16 kHz recordings of any length to one translation each: cut at pauses, translated, joined."""
    pieces: list[Tensor] = []
    owners: list[int] = []
    for owner, samples in enumerate(recordings):
        parts = [sound.trim_silence(samples[start:end]) for start, end in sound.split_at_pauses(samples)]
        spoken = [part for part in parts if _peak(part) >= SILENCE]  # a piece of mere silence says nothing
        pieces += spoken
        owners += [owner] * len(spoken)
    results = translator.translate(pieces, strategy, DagDrafter if strategy == "verified" else None)
    translations = []
    for owner in range(len(recordings)):
        mine = [result for result, place in zip(results, owners, strict=True) if place == owner]
        pause = np.zeros(int(PAUSE * sound.SAMPLE_RATE), dtype=np.float32)
        voiced = [result.samples.numpy() for result in mine if len(result.samples)]
        joined = [part for voice in voiced for part in (pause, voice)][1:]
        translations.append(
            Translation(
                text=" ".join(result.text for result in mine if result.text),
                audio=np.concatenate(joined) if joined else pause,
                sample_rate=sound.SAMPLE_RATE,
                units=[unit for result in mine for unit in result.units],
                timings=total_timings([result.timings for result in mine]),
                seconds_source=len(recordings[owner]) / sound.SAMPLE_RATE,
                passes=sum(result.passes for result in mine),
            )
        )
    return translations


def _translator(
    model: str | os.PathLike[str] | SpeechTranslator,
    device: str | torch.device | None,
    vocoder: str | os.PathLike[str] | None,
) -> SpeechTranslator:
    if not isinstance(model, SpeechTranslator):
        return load(model, device, vocoder=vocoder)
    if vocoder is not None:
        raise InputError(
            f"`vocoder` must be left out with a loaded `model`, which has one, but is {show(vocoder)}. Give it to "
            "`load`."
        )
    if device is not None and check_device(device).type != model.device.type:
        raise InputError(
            f"`device` must be that of the loaded `model`, {model.device}, but is {show(str(device))}. "
            "Leave it out, or load the model there."
        )
    return model


def _peak(samples: Tensor) -> float:
    return float((samples - samples.mean()).abs().max())


def _decibels(level: float) -> str:
    return f"{20 * np.log10(level):.0f} dB" if level > 0 else "-inf dB"
