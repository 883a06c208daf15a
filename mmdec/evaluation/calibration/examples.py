"""Examples for fitting and measuring confidence: outputs for clean and noisy inputs, and for nonsense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmdec.audio import SAMPLE_RATE, load_audio
from mmdec.pipelines.confidence import Evidence
from mmdec.training.metrics.text import normalise_words, sentence_chrf, word_edits

LEVELS = (None, 20.0, 10.0, 5.0, 0.0)  # signal-to-noise ratios in dB; None: no noise is added
SEEDS = {"dev": 1, "test": 2}  # random seeds for noise and nonsense, by split
NONSENSE = ("white noise", "hum", "tones", "chirps", "other language")
# Kinds of nonsense for fitting a translator's confidence, and other kinds for testing it.
NO_SPEECH = {"dev": ("white noise", "hum", "tones"), "test": ("rumble", "chirps", "chords", "clicks", "silence")}
TELEPHONE = (300.0, 3400.0)  # range in Hz of the frequencies that a telephone line carries
# Distortions of recordings for a transcriber of all languages, in turn: (signal-to-noise ratio in dB, by telephone).
HEARD = ((None, False), (10.0, False), (None, True), (0.0, False), (20.0, False), (-5.0, False), (5.0, True))
MUSIC = {"dev": ("chords", "clicks"), "test": ("chords", "silence")}  # further nonsense for a transcriber
TURNED = 3  # every third recording of a transcriber is also played backwards
BACKWARDS = 8  # every eighth recording of a translator is also played backwards
# a translated sentence with a chrF score up to the first number counts as wrong, from the second on as right
WRONG, RIGHT = 45.0, 70.0
EMPTY = ("one colour", "white noise", "gradient", "blurred noise")  # pictures without content
SIDE = 128  # width and height of these pictures in pixels


@dataclass(frozen=True)
class Example:
    """One output of a model, its evidence, and how right it is.

    evidence: the measurements from which confidence is computed; empty if there was no output.
    right: 0 to 1: the share of right words or claims, or the score of a translation. Always 0 if the input was
        nonsense.
    """

    evidence: Evidence
    right: float
    kind: str  # the input's kind: a noise level, or a kind of nonsense

    @property
    def nonsense(self) -> bool:
        """Return whether the input was nonsense."""
        return not self.kind.startswith("speech") and not self.kind.startswith("picture")


def words_right(text: str, references: Sequence[str]) -> float:
    """Compute the share of right words: one minus the errors per word against the nearest reference, at least 0."""
    said = " ".join(normalise_words(text))
    best = 0.0
    for reference in references:
        words = " ".join(normalise_words(reference))
        best = max(best, 1 - word_edits(words, said).errors / max(len(words.split()), 1))
    return best


def rightness(text: str, references: Sequence[str]) -> float:
    """Score a translation: 0 if it is wrong (chrF of at most 45), 1 if it is right (at least 70), linear in between."""
    return min(max((sentence_chrf(text, references) - WRONG) / (RIGHT - WRONG), 0.0), 1.0)


def noisy(samples: np.ndarray, level: float | None, draw: np.random.Generator) -> np.ndarray:
    """Add noise to samples (T,) at a signal-to-noise ratio of `level` dB: white, or with a falling spectrum. None: add
    no noise."""
    if level is None:
        return samples
    noise = draw.normal(size=len(samples))
    if draw.random() < 0.5:
        noise = np.cumsum(noise)
        noise -= np.convolve(noise, np.ones(801) / 801, mode="same")
    power = float(np.mean(samples**2)) / 10 ** (level / 10)
    mixed = samples + noise * np.sqrt(power / max(float(np.mean(noise**2)), 1e-12))
    return (mixed / max(1.0, float(np.abs(mixed).max()))).astype(np.float32)


def nonsense(kind: str, draw: np.random.Generator) -> np.ndarray:
    """Generate a sound that is not speech, of a kind in `NO_SPEECH` or `MUSIC`: 1 to 5 seconds at 16 kHz."""
    size = int(draw.uniform(1, 5) * SAMPLE_RATE)
    sound = _no_speech(kind, size, draw) * draw.uniform(0.02, 0.5)
    return (sound / max(1.0, float(np.abs(sound).max()))).astype(np.float32)


def _no_speech(kind: str, size: int, draw: np.random.Generator) -> np.ndarray:
    """Generate a sound (size,) of a kind in `NO_SPEECH` or `MUSIC`, before its loudness is set."""
    time = np.arange(size) / SAMPLE_RATE
    if kind == "silence":  # faint noise, as in a quiet room
        return 1e-3 * draw.normal(size=size)
    if kind == "white noise":
        return draw.normal(size=size)
    if kind == "rumble":
        return np.convolve(np.cumsum(draw.normal(size=size)), [1, -0.999])[:size]
    if kind == "clicks":
        return (draw.random(size) < 1e-3) * draw.normal(size=size)
    if kind == "hum":
        waves = [np.sin(2 * np.pi * draw.choice((50, 60)) * n * time) / n for n in range(1, 8)]
        return sum(waves, 0.1 * draw.normal(size=size))
    if kind == "tones":
        notes = draw.uniform(200, 2000, size=int(draw.integers(2, 12)))
        return np.sin(2 * np.pi * np.repeat(notes, -(-size // len(notes)))[:size] * time)
    if kind == "chords":  # three notes at a time with harmonics that die away, four beats a second
        beats = -(-size * 4 // SAMPLE_RATE)
        notes = 220 * 2 ** (draw.integers(0, 24, (3, beats)) / 12)
        held = np.repeat(notes, SAMPLE_RATE // 4, axis=1)[:, :size]
        waves = [np.sin(2 * np.pi * n * held * time).sum(0) / n for n in range(1, 5)]
        return sum(waves, np.zeros(size)) * np.exp(-6 * (time % 0.25)) / 3
    sweep = np.sin(2 * np.pi * (200 + draw.uniform(100, 900) * time) * time)
    return sweep * (np.sin(2 * np.pi * 3 * time) > -0.3)


def empty_picture(kind: str, draw: np.random.Generator) -> np.ndarray:
    """Draw a picture of a kind in `EMPTY`, (128, 128, 3) uint8, with random colours, direction, contrast and blur."""
    shape = (SIDE, SIDE, 3)
    if kind == "one colour":
        return np.broadcast_to(draw.integers(0, 256, 3, dtype=np.uint8), shape).copy()
    if kind == "white noise":
        return draw.integers(0, 256, shape, dtype=np.uint8)
    if kind == "gradient":
        (down, across), (begin, end) = draw.normal(size=2), draw.integers(0, 256, (2, 3))
        ramp = down * np.arange(SIDE)[:, None] + across * np.arange(SIDE)
        share = (ramp - ramp.min()) / (ramp.max() - ramp.min())
        return (begin + (end - begin) * share[..., None]).round().astype(np.uint8)
    # standard deviation of the blur in pixels, and of the result in grey levels
    radius, contrast = draw.uniform(1, 8), draw.uniform(20, 60)
    waves = np.exp(-2 * (np.pi * radius * np.fft.fftfreq(SIDE)) ** 2)  # Fourier transform of the Gaussian
    noise = np.fft.fft2(draw.normal(size=shape), axes=(0, 1)) * (waves[:, None] * waves)[..., None]
    blurred = np.fft.ifft2(noise, axes=(0, 1)).real
    return (128 + contrast * blurred / blurred.std()).round().clip(0, 255).astype(np.uint8)


@dataclass(frozen=True)
class Sound:
    """A sound to decode. samples: (T,) at 16 kHz. references: right texts; () for nonsense. kind: noise level, or kind
    of nonsense."""

    samples: np.ndarray
    references: tuple[str, ...]
    kind: str


def sounds(own: Sequence[tuple[Path, tuple[str, ...]]], other: Sequence[Path], seed: int) -> list[Sound]:
    """Make the inputs for a transcriber of one language: each recording once, the levels of noise in turn; and half as
    many nonsense sounds, the kinds in turn.

    own: (file, right texts) of recordings. other: files of speech in another language. seed: random seed of the noise.
    """
    draw = np.random.default_rng(seed)
    recordings = []
    for index, (path, references) in enumerate(own):
        level = LEVELS[index % len(LEVELS)]
        kind = "speech" if level is None else f"speech at {level:g} dB"
        recordings.append(Sound(noisy(load_audio(path).numpy(), level, draw), references, kind))
    for index in range(len(own) // 2):
        kind = NONSENSE[index % len(NONSENSE)]
        foreign = kind == "other language"
        samples = load_audio(other[index % len(other)]).numpy() if foreign else nonsense(kind, draw)
        recordings.append(Sound(samples, (), kind))
    return recordings


def telephone(samples: np.ndarray) -> np.ndarray:
    """Remove from samples (T,) at 16 kHz the frequencies that a telephone line does not carry."""
    spectrum = np.fft.rfft(samples)
    frequencies = np.fft.rfftfreq(len(samples), 1 / SAMPLE_RATE)
    spectrum[(frequencies < TELEPHONE[0]) | (frequencies > TELEPHONE[1])] = 0
    return np.fft.irfft(spectrum, len(samples)).astype(np.float32)


def spoken_sounds(own: Sequence[tuple[Path, tuple[str, ...]]], split: str) -> list[Sound]:
    """Make the inputs for a transcriber of all languages: each recording once, most of them with noise or as by
    telephone; every third recording also backwards; and nonsense sounds.

    own: (file, right texts) of recordings. split: "dev", for the fit, or "test", with other kinds of nonsense.
    """
    draw = np.random.default_rng(SEEDS[split])
    recordings = []
    for index, (path, references) in enumerate(own):
        level, narrow = HEARD[index % len(HEARD)]
        kind = ("speech" if level is None else f"speech at {level:g} dB") + (" by telephone" if narrow else "")
        samples = load_audio(path).numpy()
        heard = noisy(telephone(samples) if narrow else samples, level, draw)
        recordings.append(Sound(heard, references, kind))
        if index % TURNED == 0:
            recordings.append(Sound(samples[::-1].copy(), (), "backwards"))
    kinds = (*NO_SPEECH[split], *MUSIC[split])
    for index in range(len(own) // 2):
        kind = kinds[index % len(kinds)]
        recordings.append(Sound(nonsense(kind, draw), (), kind))
    return recordings


def translator_sounds(
    own: Sequence[tuple[Path, tuple[str, ...]]],
    unseen: Sequence[tuple[Path, tuple[str, ...], str]],
    other: Sequence[tuple[Path, str]],
    split: str,
) -> list[Sound]:
    """Make the inputs for a translator of French: French speech, each recording with one level of noise, and sounds
    that are not French speech.

    own: (file, right translations) of recordings.
    unseen: (file, right translations, name of their kind) of recordings that get no noise.
    other: (file, name of its kind) of speech in other languages.
    split: "dev", for the fit, or "test", with other kinds of nonsense.
    """
    draw = np.random.default_rng(SEEDS[split])
    recordings = []
    for index, (path, references) in enumerate(own):
        level = LEVELS[index % len(LEVELS)]
        kind = "speech" if level is None else f"speech at {level:g} dB"
        samples = load_audio(path).numpy()
        recordings.append(Sound(noisy(samples, level, draw), references, kind))
        if split == "test" and index % BACKWARDS == 0:
            recordings.append(Sound(samples[::-1].copy(), (), "backwards"))
    recordings += [Sound(load_audio(path).numpy(), references, f"speech: {what}") for path, references, what in unseen]
    recordings += [Sound(load_audio(path).numpy(), (), f"other language: {what}") for path, what in other]
    kinds = NO_SPEECH[split]
    for index in range(len(own) // 4):
        kind = kinds[index % len(kinds)]
        recordings.append(Sound(nonsense(kind, draw), (), kind))
    return recordings
