"""Decodes a sound file with PyAV on the file's own clock: each frame is put where its timestamp says.

Silence stands for what comes late, for holes, and for packets that cannot be decoded, so that times after them are
right. The encoder's delay and edit lists are applied by FFmpeg.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mmdec.io.audio.samples import MAX_SECONDS
from mmdec.io.audio.structure import SHORTEST_LOSS, AudioLoss, FileStructure, flac_sample

# Seconds by which a timestamp may differ from the sound so far. A shorter difference is jitter of the recorder's clock.
# FFmpeg's resampler inserts silence for the same difference (its `min_hard_comp`).
JITTER = 0.1
# A file whose tracks all begin later than this many seconds is a part of a longer stream: its clock starts with its
# first track, as players show it.
LATEST_START = 60.0
# A decoded sample beyond this is noise from a damaged packet that the decoder did not recognise; 1 is full scale. One
# such packet would make all others quiet, because the peak is scaled to 1.
MAX_OVERSHOOT = 4.0
# Seconds by which a timestamp may be later than the duration that the file declares; one that is later is damaged.
MAX_LATE_SECONDS = 1.0
SILENT_BLOCK = 1 << 16  # maximum number of samples of silence in a block
# Seconds by which a container's sound may end earlier than declared: the duration is that of its longest track, with
# the encoder's padding.
CUT_SLACK = 0.05
FLAC_SLACK = 0.001  # seconds by which a FLAC may end earlier than declared
MAX_FAILURES = 16  # consecutive errors of the demuxer after which a file is given up


def decode_on_clock(
    av: Any,
    opened: Any,
    structure: FileStructure,
    loss: AudioLoss,
    check_rate: Callable[[int], None],
    check_seconds: Callable[[float], None],
    container: bool,
) -> Iterator[tuple[int, np.ndarray]]:
    """Decode the first audio track of a file to its end.

    Args:
        av: The module.
        opened: The open file; it has an audio track.
        structure: What is damaged in it.
        loss: Is filled with what cannot be read.
        check_rate: Raises InputError for a sample rate in Hz that is not supported.
        check_seconds: Raises InputError for a duration in seconds that is too long.
        container: Whether the file's clock starts at 0 (MP4, Matroska); False: it starts with the sound.

    Yields:
        Sample rate in Hz, samples (T, channels) float32 of each block.

    Raises:
        FFmpegError: If nothing can be decoded.
    """
    track = opened.streams.audio[0]
    zero = _zero(opened, track) if container else None
    if track.codec_context.name == "flac":  # by default, FFmpeg does not compare checksums, and returns noise
        track.codec_context.options = {"err_detect": "crccheck+explode"}
    if opened.format.name == "flac":
        # its packets count from 0; the first one that FFmpeg finds may be later, if those before are damaged
        zero = 0.0
    lossy = not track.codec_context.name.startswith("pcm_")
    converter: Any = None
    rate = written = 0  # the sound's rate in Hz; samples that were yielded
    # MP3: seconds by which FFmpeg's timestamps lag behind, because it does not count the frames that are missing
    shift, first_shift = 0.0, None
    failed: Exception | None = None  # an error since the last frame
    lost = 0.0  # seconds of the packets that failed since the last frame
    earlier: float | None = None  # `zero` before the clock was set back
    packets = _Packets(av, opened, track)
    position = passed = 0  # where the newest packet is in the file; where the last one was that gave a frame
    for packet, error in packets:
        frames, first = list[Any](), None
        if packet is not None:
            position = position if packet.pos is None else packet.pos
            counted = structure.time_at(position)
            if counted is not None and packet.pts is not None:
                shift = counted - float(packet.pts * packet.time_base)
                first_shift = shift if first_shift is None else first_shift
            if opened.format.name == "flac":  # FFmpeg merges blocks before a damaged one, and gives them a later time
                first = flac_sample(bytes(packet), structure.block)
            try:
                frames = [] if packet.is_corrupt else packet.decode()
                error = error or (_broken() if packet.is_corrupt else None)
            except (av.FFmpegError, ValueError) as reason:
                error = reason
        if error is not None:
            failed = error
            lost += float(packet.duration * packet.time_base) if packet is not None and packet.duration else 0.0
            frames = []
        for frame in frames:
            if converter is None:
                rate = track.codec_context.sample_rate or frame.sample_rate
                check_rate(rate)
                converter = av.AudioResampler(format="fltp", layout=frame.layout, rate=rate)
            try:
                converted = [piece.to_ndarray().T for piece in converter.resample(frame)]
            except (av.FFmpegError, ValueError) as reason:  # the frame has another form than those before it
                failed, converter = reason, av.AudioResampler(format="fltp", layout=frame.layout, rate=rate)
                continue
            if lossy and any(np.abs(piece).max(initial=0.0) > MAX_OVERSHOOT for piece in converted):
                failed, lost = failed or _broken(), lost + frame.samples / rate
                continue
            gap = 0.0
            pts, first = frame.pts if first is None else first, None
            if pts is not None:
                time = float(pts / rate if opened.format.name == "flac" else pts * frame.time_base)
                if zero is None:
                    zero = time if track.start_time is None else float(track.start_time * track.time_base)
                gap = time - zero + shift - (first_shift or 0.0) - written / rate
                if gap > JITTER:
                    heard = written / rate
                    whole = _whole(opened, track, structure, zero) if container else structure.seconds
                    beyond = whole is not None and heard < whole + MAX_LATE_SECONDS < heard + gap
                    back = earlier is not None and abs(gap + zero - earlier) < JITTER
                    if back or beyond or packets.jump_back(time - gap, time):
                        loss.mistimed = True  # the timestamp is damaged, or those before it were: the sound goes on
                        zero, gap, earlier = zero + gap, 0.0, None
                elif gap < -JITTER:  # the clock was set back: it goes on from here
                    zero, earlier = zero + gap, zero
            elif failed is not None:
                gap = lost
            damaged = failed is not None or not container or structure.overlaps_damage(passed, position)
            if gap > (SHORTEST_LOSS if damaged else JITTER):
                check_seconds(written / rate + gap)
                if damaged:
                    loss.gaps.append((written / rate, gap))
                for block in _silence(round(gap * rate), converted):
                    written += len(block)
                    yield rate, block
            failed, lost, passed = None, 0.0, position
            for block in converted:
                written += len(block)
                yield rate, block
    if not written:
        if failed is not None:
            raise failed
        return
    end = written / rate
    if failed is not None or structure.cut or structure.overlaps_damage(passed + 1, 2**63):
        if container:
            loss.cut_off(end, _whole(opened, track, structure, zero or 0.0), CUT_SLACK)
        elif structure.seconds is not None and end < structure.seconds <= MAX_SECONDS:
            loss.cut_off(end, structure.seconds)
        else:
            loss.cut_off(end, end * structure.share if structure.share > 1 else None)
    elif opened.format.name == "flac" and structure.seconds is not None:
        loss.cut_off(end, structure.seconds, FLAC_SLACK)


class _Packets:
    """Iterates over the packets of a track: (packet, None), and (None, error) where the demuxer fails."""

    def __init__(self, av: Any, opened: Any, track: Any) -> None:
        self._source = _demux(av, opened, track)
        self._ahead: deque[tuple[Any, Exception | None]] | None = None  # all packets that follow; None: not read yet
        self._times = np.zeros(0)  # those of `_ahead`, in seconds, as far as they were read at first

    def __iter__(self) -> Iterator[tuple[Any, Exception | None]]:
        return self

    def __next__(self) -> tuple[Any, Exception | None]:
        if self._ahead is None:
            return next(self._source)
        if not self._ahead:
            raise StopIteration
        return self._ahead.popleft()

    def jump_back(self, start: float, end: float) -> bool:
        """Return whether timestamps, in seconds, that jumped from `start` to `end` return later: into what they jumped
        over, or by as much."""
        if self._ahead is None:
            self._ahead = deque(self._source)
            packets = (packet for packet, _ in self._ahead)
            self._times = np.array(
                [np.nan if one is None or one.pts is None else float(one.pts * one.time_base) for one in packets]
            )
        times = self._times[len(self._times) - len(self._ahead) :]
        between = (times >= start) & (times < end - JITTER)
        return bool(between.any() or (np.abs(np.diff(times) + end - start) < JITTER).any())


def _demux(av: Any, opened: Any, track: Any) -> Iterator[tuple[Any, Exception | None]]:
    failures = 0
    while failures < MAX_FAILURES:
        try:
            for packet in opened.demux(track):
                failures = 0
                yield packet, None
            return
        except (av.FFmpegError, ValueError) as error:
            failures += 1
            yield None, error


def _broken() -> Exception:
    return ValueError("its packets are damaged")


def _zero(opened: Any, track: Any) -> float:
    """Return the time in seconds at which a container's clock starts: 0, unless all of its tracks begin before it, or
    much later."""
    start = track.start_time * track.time_base if opened.start_time is None and track.start_time is not None else None
    first = float(start) if start is not None else (opened.start_time or 0) / 1e6
    return first if first < 0 or first > LATEST_START else 0.0


def _silence(samples: int, like: list[np.ndarray]) -> Iterator[np.ndarray]:
    channels = like[0].shape[1] if like else 1
    for start in range(0, samples, SILENT_BLOCK):
        yield np.zeros((min(SILENT_BLOCK, samples - start), channels), np.float32)


def _whole(opened: Any, track: Any, structure: FileStructure, zero: float) -> float | None:
    """Return the seconds that a container declares for its sound, or for all of its tracks; None: unknown."""
    if structure.seconds is not None or structure.fragmented:  # then the track's duration is that of what was read
        return structure.seconds
    if track.duration is not None:
        return float((track.duration + (track.start_time or 0)) * track.time_base) - zero
    return None if opened.duration is None else opened.duration / 1e6 - zero
