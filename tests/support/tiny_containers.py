"""Sounds in the container formats of telephones and browsers, made with PyAV."""

from __future__ import annotations

import io
from typing import Any

import av
import numpy as np

CODECS = {".mp4": ("mp4", "aac"), ".m4a": ("ipod", "aac"), ".webm": ("webm", "libopus"), ".mov": ("mov", "pcm_s16le")}


def contained(samples: np.ndarray, suffix: str, rate: int = 48_000) -> bytes:
    """Encode samples (channels, T), float32 in [-1, 1], as a file's bytes. suffix: a key of `CODECS`."""
    kind, codec = CODECS[suffix]
    layout = "mono" if len(samples) == 1 else "stereo"
    content = io.BytesIO()
    with av.open(content, "w", format=kind) as container:
        track: Any = container.add_stream(codec, rate=rate, layout=layout)
        frame: Any = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout=layout)
        frame.sample_rate, frame.pts = rate, 0
        converter = av.AudioResampler(format=track.format, layout=layout, rate=rate)
        for piece in (*converter.resample(frame), *converter.resample(None), None):
            container.mux(track.encode(piece))
    return content.getvalue()


def silent_film() -> bytes:
    """Make an MP4 with pictures and no sound, as bytes."""
    content = io.BytesIO()
    with av.open(content, "w", format="mp4") as container:
        track: Any = container.add_stream("mpeg4", rate=5)
        track.width = track.height = 16
        track.pix_fmt = "yuv420p"
        for piece in (av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24"), None):
            container.mux(track.encode(piece))
    return content.getvalue()
