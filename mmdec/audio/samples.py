"""Checks samples, scales and resamples them, and finds pauses (WebRTC's detector: extra `mmdec[vad]`)."""

import math
from importlib import import_module
from typing import Any

import numpy as np
import soxr
import torch
from torch import Tensor

from mmdec.audio.features import SAMPLE_RATE
from mmdec.checks.arguments import show
from mmdec.types import InputError

STEP = 160  # samples in 10 ms, the time resolution of pauses
MIN_RATE, MAX_RATE = 8_000, 192_000  # Hz
MAX_SECONDS = 3_600.0
MAX_PEAK = 2.0**31  # maximum absolute value: 32-bit integers may be stored as floats without scaling
ENERGY, WEBRTC = "energy", "webrtc"
FRAME = SAMPLE_RATE // 100  # samples in 10 ms, the shortest frame that WebRTC's detector accepts
AGGRESSIVENESS = 2  # 0 to 3: with a higher value, WebRTC's detector counts fewer frames as voice


def check_rate(rate: int, of: str = "") -> None:
    """Raise InputError for sample rates outside 8 to 192 kHz. of: text appended to the error, such as " in 'a.wav'"."""
    if isinstance(rate, bool) or not isinstance(rate, (int, np.integer)):
        raise InputError(f"`sample_rate` must be a whole number of Hz, but is {show(rate)}. Round it.")
    if rate < MIN_RATE:
        raise InputError(f"`sample_rate` must be at least {MIN_RATE} Hz, but is {rate}{of}. Resample the audio first.")
    if rate > MAX_RATE:
        raise InputError(f"`sample_rate` must be at most {MAX_RATE} Hz, but is {rate}{of}. Resample the audio first.")


def check_seconds(seconds: float) -> None:
    """Raise InputError for audio longer than an hour, because it is read whole."""
    if seconds > MAX_SECONDS:
        raise InputError(
            f"`audio` must last at most {MAX_SECONDS:.0f} seconds, but lasts {seconds:.0f}. Cut it into several files."
        )


def check_samples(samples: Tensor, of: str = "") -> None:
    """Raise InputError if samples (T,) are empty or not finite. of: as for `check_rate`."""
    if samples.numel() == 0:
        raise InputError(f"`audio` must hold at least one sample, but is empty{of}. Check the recording.")
    finite = torch.isfinite(samples)
    if not bool(finite.all()):
        count = int((~finite).sum())
        raise InputError(
            f"`audio` must hold finite numbers, but {count} of {samples.numel()} samples{of} are NaN or infinite. "
            "Replace them, with zeros for instance."
        )


def check_peak(peak: float, of: str = "") -> None:
    """Raise InputError for a peak above that of 32-bit integers stored as floats. of: as for `check_rate`."""
    if peak > MAX_PEAK:
        raise InputError(
            f"`audio` must hold samples of at most {MAX_PEAK:.3g}, but its peak is {peak:.3g}{of}. "
            "Scale it to full scale, which is 1."
        )


def full_scale(samples: Tensor) -> Tensor:
    """Scale samples (T,) to [-1, 1] if their peak is above 1, so that they do not clip."""
    return samples / samples.abs().max().clamp(min=1)


def resample(samples: Tensor, rate: int, new_rate: int = SAMPLE_RATE) -> Tensor:
    """Resample (..., T) from `rate` Hz to `new_rate` Hz without aliasing -> (..., ceil(T * new_rate / rate)).

    soxr is used in its high quality: the error of a 1 kHz tone is 130 dB below the tone, at all rates.
    """
    if rate == new_rate or samples.shape[-1] == 0:
        return samples
    rows = samples.detach().reshape(-1, samples.shape[-1])
    length = math.ceil(samples.shape[-1] * new_rate / rate)
    resampled = torch.from_numpy(soxr.resample(rows.T.cpu().float().numpy(), rate, new_rate)).T[:, :length]
    resampled = torch.nn.functional.pad(resampled, (0, length - resampled.shape[-1]))
    return resampled.reshape(*samples.shape[:-1], length).to(samples)


