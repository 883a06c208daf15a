"""Checks, scales and resamples audio samples, finds pauses, and computes features.

The translator's encoder reads Kaldi's 80 log-mel filterbanks (25 ms window, 10 ms hop), normalised per utterance.
Features of the target (the translated speech) use another frame grid: 16 kHz, window and FFT size 1024, hop 256,
centred, so T samples give 1 + T // 256 frames.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import soxr
import torch
from torch import Tensor
from transformers.audio_utils import mel_filter_bank, window_function

from mmdec.checks.arguments import format_value
from mmdec.errors import InputError

SAMPLE_RATE = 16_000  # sample rate in Hz of the audio that all networks of mmdec read
HOP = 256  # hop of the spectrogram of the translated speech, in samples
WINDOW = 1024  # window and FFT size of that spectrogram, in samples
MELS = 80  # number of mel bands
LOG_FLOOR = 1e-5  # minimum mel magnitude: smaller ones are raised to it before the logarithm
# a frame counts as voiced if YIN finds a fundamental below 400 Hz whose normalised difference is at most 0.2
MAX_PITCH, MAX_YIN_DIFFERENCE = 400.0, 0.2
# minimum filter energy: smaller ones are raised to it before the logarithm
_KALDI_FLOOR = float(np.finfo(np.float32).eps)


def fbank(samples: Tensor) -> Tensor:
    """Compute the encoder's features (N, 80) of 16 kHz samples (T,): Kaldi filterbanks, normalised per utterance.

    Fewer samples than one 25 ms window (400) are padded with zeros to one frame. transformers' own spectrogram would
    give the same features, but takes four times as long (14.3 ms instead of 3.7 ms for 10 s of sound).
    """
    if samples.shape[-1] < 400:
        samples = torch.nn.functional.pad(samples, (0, 400 - samples.shape[-1]))
    window, filters = _kaldi(samples.device)
    frames = (samples * 32768.0).unfold(0, 400, 160)
    frames = frames - frames.mean(1, keepdim=True)
    frames = frames - 0.97 * torch.cat([frames[:, :1], frames[:, :-1]], 1)
    power = torch.fft.rfft(frames * window, n=512).abs().square()  # shape (N, 257)
    features = (power @ filters).clamp(min=_KALDI_FLOOR).log()
    spread, mean = torch.std_mean(features, dim=0, correction=0)
    return (features - mean) / spread.clamp(min=1e-5)  # shape (N, 80)


def magnitudes(samples: Tensor) -> Tensor:
    """Compute the STFT magnitudes (..., 513, F) of 16 kHz samples (..., T). Differentiable.

    The frame grid is the target's: window 1024, hop 256.
    """
    spectrum = torch.stft(
        samples, WINDOW, HOP, window=_window(samples.device), center=True, pad_mode="constant", return_complex=True
    )
    # 1e-9 is added, because the gradient of a root is infinite at 0
    return (spectrum.real.square() + spectrum.imag.square() + 1e-9).sqrt()


def log_mel(samples: Tensor) -> Tensor:
    """Compute the log-mel features (..., F, 80) of the target from 16 kHz samples (..., T). Differentiable.

    They are natural logarithms of mel magnitudes.
    """
    mel = magnitudes(samples).transpose(-1, -2) @ _mel_filters(samples.device)  # shape (..., F, 80)
    return mel.clamp(min=LOG_FLOOR).log()


def energy(samples: Tensor) -> Tensor:
    """Compute each frame's energy as in FastSpeech 2: the L2 norm (..., F) of its STFT magnitudes, linear.

    Args:
        samples: (..., T) at 16 kHz.
    """
    return magnitudes(samples).square().sum(dim=-2).sqrt()


def pitch(samples: Tensor, low: float = 60.0) -> Tensor:
    """Compute the fundamental frequency (F,) in Hz of 16 kHz samples (T,); 0 for an unvoiced frame.

    There is one value for each frame of the target's grid.

    Args:
        low: Lowest frequency in Hz that is searched; the highest is `MAX_PITCH`.

    References:
        YIN (de Cheveigne and Kawahara, 2002): the first local minimum of the cumulative mean normalised difference that
        is below `MAX_YIN_DIFFERENCE`, refined by a parabola.
    """
    padded = torch.nn.functional.pad(samples, (WINDOW // 2, WINDOW // 2))
    frames = padded.unfold(0, WINDOW, HOP)  # shape (F, 1024)
    width = WINDOW // 2
    lags = min(math.ceil(SAMPLE_RATE / low) + 2, width)
    head = torch.fft.rfft(frames[:, :width], n=WINDOW)
    # the lags are below 512, so that the circular correlation does not wrap around
    correlation = torch.fft.irfft(torch.fft.rfft(frames, n=WINDOW) * head.conj(), n=WINDOW)[:, :lags]
    total = torch.nn.functional.pad(frames.square().cumsum(dim=1), (1, 0))
    power = total[:, width : width + lags] - total[:, :lags]  # (F, lags), energy of each shifted window
    difference = (power[:, :1] + power - 2 * correlation).clamp(min=0)
    steps = torch.arange(1, lags, device=samples.device)
    mean = difference[:, 1:].cumsum(dim=1) / steps
    dip = torch.cat([torch.ones_like(mean[:, :1]), difference[:, 1:] / mean.clamp(min=1e-9)], dim=1)  # shape (F, lags)

    first = math.floor(SAMPLE_RATE / MAX_PITCH)
    inner = dip[:, first : lags - 1]
    bottom = (inner <= dip[:, first - 1 : lags - 2]) & (inner < dip[:, first + 1 : lags]) & (inner < MAX_YIN_DIFFERENCE)
    voiced = bottom.any(dim=1) & (power[:, 0] > 1e-4 * width * 1e-2)  # frames quieter than -60 dB count as silent
    lag = bottom.int().argmax(dim=1) + first
    left, middle, right = (dip.gather(1, (lag + shift)[:, None])[:, 0] for shift in (-1, 0, 1))
    curve = (left - 2 * middle + right).clamp(min=1e-9)
    refined = lag + (0.5 * (left - right) / curve).clamp(-1, 1)
    return torch.where(voiced, SAMPLE_RATE / refined, 0.0)


@lru_cache(maxsize=8)
def _window(device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # no inference tensor, because the cached window is used in training, too
        return torch.hann_window(WINDOW, device=device)


@lru_cache(maxsize=8)
def _mel_filters(device: torch.device) -> Tensor:  # (513, 80)
    with torch.inference_mode(False):
        filters = mel_filter_bank(WINDOW // 2 + 1, MELS, 20.0, 8000.0, SAMPLE_RATE, norm="slaney", mel_scale="slaney")
        return torch.from_numpy(filters).float().to(device)


@lru_cache(maxsize=8)
def _kaldi(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return Povey's window (400,) and Kaldi's mel filters (257, 80) from 20 to 8000 Hz."""
    filters = mel_filter_bank(257, MELS, 20.0, 8000.0, SAMPLE_RATE, mel_scale="kaldi", triangularize_in_mel_space=True)
    with torch.inference_mode(False):
        window = window_function(400, "povey", periodic=False)
        return torch.from_numpy(window).float().to(device), torch.from_numpy(filters).float().to(device)


