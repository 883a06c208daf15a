"""Augmentation of recorded speech: vocal tract length, speed, reverberation and noise. Samples at 16 kHz."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from mmdec.audio import SAMPLE_RATE

FRAME = 512
ENVELOPE = 32  # cepstral coefficients: the vocal tract, not the pitch
SIZES = 0.14  # the largest relative change of a voice's size
BANDS = (0.0, 200.0, 500.0, 1000.0, 2000.0, 4000.0, 8000.0)
UNEVEN = 4.0  # dB, of a microphone's response at each of them
MUFFLED = 0.2  # of the microphones hear nothing above some frequency
DULLEST = 2800.0  # Hz


@cache
def _smoothing() -> torch.Tensor:
    """(F, F): a frame's log spectrum -> its envelope, the part that the first cepstral coefficients hold."""
    cepstrum = torch.fft.irfft(torch.eye(FRAME // 2 + 1), FRAME, dim=0)
    cepstrum[ENVELOPE : 1 - ENVELOPE] = 0
    return torch.fft.rfft(cepstrum, FRAME, dim=0).real.contiguous()


def perturb_vocal_tract(sound: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """(T,) -> (T,): the resonances of a mouth of another size, at the same pitch, through an uneven microphone.

    T is at least 257. The spectral envelope, by its first cepstral coefficients, is read at stretched frequencies
    (vocal tract length perturbation: Jaitly and Hinton 2013, but with the pitch kept).
    """
    stretch = 1 + draw.uniform(-SIZES, SIZES)
    gains = draw.normal(0, UNEVEN, size=len(BANDS))
    edge = float(np.exp(draw.uniform(np.log(DULLEST), np.log(8000)))) if draw.random() < MUFFLED else 8000.0
    frequency = np.linspace(0, SAMPLE_RATE / 2, FRAME // 2 + 1)
    response = np.interp(frequency, BANDS, gains) - 0.02 * np.maximum(frequency - edge, 0)  # 2 dB each 100 Hz
    window = torch.hann_window(FRAME)
    spectrum = torch.stft(torch.from_numpy(sound), FRAME, FRAME // 2, window=window, return_complex=True)  # (F, N)
    level = (spectrum.abs() + 1e-5).log()
    sources = (torch.arange(len(frequency)) * stretch).clamp(max=len(frequency) - 1)
    below = sources.floor().long()
    part = (sources - below)[:, None]
    smooth = _smoothing()
    stretched = (1 - part) * smooth[below] + part * smooth[(below + 1).clamp(max=len(frequency) - 1)]
    change = (stretched - smooth) @ level + torch.from_numpy(response * np.log(10) / 20).float()[:, None]
    changed = spectrum * change.clamp(-7, 3).exp()
    return torch.istft(changed, FRAME, FRAME // 2, window=window, length=len(sound)).numpy()


def speed_perturb(samples: np.ndarray, pace: float) -> np.ndarray:
    """Speed and pitch times `pace`, by linear interpolation: what it adds lies 40 dB below speech."""
    count = round(len(samples) / pace)
    return np.interp(np.arange(count) * pace, np.arange(len(samples)), samples).astype(np.float32)


def coloured_noise(draw: np.random.Generator, count: int) -> np.ndarray:
    """White, pink or brown noise, or something between."""
    spectrum = np.fft.rfft(draw.standard_normal(count).astype(np.float32))
    frequency = np.maximum(np.fft.rfftfreq(count, 1 / SAMPLE_RATE), 20)
    noise = np.fft.irfft(spectrum / frequency ** (draw.uniform(0, 2) / 2), count)
    return (noise / max(float(np.abs(noise).max()), 1e-9)).astype(np.float32)


def babble_noise(sound: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Babble without words: four shifted copies of the reversed speech, summed. (T,) -> (T,)."""
    return np.sum([np.roll(sound[::-1], int(draw.integers(len(sound)))) for _ in range(4)], axis=0)


def reverberate(sound: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """Convolve with a room's impulse response: decaying noise, RT60 0.1 to 0.5 s. (T,) -> (T,)."""
    count = int(draw.uniform(0.1, 0.5) * SAMPLE_RATE)
    response = draw.standard_normal(count) * 10 ** (-3 * np.arange(count) / count) * draw.uniform(0.02, 0.08)
    response[0] = 1.0
    size = 1 << (len(sound) + count).bit_length()
    return np.fft.irfft(np.fft.rfft(sound, size) * np.fft.rfft(response, size), size)[: len(sound)].astype(np.float32)