def split_at_pauses(
    samples: Tensor,
    max_seconds: float = 8.0,
    long_pause: float = 0.6,
    min_pause: float = 0.15,
    detector: str = "energy",
) -> list[tuple[int, int]]:
    """Cut 16 kHz samples (T,) into pieces of at most `max_seconds`.

    A pause of `long_pause` seconds always ends a piece, because another sentence begins after it. A piece that is still
    too long is cut in the middle of its longest pause (at least `min_pause` seconds), or at its quietest point if it
    has no pause; its parts are then cut in the same way.
    detector: what counts as a pause. "energy": 35 dB below the loud parts. "webrtc" (extra `mmdec[vad]`): where
        WebRTC's voice detector finds no voice; it also finds pauses with noise in them.
    Returns: [(start, end), ...] in samples, which cover every sample.
    """
    check_detector(detector)
    length = samples.shape[-1]
    level, quiet = _quiet_frames(samples)
    if detector == WEBRTC:
        quiet = ~voiced_frames(samples)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], quiet.astype(np.int8), [0]])))
    pauses = [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    pauses = [(a, b) for a, b in pauses if b - a >= min_pause * 100 and a > 0 and b < len(level)]

    pieces: list[tuple[int, int]] = []
    waiting = [(0, len(level))]  # in frames of 10 ms
    while waiting:
        start, end = waiting.pop()
        inside = [(b - a, (a + b) // 2) for a, b in pauses if start < a and b < end]
        pause, cut = max(inside, default=(0, 0))
        too_long = end - start > max_seconds * 100
        if not too_long and pause < long_pause * 100:
            pieces.append((start * STEP, min(end * STEP, length)))
            continue
        if not inside:
            margin = min(100, (end - start) // 4)  # no cut near the edges: the piece would be half a word
            cut = start + margin + int(np.argmin(level[start + margin : end - margin]))
        waiting += [(cut, end), (start, cut)]  # a stack: the left part comes next
    return pieces


def trim_silence(samples: Tensor, keep: float = 0.12) -> Tensor:
    """Remove the silence at both ends of 16 kHz samples (T,), except for `keep` seconds at each end."""
    loud = np.flatnonzero(~_quiet_frames(samples)[1])
    if len(loud) == 0:
        return samples
    margin = int(keep * SAMPLE_RATE)
    return samples[max(int(loud[0]) * STEP - margin, 0) : (int(loud[-1]) + 1) * STEP + margin]


def _quiet_frames(samples: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Samples (T,) -> the smoothed level of each 10 ms (N,), and whether it is 35 dB below the loud ones (N,)."""
    padded = torch.nn.functional.pad(samples, (0, -samples.shape[-1] % STEP))
    level = padded.reshape(-1, STEP).square().mean(dim=1).sqrt().cpu().numpy()
    level = np.convolve(level, np.full(5, 0.2), mode="same")[: len(level)]
    return level, level < max(float(np.quantile(level, 0.95)) * 10 ** (-35 / 20), 1e-4)


def check_detector(detector: object) -> None:
    """Raise InputError if the detector is unknown, or its package is not installed."""
    if not isinstance(detector, str) or detector not in (ENERGY, WEBRTC):
        raise InputError(f"`pauses` must be {ENERGY} or {WEBRTC}, but is {show(detector)}. Choose one.")
    if detector == WEBRTC:
        webrtc_package()


def voiced_frames(samples: Tensor) -> np.ndarray:
    """16 kHz samples (T,) -> whether each 10 ms contains a voice (N,), N = ceil(T / 160), by WebRTC's detector."""
    detector: Any = webrtc_package().Vad(AGGRESSIVENESS)
    padded = torch.nn.functional.pad(samples, (0, -samples.shape[-1] % FRAME))
    integers = (padded.clamp(-1, 1) * 32767).to(torch.int16).cpu().numpy().astype("<i2")
    return np.array([detector.is_speech(frame.tobytes(), SAMPLE_RATE) for frame in integers.reshape(-1, FRAME)], bool)


def webrtc_package() -> Any:
    """The package webrtcvad. Raises InputError if it is not installed."""
    try:
        return import_module("webrtcvad")
    except ImportError as error:
        raise InputError(
            f"`pauses` must be {ENERGY} without the package webrtcvad, but is {WEBRTC}. pip install mmdec[vad]"
        ) from error