SHORTEST_PAUSE = 0.15  # minimum seconds of a pause; a shorter silence may be inside a word
KEPT_SILENCE_SECONDS = 0.12  # seconds of silence that `trim_silence` leaves at each end
STEP_SAMPLES = 160  # number of samples in 10 ms, the time resolution with which pauses are found
MIN_RATE, MAX_RATE = 8_000, 192_000  # sample rates in Hz that are accepted
MAX_SECONDS = 3_600.0
# maximum absolute sample value that is accepted: some files hold 32-bit integers as floats, without scaling
MAX_PEAK = 2.0**31
SILENCE = 5e-4  # a recording with a lower peak is silent if it is all noise; 1 is full scale, so this is -66 dB
# a recording with a lower peak is silent in any case: four steps of 16 bits (-78 dB), less is rounding
INAUDIBLE = 4 / 32768
STANDING_OUT = 2.5  # level of a frame that stands out from the noise, as a factor on the level of the noise
SHORTEST_SOUND = 0.15  # minimum seconds that stand out; less is a click


def check_rate(rate: int, in_source: str = "") -> None:
    """Raise InputError for sample rates outside 8 to 192 kHz.

    Args:
        in_source: Text appended to the error, such as " in 'a.wav'".
    """
    if isinstance(rate, bool) or not isinstance(rate, (int, np.integer)):
        raise InputError(f"`sample_rate` must be a whole number of Hz, but is {format_value(rate)}. Round it.")
    if rate < MIN_RATE:
        raise InputError(
            f"`sample_rate` must be at least {MIN_RATE} Hz, but is {rate}{in_source}. Resample the audio first."
        )
    if rate > MAX_RATE:
        raise InputError(
            f"`sample_rate` must be at most {MAX_RATE} Hz, but is {rate}{in_source}. Resample the audio first."
        )


