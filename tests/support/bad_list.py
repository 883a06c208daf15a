"""A list of a hundred sound files. Twenty are bad, each in another way; some of the good ones are unusual."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import soundfile

from tests.conftest import RATE, buzz

BAD = {  # name of a bad file -> a part of its error message
    "missing.wav": "does not exist",
    "directory.wav": "is a folder",
    "pipe.wav": "is a pipe",
    "device.wav": "is a device",
    "circle.wav": "symbolic links",
    "dangling.wav": "does not exist",
    "file/through.wav": "Not a directory",
    "x" * 300 + ".wav": "name too long",
    "text.wav": "libsndfile can read",
    "empty.wav": "libsndfile can read",
    "noise.mp3": "libsndfile can read",
    "stub.flac": "libsndfile can read",
    "headless.raw": "as an array with its `sample_rate`",
    "header.wav": "at least one sample",
    "silent.wav": "is silent",
    "short.wav": "at least 0.1 seconds",
    "slow.wav": "at least 8000 Hz",
    "nan.wav": "NaN or infinite",
    "infinite.wav": "NaN or infinite",
    "1e30.wav": "its peak is",
}
ODD = (
    os.fsdecode(b"caf\xe9\xff.wav"),
    "two\nlines.wav",
    "[bold] [x.wav",
    "gsm.wav",
    "named.raw",
    "cut.mp3",
    "cut.flac",
)


def encoded(samples: np.ndarray, kind: str, subtype: str | None = None, rate: int = RATE) -> bytes:
    """Encode samples as a sound file's bytes."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, format=kind, subtype=subtype)
    return buffer.getvalue()


def write_list(folder: Path) -> tuple[list[Path], dict[Path, str]]:
    """Write the files. Returns all hundred paths, and bad path -> a part of its error message."""
    folder.mkdir(parents=True, exist_ok=True)
    good = [folder / f"{number}.wav" for number in range(80 - len(ODD))]
    for number, path in enumerate(good):
        path.write_bytes(encoded(buzz(0.4 + 0.01 * (number % 10), number), "WAV"))
    voice = buzz(0.8, 7)
    flac = encoded(buzz(3.0), "FLAC")
    contents = {
        "gsm.wav": encoded(buzz(0.5, rate=8000), "WAV", "GSM610", 8000),
        "named.raw": encoded(buzz(0.5), "WAV"),
        "cut.mp3": encoded(voice, "MP3")[: len(encoded(voice, "MP3")) // 2],
        "cut.flac": flac[: len(flac) // 2],
    }
    for name in ODD:
        (folder / name).write_bytes(contents.get(name, encoded(buzz(0.5), "WAV")))
    _write_bad(folder)
    bad = {folder / name: words for name, words in BAD.items()}
    paths = [*good, *(folder / name for name in ODD), *bad]
    order = np.random.default_rng(0).permutation(len(paths))
    return [paths[place] for place in order], bad


def _write_bad(folder: Path) -> None:
    (folder / "directory.wav").mkdir()
    os.mkfifo(folder / "pipe.wav")
    (folder / "device.wav").symlink_to("/dev/zero")
    (folder / "circle.wav").symlink_to(folder / "circle.wav")
    (folder / "dangling.wav").symlink_to(folder / "nowhere.wav")
    loud = buzz(0.5)
    broken = {value: np.where(np.arange(len(loud)) == 100, float(value), loud) for value in ("nan", "inf")}
    contents = {
        "file": b"",
        "text.wav": b"Bonjour, this is text.\n" * 50,
        "empty.wav": b"",
        "noise.mp3": np.random.default_rng(0).bytes(2000),
        "stub.flac": encoded(loud, "FLAC")[:20],
        "headless.raw": (loud * 32767).astype("<i2").tobytes(),
        "header.wav": encoded(np.zeros(0, np.float32), "WAV"),
        "silent.wav": encoded(np.zeros(RATE), "WAV"),
        "short.wav": encoded(buzz(0.05), "WAV"),
        "slow.wav": encoded(buzz(1.0)[:4000], "WAV", None, 4000),
        "nan.wav": encoded(broken["nan"], "WAV", "FLOAT"),
        "infinite.wav": encoded(broken["inf"], "WAV", "FLOAT"),
        "1e30.wav": encoded(loud * 1e30, "WAV", "FLOAT"),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
