"""Odd sound files by number. The same number gives the same file, but for times or random ids that an encoder writes.

Each is a sound in one of libsndfile's formats at an odd rate, with odd channels or odd samples, under a right or a
wrong suffix, then perhaps cut, flipped, spliced, or its header changed. Some are no files at all.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import soundfile

from mmdec.io.audio.files import READABLE
from tests.conftest import buzz
from tests.support.odd_bytes import CHANGES, FILES, PLACES, place, put

RATES = (8000, 11025, 16000, 22050, 44100, 48000, 44101, 96000, 192000, 7999, 4000, 400_000, 1)
COMMON = (("WAV", "PCM_16"), ("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III"), ("AU", "PCM_16"))
FORMATS = tuple(
    (kind, subtype)
    for kind in soundfile.available_formats()
    if kind != "SD2"  # two files, not one
    for subtype in soundfile.available_subtypes(kind)
)
SUFFIXES = ("wav", "flac", "ogg", "mp3", "aiff", "au", "raw", "gsm", "vox", "snd", "caf", "w64", "txt", "WAV", "")
EXACT = {"PCM_16": 1e-4, "PCM_24": 1e-6, "PCM_32": 1e-6, "FLOAT": 1e-6, "DOUBLE": 1e-6}  # subtypes that lose nothing
ODD = ("", "silent", "short", "opposite", "empty", "loud", "1e30", "nan", "inf")


@dataclass(frozen=True)
class Odd:
    """An odd file, and the sound that reading it must give."""

    path: Path
    story: str  # how the file was made
    sound: np.ndarray | None = None  # (T,) at `rate`; None: the file may be refused
    rate: int = 16_000
    error: float = 0.0  # the greatest error of a sample in the file's format


def write_odd(folder: Path, number: int) -> Odd:
    """Write the file of this number in `folder`, unless it exists."""
    draw = np.random.default_rng([10, number])
    if draw.random() < 0.04:
        return _place(folder, number, PLACES[int(draw.integers(len(PLACES)))])
    common = draw.random() < 0.5
    listed = COMMON if common else FORMATS
    kind, subtype = listed[int(draw.integers(len(listed)))]
    content, sound, rate, story = _encoded(draw, kind, subtype)
    suffix = kind.lower() if draw.random() < 0.7 else SUFFIXES[int(draw.integers(len(SUFFIXES)))]
    changed = content
    for _ in range(int(draw.choice(4, p=(0.2, 0.55, 0.2, 0.05)))):
        how = CHANGES[int(draw.integers(len(CHANGES)))]
        changed, story = how(draw, changed), f"{story}, {how.__name__.strip('_')}"
    path = folder / (f"{number}.{suffix}" if suffix else f"{number}")
    put(path, changed)
    unharmed = changed == content and subtype in EXACT and kind in READABLE
    if not unharmed or sound is None:
        return Odd(path, f"{story}, .{suffix}")
    return Odd(path, f"{story}, .{suffix}", sound, rate, EXACT[subtype])


def _encoded(draw: np.random.Generator, kind: str, subtype: str) -> tuple[bytes, np.ndarray | None, int, str]:
    """Encode a short sound. Returns its bytes, its samples (None if it is odd), its rate, and a description."""
    for _ in range(20):
        plain = draw.random() < 0.6
        rate = int(RATES[int(draw.integers(6 if plain else len(RATES)))])
        # odd sound crashes these encoders and the process
        fragile = subtype.startswith(("VORBIS", "OPUS", "MPEG", "ALAC", "ULAW", "ALAW"))
        many = (1, 2, 3, 5, 8, 16, 255) if rate < 10_000 else (1, 2, 3)
        channels = int(draw.choice((1, 1, 2) if plain or fragile else many))
        mono = _voice(int(draw.integers(8)), max(rate, 1000))
        mono = mono[: int(draw.uniform(0.2, 1.0) * len(mono))]
        data = np.stack([mono] * channels, 1)
        odd = ""
        if not plain:
            odd = str(draw.choice(ODD[:4] if fragile else ODD))
            data = _odd_samples(data, odd, draw)
        buffer = io.BytesIO()
        if fragile and rate > 192_000:
            continue
        try:
            soundfile.write(buffer, data, rate, format=kind, subtype=subtype)
        except (soundfile.SoundFileError, ValueError, TypeError, AssertionError):
            continue  # no such rate or so many channels in this format
        story = f"{kind} {subtype} {rate} Hz {channels} channels {odd}".strip()
        return buffer.getvalue(), mono if plain else None, rate, story
    return draw.bytes(int(draw.integers(2000))), None, 0, "random bytes"


@lru_cache
def _voice(seed: int, rate: int) -> np.ndarray:
    return buzz(0.6, seed, rate)


def _odd_samples(data: np.ndarray, odd: str, draw: np.random.Generator) -> np.ndarray:
    if odd in ("loud", "1e30"):
        return data * (40_000.0 if odd == "loud" else 1e30)
    if odd in ("nan", "inf"):
        data[int(draw.integers(len(data)))] = float(odd)
    elif odd == "silent":
        data *= 0
    elif odd == "opposite":
        data[:, 1::2] *= -1
    return {"short": data[:7], "empty": data[:0]}.get(odd, data)


def _place(folder: Path, number: int, kind: str) -> Odd:
    """Make a path that is no file, or a sound file with an odd name."""
    mono, buffer = buzz(0.3, number), io.BytesIO()
    soundfile.write(buffer, mono, 16_000, format="WAV")
    path = place(folder, number, kind, buffer.getvalue())
    return Odd(path, kind, mono, 16_000, 1e-4) if kind in FILES else Odd(path, kind)