def check_seconds(seconds: float) -> None:
    """Raise InputError for audio longer than an hour, because it is read whole."""
    if seconds > MAX_SECONDS:
        raise InputError(
            f"`audio` must last at most {MAX_SECONDS:.0f} seconds, but lasts {seconds:.0f}. Cut it into several files."
        )


def check_samples(samples: Tensor, in_source: str = "") -> None:
    """Raise InputError if samples (T,) are empty or not finite.

    Args:
        in_source: Text appended to the error.
    """
    if samples.numel() == 0:
        raise InputError(f"`audio` must hold at least one sample, but is empty{in_source}. Check the recording.")
    finite = torch.isfinite(samples)
    if not bool(finite.all()):
        count = int((~finite).sum())
        raise InputError(
            f"`audio` must hold finite numbers, but {count} of {samples.numel()} samples{in_source} are NaN or "
            "infinite. Replace them, with zeros for instance."
        )


def check_peak(peak: float, in_source: str = "") -> None:
    """Raise InputError if the largest absolute sample exceeds `MAX_PEAK`, the maximum of 32-bit integers.

    Args:
        in_source: Text appended to the error, such as " in 'a.wav'".
    """
    if peak > MAX_PEAK:
        raise InputError(
            f"`audio` must hold samples of at most {MAX_PEAK:.3g}, but its peak is {peak:.3g}{in_source}. "
            "Scale it to full scale, which is 1."
        )


def full_scale(samples: Tensor) -> Tensor:
    """Scale samples (T,) to [-1, 1] if their peak is above 1, so that they do not clip."""
    return samples / samples.abs().max().clamp(min=1)


def resample(samples: Tensor, rate: int, new_rate: int = SAMPLE_RATE) -> Tensor:
    """Resample (..., T) from `rate` Hz to `new_rate` Hz without aliasing.

    soxr is used in its high quality: the error of a 1 kHz tone is 130 dB below the tone, at all rates.

    Returns:
        (..., ceil(T * new_rate / rate)).
    """
    if rate == new_rate or samples.shape[-1] == 0:
        return samples
    rows = samples.detach().reshape(-1, samples.shape[-1])
    length = math.ceil(samples.shape[-1] * new_rate / rate)
    resampled = torch.from_numpy(soxr.resample(rows.T.cpu().float().numpy(), rate, new_rate)).T[:, :length]
    resampled = torch.nn.functional.pad(resampled, (0, length - resampled.shape[-1]))
    return resampled.reshape(*samples.shape[:-1], length).to(samples)


def stands_out(samples: Tensor) -> bool:
    """Return whether something in 16 kHz samples (T,) is clearly louder than their noise, for longer than a click.

    The noise is the level below which a tenth of the frames of 20 ms lie, digital silence left out.
    """
    frames = torch.nn.functional.pad(samples, (0, -len(samples) % (2 * STEP_SAMPLES))).reshape(-1, 2 * STEP_SAMPLES)
    # the mean of each frame is subtracted, because a microphone may add a constant, or a rumble
    level = frames.std(dim=1, correction=0).cpu().numpy()
    level = level[level > 1e-7]
    if not len(level):
        return False
    return int((level >= STANDING_OUT * np.quantile(level, 0.1)).sum()) >= SHORTEST_SOUND * 50


