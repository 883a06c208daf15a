"""Stores the states of a frozen encoder, computed once, also for recordings distorted as in rooms, noise or telephone
calls."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from mmdec.audio import SAMPLE_RATE, load_audio, sound_seconds
from mmdec.nn.whisper_encoder import TAIL
from mmdec.training.corpora.librispeech import Utterance
from mmdec.training.ctc.encoders import STATES, SpeechEncoder
from mmdec.training.stores import FrameStore
from mmdec.training.whisper.augment import (
    FRAME,
    add_babble,
    add_coloured_noise,
    perturb_vocal_tract,
    reverberate,
    telephone,
)

BATCH = 16  # sounds encoded at once
CHUNK = 512  # sounds sorted by length, then stored together


@dataclass(frozen=True)
class Distortion:
    """Probabilities of each distortion: vocal tract length, room, noise, telephone. The gain always changes.

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
    """Distort a sound (T,) as a microphone might record it, with silence at both ends. Returns (T',)."""
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
    """The store's key of one version of a recording. view: 0 is the recording itself, all others are distorted
    versions."""
    return f"{row.path.parent.name}/{row.path.stem}@{view}"


def heard_sound(row: Utterance, view: int, how: Distortion) -> Tensor:
    """The 16 kHz samples of one version of a recording. The distortion's random seed follows from its name and
    `view`."""
    sound = load_audio(row.path)
    if view == 0:
        return sound
    seed = int.from_bytes(hashlib.blake2b(state_name(row, view).encode(), digest_size=8).digest())
    return torch.from_numpy(distort(sound.numpy(), how, np.random.default_rng(seed)))


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
        for batch in by_length(missing[start : start + CHUNK], how):
            states, counts = encoder.read([sound for _, sound in batch], TAIL)
            store.add({name: states[at, : counts[at]] for at, (name, _) in enumerate(batch)})
    return store


def by_length(rows: Sequence[tuple[Utterance, int]], how: Distortion) -> Iterator[list[tuple[str, Tensor]]]:
    """Names and sounds in batches of about equal length, so that there is little padding."""
    sounds = [(state_name(row, view), heard_sound(row, view, how)) for row, view in rows]
    sounds.sort(key=lambda item: len(item[1]))
    for start in range(0, len(sounds), BATCH):
        yield sounds[start : start + BATCH]
