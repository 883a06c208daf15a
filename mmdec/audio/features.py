"""Features of sound that networks read and predict, on their frame grids.

Source features are Kaldi's 80 filterbanks (25 ms window, 10 ms hop), normalised per utterance. All target features have
the same frame grid: 16 kHz, window and FFT 1024, hop 256, centred, so T samples give 1 + T // 256 frames.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.audio_utils import mel_filter_bank, window_function

SAMPLE_RATE = 16_000  # Hz, for all networks of mmdec
HOP = 256  # samples between target frames
WINDOW = 1024  # samples in a target frame
MELS = 80
LOG_FLOOR = 1e-5
MOMENTUM = 0.99  # momentum of fast Griffin-Lim
_KALDI_FLOOR = float(np.finfo(np.float32).eps)  # minimum energy of a filter, before the logarithm


def fbank(samples: Tensor) -> Tensor:
    """16 kHz samples (T,) to the encoder's features (N, 80): Kaldi filterbanks, mean 0 and variance 1 per utterance.

    Fewer samples than one 25 ms window (400) are padded with zeros to one frame. transformers' own spectrogram gives
    the same features in four times the time (14.3 ms for 10 s of sound, 3.7 ms here); that is 3 % of a short
    translation.
    """
    if samples.shape[-1] < 400:
        samples = torch.nn.functional.pad(samples, (0, 400 - samples.shape[-1]))
    window, filters = _kaldi(samples.device)
    frames = (samples * 32768.0).unfold(0, 400, 160)
    frames = frames - frames.mean(1, keepdim=True)
    frames = frames - 0.97 * torch.cat([frames[:, :1], frames[:, :-1]], 1)
    power = torch.fft.rfft(frames * window, n=512).abs().square()  # (N, 257)
    features = (power @ filters).clamp(min=_KALDI_FLOOR).log()
    spread, mean = torch.std_mean(features, dim=0, correction=0)
    return (features - mean) / spread.clamp(min=1e-5)  # (N, 80)


def magnitudes(samples: Tensor) -> Tensor:
    """16 kHz samples (..., T) to the magnitudes (..., 513, F) of the target frame grid. Differentiable."""
    spectrum = torch.stft(
        samples, WINDOW, HOP, window=_window(samples.device), center=True, pad_mode="constant", return_complex=True
    )
    return (spectrum.real.square() + spectrum.imag.square() + 1e-9).sqrt()  # the floor keeps the gradient finite at 0


def log_mel(samples: Tensor) -> Tensor:
    """16 kHz samples (..., T) to the target features (..., F, 80): natural log of mel magnitudes. Differentiable."""
    mel = magnitudes(samples).transpose(-1, -2) @ _mel_filters(samples.device)  # (..., F, 80)
    return mel.clamp(min=LOG_FLOOR).log()


def energy(samples: Tensor) -> Tensor:
    """16 kHz samples (..., T) to (..., F): the L2 norm of each frame's magnitudes, as in FastSpeech 2."""
    return magnitudes(samples).square().sum(dim=-2).sqrt()


def pitch(samples: Tensor, low: float = 60.0, high: float = 400.0, threshold: float = 0.2) -> Tensor:
    """16 kHz samples (T,) to (F,): the fundamental in Hz on the target frame grid, 0 where the frame is unvoiced.

    YIN (de Cheveigne and Kawahara, 2002): the first dip of the cumulative mean normalised difference below
    `threshold`, refined by a parabola. `low` and `high` bound the search in Hz.
    """
    padded = torch.nn.functional.pad(samples, (WINDOW // 2, WINDOW // 2))
    frames = padded.unfold(0, WINDOW, HOP)  # (F, 1024)
    width = WINDOW // 2
    lags = min(math.ceil(SAMPLE_RATE / low) + 2, width)
    head = torch.fft.rfft(frames[:, :width], n=WINDOW)
    correlation = torch.fft.irfft(torch.fft.rfft(frames, n=WINDOW) * head.conj(), n=WINDOW)[:, :lags]  # no wrap < 512
    total = torch.nn.functional.pad(frames.square().cumsum(dim=1), (1, 0))
    power = total[:, width : width + lags] - total[:, :lags]  # (F, lags), of each shifted window
    difference = (power[:, :1] + power - 2 * correlation).clamp(min=0)
    steps = torch.arange(1, lags, device=samples.device)
    mean = difference[:, 1:].cumsum(dim=1) / steps
    dip = torch.cat([torch.ones_like(mean[:, :1]), difference[:, 1:] / mean.clamp(min=1e-9)], dim=1)  # (F, lags)

    first = math.floor(SAMPLE_RATE / high)
    inner = dip[:, first : lags - 1]
    bottom = (inner <= dip[:, first - 1 : lags - 2]) & (inner < dip[:, first + 1 : lags]) & (inner < threshold)
    voiced = bottom.any(dim=1) & (power[:, 0] > 1e-4 * width * 1e-2)  # quieter than -60 dB is silence
    lag = bottom.int().argmax(dim=1) + first
    left, middle, right = (dip.gather(1, (lag + shift)[:, None])[:, 0] for shift in (-1, 0, 1))
    curve = (left - 2 * middle + right).clamp(min=1e-9)
    refined = lag + (0.5 * (left - right) / curve).clamp(-1, 1)
    return torch.where(voiced, SAMPLE_RATE / refined, 0.0)


def griffin_lim(mel: Tensor, iterations: int = 32) -> Tensor:
    """Log mel (F, 80) to samples (F * 256,) without trained weights: used if there is no trained vocoder.

    Source: Perraudin et al., "A fast Griffin-Lim algorithm", 2013.
    """
    filters = _mel_filters(mel.device)  # (513, 80)
    power = (mel.exp() @ torch.linalg.pinv(filters)).clamp(min=0).T  # (513, F)
    frame: dict[str, Any] = {"n_fft": WINDOW, "hop_length": HOP, "window": _window(mel.device)}
    phases = torch.ones_like(power, dtype=torch.complex64)
    before = torch.zeros_like(phases)
    for _ in range(iterations):
        heard = torch.istft(power * phases, **frame, length=(mel.shape[0] - 1) * HOP)
        rebuilt = torch.stft(heard, **frame, return_complex=True)
        step = rebuilt - MOMENTUM / (1 + MOMENTUM) * before
        phases, before = step / step.abs().clamp(min=1e-16), rebuilt
    samples = torch.istft(power * phases, **frame, length=(mel.shape[0] - 1) * HOP)
    return torch.nn.functional.pad(samples, (0, HOP))


@lru_cache(maxsize=8)
def _window(device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a window made while decoding must also work in training
        return torch.hann_window(WINDOW, device=device)


@lru_cache(maxsize=8)
def _mel_filters(device: torch.device) -> Tensor:  # (513, 80)
    with torch.inference_mode(False):
        filters = mel_filter_bank(WINDOW // 2 + 1, MELS, 20.0, 8000.0, SAMPLE_RATE, norm="slaney", mel_scale="slaney")
        return torch.from_numpy(filters).float().to(device)


@lru_cache(maxsize=8)
def _kaldi(device: torch.device) -> tuple[Tensor, Tensor]:
    """Povey's window (400,), and the filters (257, 80) of 20 to 8000 Hz."""
    filters = mel_filter_bank(257, MELS, 20.0, 8000.0, SAMPLE_RATE, mel_scale="kaldi", triangularize_in_mel_space=True)
    with torch.inference_mode(False):
        window = window_function(400, "povey", periodic=False)
        return torch.from_numpy(window).float().to(device), torch.from_numpy(filters).float().to(device)
