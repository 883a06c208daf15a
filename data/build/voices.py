"""French speech: espeak-ng's accents and variants, rooms and noise. Everything derives from a recording's own random
generator, so any order of work gives the same files."""

import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

ACCENTS = {"fr-fr": "France", "fr-be": "Belgique", "fr-ch": "Suisse"}
# Variants that no training or dev recording uses: both sexes, several synthesis models.
HELD_OUT = ("Andrea", "belinda", "f2", "klatt3", "m4", "m7", "Mike", "victor", "steph2")
# Whispers, croaks, robots and effects: not what a traveller sounds like.
_UNUSED = (
    "croak", "demonic", "whisper", "robo", "robot", "ricishay", "announcer", "fast", "zac", "sandro", "caleb", "iven",
    "mr ", "storm",
)  # fmt: skip
RATE = 22050


@dataclass(frozen=True)
class Speaker:
    """One espeak-ng voice."""

    accent: str
    variant: str
    gender: str

    @property
    def name(self) -> str:
        return f"espeak-{self.accent}-{self.variant}"


@cache
def variants() -> dict[str, str]:
    """Usable espeak-ng variants and their gender ("" where the variant does not say)."""
    version = subprocess.run(["espeak-ng", "--version"], capture_output=True, text=True, check=True).stdout
    folder = Path(version.partition("Data at:")[2].strip()) / "voices" / "!v"
    found = {}
    for path in sorted(folder.iterdir()):
        if not any(word in path.name.lower() for word in _UNUSED):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            genders = [line.split()[1].lower() for line in lines if line.startswith("gender ")]
            found[path.name] = genders[0] if genders else ""
    return found


def speaker(random: np.random.Generator, *, held_out: bool) -> Speaker:
    """A voice drawn from the held-out variants or from all others."""
    known = variants()
    names = [name for name in known if (name in HELD_OUT) == held_out]
    variant = names[int(random.integers(len(names)))]
    return Speaker(list(ACCENTS)[int(random.integers(len(ACCENTS)))], variant, known[variant])


def speak(text: str, voice: Speaker, words_per_minute: int, pitch: int) -> np.ndarray:
    """Speech of `text` at 22,050 Hz, (T,) float32 in [-1, 1]. Raises RuntimeError when nothing is heard."""
    samples = espeak(text, f"{voice.accent}+{voice.variant}", words_per_minute, pitch)
    if len(samples) < RATE // 10 or float(np.abs(samples).max()) < 1e-3:
        raise RuntimeError(f"espeak-ng gave no sound for {text!r} in voice {voice.name}")
    return samples


def espeak(text: str, voice: str, words_per_minute: int, pitch: int) -> np.ndarray:
    """What espeak-ng makes of `text` at 22,050 Hz, (T,) float32; `voice` is an accent+variant of its own."""
    command = ["espeak-ng", "-v", voice, "-s", str(words_per_minute), "-p", str(pitch), "--stdout", text]
    output = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
    start = output.find(b"data") + 8  # the header's sizes are unknown to a pipe
    body = output[start : start + (len(output) - start) // 2 * 2]
    return np.frombuffer(body, dtype="<i2").astype(np.float32) / 32768


def resample(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """From one rate to a lower one by cutting the spectrum (clips of a minute at most)."""
    if rate == wanted:
        return samples
    count = round(len(samples) * wanted / rate)
    spectrum = np.fft.rfft(samples)[: count // 2 + 1]
    return np.fft.irfft(spectrum, count) * (count / len(samples))


def _noise(samples: np.ndarray, random: np.random.Generator, rate: int) -> np.ndarray:
    """White, pink or brown noise, or the murmur of others (shifted, reversed copies of the speech itself)."""
    colour = int(random.integers(4))
    if colour == 3:
        return np.sum([np.roll(samples[::-1], int(random.integers(len(samples)))) for _ in range(5)], axis=0)
    white = random.standard_normal(len(samples))
    spectrum = np.fft.rfft(white)
    frequency = np.maximum(np.fft.rfftfreq(len(samples), 1 / rate), 20)
    return np.fft.irfft(spectrum / frequency ** (colour / 2), len(samples))


def _room(samples: np.ndarray, random: np.random.Generator, rate: int) -> np.ndarray:
    """Reverberation by decaying noise, RT60 0.1 to 0.5 s."""
    seconds = random.uniform(0.1, 0.5)
    steps = np.arange(int(seconds * rate))
    response = random.standard_normal(len(steps)) * 10 ** (-3 * steps / len(steps)) * random.uniform(0.02, 0.08)
    response[0] = 1.0
    size = 1 << (len(samples) + len(response)).bit_length()
    wet = np.fft.irfft(np.fft.rfft(samples, size) * np.fft.rfft(response, size), size)
    return wet[: len(samples) + len(response) // 2]


def place(samples: np.ndarray, random: np.random.Generator, rate: int) -> np.ndarray:
    """The room and the noise of a recording at `rate` Hz: most have neither."""
    if random.random() < 0.25:
        samples = _room(samples, random, rate)
    if random.random() < 0.35:
        noise = _noise(samples, random, rate)
        ratio = 10 ** (random.uniform(8, 30) / 20)
        samples = samples + noise * (np.sqrt(np.mean(samples**2)) / (np.sqrt(np.mean(noise**2)) * ratio))
    return samples


def record(text: str, random: np.random.Generator, *, held_out: bool) -> tuple[np.ndarray, Speaker]:
    """One recording of `text`: voice, rate, pitch, silence, room, noise and gain drawn from `random`."""
    voice = speaker(random, held_out=held_out)
    rate, pitch = int(random.integers(120, 201)), int(random.integers(20, 81))
    samples = speak(text, voice, rate, pitch)
    before, after = random.uniform(0, 0.4, size=2)
    samples = np.pad(samples, (int(before * RATE), int(after * RATE)))
    samples = place(samples, random, RATE)
    return (samples / np.abs(samples).max() * random.uniform(0.1, 0.95)).astype(np.float32), voice
