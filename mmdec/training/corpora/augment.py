"""Augmentation of recorded speech: vocal tract length, speed, reverberation and noise. All samples are at 16 kHz.

Speed and coloured noise use the package audiomentations (extra `mmdec[train]`). All randomness comes from the generator
that the caller passes as `draw`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from threading import RLock
from typing import Any

import numpy as np
import torch

from mmdec.errors import InputError
from mmdec.io.audio import SAMPLE_RATE

FRAME = 512
ENVELOPE = 32  # cepstral coefficients in the spectral envelope: enough for the vocal tract, too few for the pitch
SIZES = 0.14  # largest relative change of the vocal tract length
# Hz: a microphone's gain is drawn at random for each of these frequencies, and interpolated between them
BANDS = (0.0, 200.0, 500.0, 1000.0, 2000.0, 4000.0, 8000.0)
UNEVEN = 4.0  # dB: standard deviation of these random gains
MUFFLED = 0.2  # share of the microphones that attenuate all frequencies above a limit
DULLEST = 2800.0  # Hz: the lowest limit above which such a microphone attenuates
BROWN = 20 * float(np.log10(2))  # dB by which brown noise falls in an octave
COLOUR_FFT = 2048  # FFT size for coloured noise; a small one, as the default 128, gives a wrong spectral slope

_lock = RLock()


@cache
def _smoothing() -> torch.Tensor:
    """Return the matrix (F, F) that maps a log spectrum of F bins to its envelope.

    It keeps the first cepstral coefficients.
    """
    cepstrum = torch.fft.irfft(torch.eye(FRAME // 2 + 1), FRAME, dim=0)
    cepstrum[ENVELOPE : 1 - ENVELOPE] = 0
    return torch.fft.rfft(cepstrum, FRAME, dim=0).real.contiguous()


def perturb_vocal_tract(sound: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Change the vocal tract length, but not the pitch, and apply a random microphone response.

    (T,) -> (T,), T at least 257.

    The spectral envelope is resampled at stretched frequencies. This is vocal tract length perturbation (Jaitly and
    Hinton 2013), except that the pitch stays.
    """
    stretch = 1 + draw.uniform(-SIZES, SIZES)
    gains = draw.normal(0, UNEVEN, size=len(BANDS))
    edge = float(np.exp(draw.uniform(np.log(DULLEST), np.log(8000)))) if draw.random() < MUFFLED else 8000.0
    frequency = np.linspace(0, SAMPLE_RATE / 2, FRAME // 2 + 1)
    # above the limit the gain falls by 2 dB per 100 Hz
    response = np.interp(frequency, BANDS, gains) - 0.02 * np.maximum(frequency - edge, 0)
    window = torch.hann_window(FRAME)
    spectrum = torch.stft(torch.from_numpy(sound), FRAME, FRAME // 2, window=window, return_complex=True)  # (bins, N)
    level = (spectrum.abs() + 1e-5).log()
    sources = (torch.arange(len(frequency)) * stretch).clamp(max=len(frequency) - 1)
    below = sources.floor().long()
    part = (sources - below)[:, None]
    smooth = _smoothing()
    stretched = (1 - part) * smooth[below] + part * smooth[(below + 1).clamp(max=len(frequency) - 1)]
    change = (stretched - smooth) @ level + torch.from_numpy(response * np.log(10) / 20).float()[:, None]
    changed = spectrum * change.clamp(-7, 3).exp()
    return torch.istft(changed, FRAME, FRAME // 2, window=window, length=len(sound)).numpy()


@cache
def _audiomentations() -> Any:
    """Import audiomentations. The import takes a second, so it is done at the first use."""
    try:
        return import_module("audiomentations")
    except ImportError as error:
        raise InputError(
            "Augmentation of speech needs audiomentations, which is not installed. Run `pip install 'mmdec[train]'`."
        ) from error


@contextmanager
def _global_seed(seed: int) -> Iterator[None]:
    """Seed Python's and NumPy's global random generators within the `with` block.

    audiomentations uses no other generators. After the block their states are restored. Only one thread at a time may
    be in such a block. Other threads that use these generators meanwhile get numbers that depend on `seed`.
    """
    with _lock:
        before, before_numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 # audiomentations uses this
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 # the same
        try:
            yield
        finally:
            random.setstate(before)
            np.random.set_state(before_numpy)  # noqa: NPY002 # the same


def speed_perturb(samples: np.ndarray, pace: float) -> np.ndarray:
    """Multiply speed and pitch by `pace`: samples (T,) -> (about T / pace,).

    `pace` is rounded so that 16 kHz / pace is a whole number.
    """
    rate = round(SAMPLE_RATE / pace)
    if rate == SAMPLE_RATE:
        return samples
    with _global_seed(0):  # audiomentations draws a random number even if there is only one rate
        return _audiomentations().Resample(rate, rate, p=1.0)(samples, SAMPLE_RATE)


def add_coloured_noise(sound: np.ndarray, ratio: float, draw: np.random.Generator) -> np.ndarray:
    """Add noise of a random colour between white and brown. (T,) -> (T,).

    Args:
        ratio: Signal-to-noise ratio in dB.
    """
    decay = -draw.uniform(0, BROWN)
    with _global_seed(int(draw.integers(2**32))):
        noisy = _audiomentations().AddColorNoise(ratio, ratio, decay, decay, p=1.0, n_fft=COLOUR_FFT)
        return noisy(sound, SAMPLE_RATE)


def coloured_noise(draw: np.random.Generator, count: int) -> np.ndarray:
    """Make `count` samples of noise without speech, (count,), from -1 to 1.

    audiomentations can only add noise to a sound, so the noise is added to a constant, which is then subtracted.
    """
    constant = np.ones(count, np.float32)
    noise = add_coloured_noise(constant, 0.0, draw) - constant
    return noise / max(float(np.abs(noise).max()), 1e-9)


def add_babble(sound: np.ndarray, ratio: float, draw: np.random.Generator) -> np.ndarray:
    """Add babble without words: four shifted copies of the reversed speech. (T,) -> (T,).

    audiomentations is not used, because it needs recordings of noise, which corpora of speech lack.

    Args:
        ratio: Signal-to-noise ratio in dB.
    """
    babble = np.sum([np.roll(sound[::-1], int(draw.integers(len(sound)))) for _ in range(4)], axis=0)
    level = np.sqrt(np.mean(sound**2) / max(np.mean(babble**2), 1e-12)) * 10 ** (-ratio / 20)
    return sound + babble * np.float32(level)


def reverberate(sound: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Add a room's reverberation: convolve the sound with decaying noise, RT60 0.1 to 0.5 s. (T,) -> (T,).

    audiomentations is not used: it uses pyroomacoustics, whose result depends on the number of threads.
    """
    count = int(draw.uniform(0.1, 0.5) * SAMPLE_RATE)
    response = draw.standard_normal(count) * 10 ** (-3 * np.arange(count) / count) * draw.uniform(0.02, 0.08)
    response[0] = 1.0
    size = 1 << (len(sound) + count).bit_length()
    return np.fft.irfft(np.fft.rfft(sound, size) * np.fft.rfft(response, size), size)[: len(sound)].astype(np.float32)


def limit_to_telephone_band(sound: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Limit a sound to a telephone's frequency band, with soft edges. (T,) -> (T,).

    The lower edge is drawn from 200 to 350 Hz, the upper edge from 3,000 to 3,800 Hz.
    """
    low, high = draw.uniform(200, 350), draw.uniform(3000, 3800)
    frequency = np.fft.rfftfreq(len(sound), 1 / SAMPLE_RATE)
    gain = 1 / np.sqrt(1 + (low / np.maximum(frequency, 1)) ** 8) / np.sqrt(1 + (frequency / high) ** 16)
    return np.fft.irfft(np.fft.rfft(sound) * gain, len(sound)).astype(np.float32)
