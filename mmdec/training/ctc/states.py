"""States of a frozen encoder, computed once from sounds as people hear them: in rooms, noise, over the telephone."""

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

BATCH = 16  # sounds read at once
CHUNK = 512  # sounds sorted by length, then stored together


@dataclass(frozen=True)
class Distortion:
    """Shares of the sounds that are changed: a voice of another size, a room, noise, a telephone; and gains.

    silence: seconds at either end at most; recorded sentences have none, people leave some.
    """

    voice: float = 0.5
    room: float = 0.25
    noise: float = 0.35
    telephone: float = 0.1
    silence: float = 0.6
    quietest: float = 0.05  # peak


CLEAN = Distortion(0, 0, 0, 0, 0, 0.5)


def distort(sound: np.ndarray, how: Distortion, draw: np.random.Generator) -> np.ndarray:
    """(T,) -> (T',): what a microphone hears of it, and of the silence around it."""
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
    """The key in the store of a recording heard in one way. view: 0 is the recording itself, others are distorted."""
    return f"{row.path.parent.name}/{row.path.stem}@{view}"


def heard_sound(row: Utterance, view: int, how: Distortion) -> Tensor:
    """The 16 kHz samples of a recording, distorted as its name and view say."""
    sound = load_audio(row.path)
    if view == 0:
        return sound
    seed = int.from_bytes(hashlib.blake2b(state_name(row, view).encode(), digest_size=8).digest())
    return torch.from_numpy(distort(sound.numpy(), how, np.random.default_rng(seed)))


def keep_states(
    rows: Sequence[tuple[Utterance, int]], encoder: SpeechEncoder, folder: Path, how: Distortion
) -> FrameStore:
    """The store in `folder` with the states of all (recording, view); those that it lacks are computed now.

    It says first how many there are and how many GB they take. A process that is killed loses the sounds of one chunk
    at most.
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
    """Names and sounds in batches of about equal length, so that little silence is read."""
    sounds = [(state_name(row, view), heard_sound(row, view, how)) for row, view in rows]
    sounds.sort(key=lambda item: len(item[1]))
    for start in range(0, len(sounds), BATCH):
        yield sounds[start : start + BATCH]
