"""Speech with pauses, as a microphone hears it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mmdec.audio import load_audio

RATE = 16_000
SAMPLES = Path(__file__).parents[2] / "data" / "samples" / "english"


@lru_cache
def spoken(name: str, seconds: float | None = None) -> Tensor:
    """A sample of data/samples/english, or its first seconds."""
    sound = load_audio(SAMPLES / f"{name}.flac")
    return sound if seconds is None else sound[: round(seconds * RATE)]


def noise(seconds: float, level: float = 1e-3, seed: int = 0) -> Tensor:
    """What a quiet room sounds like. level: of full scale."""
    generator = torch.Generator().manual_seed(seed)
    return level * torch.randn(round(seconds * RATE), generator=generator)


def talk(parts: Sequence[float | tuple[str, float | None]], level: float = 0.0) -> Tensor:
    """Pauses in seconds and samples by name, in a room with noise of a level."""
    sounds = [spoken(*part) if isinstance(part, tuple) else torch.zeros(round(part * RATE)) for part in parts]
    whole = torch.cat(sounds)
    return whole + noise(len(whole) / RATE, level)[: len(whole)] if level else whole


def chunks(sound: Tensor, sizes: Sequence[int]) -> Iterator[np.ndarray]:
    """The sound in chunks of the sizes, again and again."""
    at = count = 0
    while at < len(sound):
        size = sizes[count % len(sizes)]
        yield sound[at : at + size].numpy()
        at, count = at + size, count + 1
