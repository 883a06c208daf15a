"""The one-call functions. They turn what people have (files, arrays, long recordings) into utterances and back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast, overload

import numpy as np
import torch
from torch import Tensor

from mmdec import audio as sound
from mmdec.checks.arguments import check_switch, check_threads, show
from mmdec.hub.daspeech import DEFAULT_MODEL
from mmdec.pipelines.inputs import SILENCE, Audio, BatchError, peak, read
from mmdec.pipelines.translation.load import as_translator, load
from mmdec.pipelines.translation.translator import SpeechTranslator, check_strategy, total_timings
from mmdec.runtime import with_threads
from mmdec.types import InputError

__all__ = ["BatchError", "Translation", "load", "translate_speech"]

PAUSE = 0.3  # seconds between two translated pieces


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
    translator = as_translator(model, device, vocoder)
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


def _translate(translator: SpeechTranslator, recordings: list[Tensor], strategy: str) -> list[Translation]:
    """16 kHz recordings of any length to one translation each: cut at pauses, translated, joined."""
    pieces: list[Tensor] = []
    owners: list[int] = []
    for owner, samples in enumerate(recordings):
        parts = [sound.trim_silence(samples[start:end]) for start, end in sound.split_at_pauses(samples)]
        spoken = [part for part in parts if peak(part) >= SILENCE]  # a piece of mere silence says nothing
        pieces += spoken
        owners += [owner] * len(spoken)
    results = translator.translate(pieces, strategy)
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
