"""Where somebody speaks, as WebRTC's detector hears it (extra `mmdec[vad]`)."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmdec.audio.features import SAMPLE_RATE
from mmdec.checks.arguments import show
from mmdec.types import InputError

ENERGY, WEBRTC = "energy", "webrtc"
FRAME = SAMPLE_RATE // 100  # samples in 10 ms, the shortest frame that the detector takes
AGGRESSIVENESS = 2  # 0 to 3: how readily a frame counts as no voice


def check_detector(detector: object) -> None:
    """Refuse what is no detector, and one whose package is not installed."""
    if not isinstance(detector, str) or detector not in (ENERGY, WEBRTC):
        raise InputError(f"`pauses` must be {ENERGY} or {WEBRTC}, but is {show(detector)}. Choose one.")
    if detector == WEBRTC:
        _package()


def voiced_frames(samples: Tensor) -> np.ndarray:
    """16 kHz samples (T,) -> whether each 10 ms holds a voice (N,), N = ceil(T / 160)."""
    detector: Any = _package().Vad(AGGRESSIVENESS)
    padded = torch.nn.functional.pad(samples, (0, -samples.shape[-1] % FRAME))
    integers = (padded.clamp(-1, 1) * 32767).to(torch.int16).cpu().numpy().astype("<i2")
    return np.array([detector.is_speech(frame.tobytes(), SAMPLE_RATE) for frame in integers.reshape(-1, FRAME)], bool)


def _package() -> Any:
    try:
        return import_module("webrtcvad")
    except ImportError as error:
        raise InputError(
            f"`pauses` must be {ENERGY} without the package webrtcvad, but is {WEBRTC}. pip install mmdec[vad]"
        ) from error
