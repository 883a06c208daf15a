"""Sounds in the container formats of telephones and browsers, made with PyAV."""

from __future__ import annotations

import io
from fractions import Fraction
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


def film(
    samples: np.ndarray,
    kind: str,
    codec: str,
    *,
    late: float = 0.0,
    hole: tuple[float, float] | None = None,
    pictures: bool = True,
    pictures_late: float = 0.0,
    options: dict[str, str] | None = None,
) -> bytes:
    """Make a film with sound, as bytes.

    samples: (1, T) float32 at 48 kHz. kind: FFmpeg's name of the container. late: seconds by which the sound's
    timestamps are late. hole: (time, length) of a hole in the timestamps, in seconds. pictures: whether there is a
    track of pictures. options: of FFmpeg's muxer.
    """
    rate = 48_000
    content = io.BytesIO()
    with av.open(content, "w", format=kind, options=options or {}) as container:
        packets: list[Any] = []
        if pictures:
            screen: Any = container.add_stream("vp8" if kind == "webm" else "mpeg4", rate=5)
            screen.width = screen.height = 16
            screen.pix_fmt = "yuv420p"
            for index in range(round((samples.shape[1] / rate + late + (hole or (0, 0))[1]) * 5)):
                picture: Any = av.VideoFrame.from_ndarray(np.full((16, 16, 3), index % 255, np.uint8), format="rgb24")
                picture.pts, picture.time_base = index + round(pictures_late * 5), Fraction(1, 5)
                packets += screen.encode(picture)
            packets += screen.encode(None)
        track: Any = container.add_stream(codec, rate=rate, layout="mono")
        frame: Any = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), format="fltp", layout="mono")
        frame.sample_rate, frame.pts = rate, 0
        converter = av.AudioResampler(
            format=track.format, layout="mono", rate=rate, frame_size=track.codec_context.frame_size or 1024
        )
        sound = [
            packet
            for piece in (*converter.resample(frame), *converter.resample(None), None)
            for packet in track.encode(piece)
        ]
        for packet in sound:
            moved = late + (hole[1] if hole is not None and packet.pts * packet.time_base >= hole[0] else 0.0)
            packet.pts += round(moved / packet.time_base)
            packet.dts = packet.pts
        for packet in sorted([*packets, *sound], key=lambda packet: packet.dts * packet.time_base):
            container.mux(packet)
    return content.getvalue()
