"""English read aloud: who reads (flite's voices, espeak-ng's accents), what is heard, and where the silence ends."""

import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import soundfile
import voices

RATE = 16000
FLITE = {"kal": "male", "kal16": "male", "awb": "male", "rms": "male", "slt": "female"}  # awb_time tells times alone
FLITE_SHARE = 0.4  # of the readers
ACCENTS = (
    "en-us",
    "en-gb",
    "en-gb-scotland",
    "en-gb-x-rp",
    "en-gb-x-gbclan",
    "en-gb-x-gbcwmd",
    "en-029",
    "en-us-nyc",
)
_QUIET = 0.01  # of the loudest sample


@dataclass(frozen=True)
class Reader:
    """A voice at a speed and a pitch. `name` says the voice alone."""

    name: str
    gender: str
    words_per_minute: int
    pitch: int


@cache
def flite_voices() -> tuple[str, ...]:
    """Those of flite's voices that this flite has."""
    listed = subprocess.run(["flite", "-lv"], capture_output=True, text=True, check=True).stdout
    return tuple(name for name in FLITE if name in listed.partition(":")[2].split())


def reader(random: np.random.Generator, *, held_out: bool) -> Reader:
    """A reader drawn from the held-out variants of espeak-ng, or from all others and flite's voices."""
    speed, pitch = int(random.integers(120, 201)), int(random.integers(20, 81))
    if not held_out and random.random() < FLITE_SHARE:
        names = flite_voices()
        name = names[int(random.integers(len(names)))]
        return Reader(f"flite-{name}", FLITE[name], speed, pitch)
    known = voices.variants()
    names = [name for name in known if (name in voices.HELD_OUT) == held_out]
    variant = names[int(random.integers(len(names)))]
    accent = ACCENTS[int(random.integers(len(ACCENTS)))]
    return Reader(f"espeak-{accent}+{variant}", known[variant], speed, pitch)


def read_aloud(text: str, who: Reader) -> np.ndarray:
    """Speech of `text`, (T,) float32 at 16 kHz, silent edges cut. Raises RuntimeError when nothing is heard."""
    engine, _, voice = who.name.partition("-")
    if engine == "flite":
        samples, rate = _flite(text, voice, who)
    else:
        samples, rate = voices.espeak(text, voice, who.words_per_minute, who.pitch), voices.RATE
    loud = np.flatnonzero(np.abs(samples) > _QUIET * np.abs(samples).max(initial=0))
    if len(loud) < rate // 10:
        raise RuntimeError(f"{engine} gave no sound for {text!r} in voice {who.name}")
    return voices.resample(samples[loud[0] : loud[-1] + 1], rate, RATE).astype(np.float32)


def _flite(text: str, voice: str, who: Reader) -> tuple[np.ndarray, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "speech.wav"
        stretch = 160 / who.words_per_minute
        tone = (140 if who.gender == "female" else 80) + who.pitch
        command = ["flite", "-voice", voice, "--setf", f"duration_stretch={stretch:.2f}"]
        command += ["--setf", f"int_f0_target_mean={tone}", "-t", text, "-o", str(path)]
        subprocess.run(command, capture_output=True, check=True, timeout=60)
        return soundfile.read(path, dtype="float32")
