"""Recordings of speech with pauses, as from a microphone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mmdec.io.audio import load_audio

RATE = 16_000
SAMPLES = Path(__file__).parents[2] / "data" / "samples" / "english"


@lru_cache
def speech_samples(name: str, seconds: float | None = None) -> Tensor:
    """Load a sample of data/samples/english, or its first seconds."""
    sound = load_audio(SAMPLES / f"{name}.flac")
    return sound if seconds is None else sound[: round(seconds * RATE)]


def noise(seconds: float, level: float = 1e-3, seed: int = 0) -> Tensor:
    """Draw white noise (T,). level: its standard deviation, as a share of full scale."""
    generator = torch.Generator().manual_seed(seed)
    return level * torch.randn(round(seconds * RATE), generator=generator)


def talk(parts: Sequence[float | tuple[str, float | None]], level: float = 0.0) -> Tensor:
    """Join parts to one sound (T,), and add noise of `level`. parts: a number is a pause in seconds, a tuple the
    arguments of `speech_samples`."""
    sounds = [speech_samples(*part) if isinstance(part, tuple) else torch.zeros(round(part * RATE)) for part in parts]
    whole = torch.cat(sounds)
    return whole + noise(len(whole) / RATE, level)[: len(whole)] if level else whole


def chunks(sound: Tensor, sizes: Sequence[int]) -> Iterator[np.ndarray]:
    """Yield the sound in chunks of these sizes, in turn."""
    at = count = 0
    while at < len(sound):
        size = sizes[count % len(sizes)]
        yield sound[at : at + size].numpy()
        at, count = at + size, count + 1