def only_clicks(samples: Tensor) -> bool:
    """Return whether 16 kHz samples (T,) hold no sound but clicks.

    Such samples reach `SILENCE` for less than `SHORTEST_SOUND` in all, and for less than half of the recording.
    """
    centred = torch.nn.functional.pad((samples - samples.mean()).abs(), (0, -len(samples) % (2 * STEP_SAMPLES)))
    frames = centred.reshape(-1, 2 * STEP_SAMPLES).amax(dim=1) >= SILENCE
    return int(frames.sum()) < min(SHORTEST_SOUND * 50, len(frames) / 2)


def split_at_pauses(samples: Tensor, max_seconds: float = 8.0, long_pause: float = 0.6) -> list[tuple[int, int]]:
    """Cut 16 kHz samples (T,) into pieces of at most `max_seconds`.

    A pause is 35 dB below the loud parts.

    A pause of `long_pause` seconds always ends a piece, because another sentence begins after it. A piece that is still
    too long is cut in the middle of its longest pause (of at least `SHORTEST_PAUSE` seconds), or at its quietest point
    if it has no pause; its parts are then cut in the same way.

    Returns:
        [(start, end), ...] in samples, which cover every sample.
    """
    length = samples.shape[-1]
    level, quiet = _quiet_frames(samples)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], quiet.astype(np.int8), [0]])))
    pauses = [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    pauses = [(a, b) for a, b in pauses if b - a >= SHORTEST_PAUSE * 100 and a > 0 and b < len(level)]

    pieces: list[tuple[int, int]] = []
    waiting = [(0, len(level))]  # pieces that may still be too long, each as (first frame, end frame), frames of 10 ms
    while waiting:
        start, end = waiting.pop()
        inside = [(b - a, (a + b) // 2) for a, b in pauses if start < a and b < end]
        pause, cut = max(inside, default=(0, 0))
        too_long = end - start > max_seconds * 100
        if not too_long and pause < long_pause * 100:
            pieces.append((start * STEP_SAMPLES, min(end * STEP_SAMPLES, length)))
            continue
        if not inside:
            # the cut keeps this many frames away from both ends, because a very short piece would be half a word
            margin = min(100, (end - start) // 4)
            cut = start + margin + int(np.argmin(level[start + margin : end - margin]))
        waiting += [(cut, end), (start, cut)]  # a stack: the left half is cut next, so that pieces come in order
    return pieces


def trim_silence(samples: Tensor) -> Tensor:
    """Remove the silence at both ends of 16 kHz samples (T,), except for `KEPT_SILENCE_SECONDS` seconds at each end."""
    loud = np.flatnonzero(~_quiet_frames(samples)[1])
    if len(loud) == 0:
        return samples
    margin = int(KEPT_SILENCE_SECONDS * SAMPLE_RATE)
    return samples[max(int(loud[0]) * STEP_SAMPLES - margin, 0) : (int(loud[-1]) + 1) * STEP_SAMPLES + margin]


def _quiet_frames(samples: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return for each 10 ms of samples (T,) the smoothed level (N,), and whether it is quiet (N,) bool.

    A frame is quiet if it is at least 35 dB below the loud frames.
    """
    padded = torch.nn.functional.pad(samples, (0, -samples.shape[-1] % STEP_SAMPLES))
    level = padded.reshape(-1, STEP_SAMPLES).square().mean(dim=1).sqrt().cpu().numpy()
    level = np.convolve(level, np.full(5, 0.2), mode="same")[: len(level)]
    loud = float(np.quantile(level, 0.95))
    floor = 1e-4 if float(samples.abs().max()) >= SILENCE else 0.1 * loud
    return level, level < max(loud * 10 ** (-35 / 20), floor)
