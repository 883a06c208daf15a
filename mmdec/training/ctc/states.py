"""Frozen speech encoders, and their states, which are computed once and stored. Recordings may be distorted first, as
by rooms, noise or a telephone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import functional as F

from mmdec.audio import SAMPLE_RATE, load_audio, sound_seconds
from mmdec.hub.find import find, kind
from mmdec.hub.whisper import KIND, KINDS, load_encoder
from mmdec.nn.whisper_encoder import TAIL, WhisperEncoder, read_states
from mmdec.training.corpora.librispeech import Utterance
from mmdec.training.stores import FrameStore
from mmdec.training.whisper.augment import (
    FRAME,
    add_babble,
    add_coloured_noise,
    perturb_vocal_tract,
    reverberate,
    telephone,
)
from mmdec.types import InputError

FILES = ("*.json", "model.safetensors", "model-*.safetensors")
STATES = 50  # encoder states per second; the same for all supported encoders


class SpeechEncoder(Protocol):
    """Turns speech into encoder states."""

    @property
    def width(self) -> int:
        """Return the number of channels of a state."""
        ...

    def read(self, sounds: Sequence[Tensor], tail: float) -> tuple[Tensor, Tensor]:
        """Encode 16 kHz samples, each (T,), with up to `tail` seconds of the padding silence after each sound.

        Returns: states (B, S, width) and their lengths (B,).
        """
        ...


@dataclass(frozen=True)
class WhisperReader:
    """A Whisper's encoder. `top`: number of last layers to leave out. If `top` is not 0, `read` keeps the states of all
    padding silence, because the layers that are left out attend to them."""

    encoder: WhisperEncoder
    top: int = 0

    @property
    def width(self) -> int:
        return self.encoder.config.d_model

    @torch.inference_mode()
    def read(self, sounds: Sequence[Tensor], tail: float) -> tuple[Tensor, Tensor]:
        return read_states(self.encoder, sounds, tail=None if self.top else tail, top=self.top)


@dataclass(frozen=True)
class TransformersReader:
    """An encoder of transformers with its feature extractor: wav2vec 2.0, HuBERT, w2v-BERT 2.0 or similar.

    Sounds are encoded one by one, because padding changes the output of some of these models.
    """

    model: Any
    extractor: Any

    @property
    def width(self) -> int:
        return self.model.config.hidden_size

    @torch.inference_mode()
    def read(self, sounds: Sequence[Tensor], tail: float) -> tuple[Tensor, Tensor]:
        rows = []
        for sound in sounds:
            samples = F.pad(sound, (0, round(tail * SAMPLE_RATE))).numpy()
            inputs = self.extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt")
            rows.append(self.model(**inputs).last_hidden_state[0])
        states = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return states, torch.tensor([len(row) for row in rows])


def load_speech_encoder(model: str, top: int = 0) -> SpeechEncoder:
    """Load a speech encoder by shipped name, directory or hub id, in float32 and frozen.

    top: number of last layers of a Whisper encoder to leave out.

    Raises InputError where there is no such model, or transformers has no encoder and feature extractor for it.
    """
    folder = find(model, KIND, FILES)
    if kind(folder) in KINDS:
        return WhisperReader(load_encoder(folder), top)
    if top:
        raise InputError(f"`top` must be 0 but for a Whisper, but is {top} for '{model}'. Leave it out.")
    from transformers import AutoFeatureExtractor, AutoModel

    try:
        extractor = AutoFeatureExtractor.from_pretrained(folder)
        network = AutoModel.from_pretrained(folder, use_safetensors=True, dtype=torch.float32)
        width = network.config.hidden_size
    except (OSError, ValueError, AttributeError, KeyError) as error:
        raise InputError(
            f"`encoder` must be a Whisper or an encoder of speech that transformers knows, with its feature extractor, "
            f"as safetensors, but '{model}' is none ({error!s:.200}). Name another."
        ) from None
    if not isinstance(width, int) or getattr(extractor, "sampling_rate", None) != SAMPLE_RATE:
        raise InputError(f"`encoder` must read {SAMPLE_RATE} Hz sound, but '{model}' does not. Name another.")
    return TransformersReader(network.eval().requires_grad_(False), extractor)


BATCH = 16  # sounds encoded at once
CHUNK = 512  # sounds that are sorted by length together, then stored


@dataclass(frozen=True)
class Distortion:
    """The probability of each distortion: voice (vocal tract length), room, noise, telephone. The gain always changes.

    silence: at most this many seconds are added at each end. Recorded corpora have no such silence, real users do.
    """

    voice: float = 0.5
    room: float = 0.25
    noise: float = 0.35
    telephone: float = 0.1
    silence: float = 0.6
    quietest: float = 0.05  # lowest peak level that the random gain gives


CLEAN = Distortion(0, 0, 0, 0, 0, 0.5)


def distort(sound: np.ndarray, how: Distortion, draw: np.random.Generator) -> np.ndarray:
    """Distort a sound (T,) as a microphone might record it, with silence at both ends. how: the distortions'
    probabilities. Returns (T',)."""
    if len(sound) > FRAME and draw.random() < how.voice:
        sound = perturb_vocal_tract(sound, draw)
    sound = np.pad(sound, [int(draw.uniform(0, how.silence) * SAMPLE_RATE) for _ in range(2)])
    if draw.random() < how.room:
        sound = reverberate(sound, draw)
    if draw.random() < how.noise:
        add = add_coloured_noise if draw.random() < 0.75 else add_babble
        sound = add(sound, draw.uniform(5, 30), draw)
    if draw.random() < how.telephone:
        sound = telephone(sound, draw)
    peak = how.quietest * (0.95 / how.quietest) ** draw.random()
    return (sound * (peak / max(float(np.abs(sound).max()), 1e-4))).astype(np.float32)


def state_name(row: Utterance, view: int) -> str:
    """Return the store's key of one version of a recording. view: 0 is the recording itself, all others are distorted
    versions."""
    return f"{row.path.parent.name}/{row.path.stem}@{view}"


def keep_states(
    rows: Sequence[tuple[Utterance, int]], encoder: SpeechEncoder, folder: Path, how: Distortion
) -> FrameStore:
    """Compute the states of all (recording, view) that the store in `folder` lacks, and return the store.

    It first logs how many are missing and how many GB they need. A killed process loses at most the last `CHUNK`
    sounds.
    """
    store = FrameStore(folder, encoder.width)
    missing = [(row, view) for row, view in rows if state_name(row, view) not in store]
    if not missing:
        return store
    seconds = sum(sound_seconds(row.path) + TAIL + (how.silence if view else 0) for row, view in missing)
    size = seconds * STATES * store.width * 2 / 1e9
    rank_zero_info(f"states of {len(missing)} sounds, {seconds / 3600:.2f} hours, {size:.2f} GB, go to {folder}")
    for start in range(0, len(missing), CHUNK):
        sounds = [(state_name(row, view), heard_sound(row, view, how)) for row, view in missing[start : start + CHUNK]]
        sounds.sort(key=lambda item: len(item[1]))  # a batch has sounds of about equal length: there is little padding
        for begin in range(0, len(sounds), BATCH):
            batch = sounds[begin : begin + BATCH]
            states, counts = encoder.read([sound for _, sound in batch], TAIL)
            store.add({name: states[at, : counts[at]] for at, (name, _) in enumerate(batch)})
    return store


def heard_sound(row: Utterance, view: int, how: Distortion) -> Tensor:
    """Load the 16 kHz samples of one version of a recording: as it is for `view` 0, else distorted. The distortion's
    random seed follows from the recording's name and `view`."""
    sound = load_audio(row.path)
    if view == 0:
        return sound
    seed = int.from_bytes(hashlib.blake2b(state_name(row, view).encode(), digest_size=8).digest())
    return torch.from_numpy(distort(sound.numpy(), how, np.random.default_rng(seed)))
