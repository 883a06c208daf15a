"""Decodes a sound file with PyAV on the file's own clock: each frame is put where its timestamp says.

Silence stands for what comes late, for holes, and for packets that cannot be decoded, so that times after them are
right. The encoder's delay and edit lists are applied by FFmpeg.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, final

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
# Seconds by which a timestamp may be later than the duration that the file declares; a later one is damaged.
MAX_LATE_SECONDS = 1.0
SILENT_BLOCK = 1 << 16  # maximum number of samples of silence in a block
# Seconds by which a container's sound may end earlier than declared: the duration is that of its longest track, with
# the encoder's padding.
CUT_SLACK = 0.05
FLAC_SLACK = 0.001  # seconds by which a FLAC may end earlier than declared
MAX_FAILURES = 16  # consecutive errors of the demuxer after which a file is given up


@final
class ClockDecoder:
    """Decodes the first audio track of a file to its end, and puts each frame where its timestamp says.

    Args:
        av: The module.
        opened: The open file; it has an audio track.
        structure: What is damaged in it.
        loss: Is filled with what cannot be read.
        check_rate: Raises InputError for a sample rate in Hz that is not supported.
        check_seconds: Raises InputError for a duration in seconds that is too long.
        container: Whether the file's clock starts at 0 (MP4, Matroska); False: it starts with the sound.
    """

    def __init__(
        self,
        av: Any,
        opened: Any,
        structure: FileStructure,
        loss: AudioLoss,
        check_rate: Callable[[int], None],
        check_seconds: Callable[[float], None],
        container: bool,
    ) -> None:
        self._av = av
        self._opened = opened
        self._structure = structure
        self._loss = loss
        self._check_rate = check_rate
        self._check_seconds = check_seconds
        self._container = container
        self._track = opened.streams.audio[0]
        codec = self._track.codec_context.name
        self._lossy = not codec.startswith("pcm_")
        if codec == "flac":  # by default, FFmpeg does not compare checksums, and returns noise
            self._track.codec_context.options = {"err_detect": "crccheck+explode"}
        self._is_flac_file = opened.format.name == "flac"
        self._packets = _Packets(av, opened, self._track)
        # the time in seconds at which the sound begins on the file's clock; None: that of the first frame
        self._zero: float | None = _container_start(opened, self._track) if container else None
        if self._is_flac_file:
            # its packets count from 0; the first one that FFmpeg finds may be later, if those before are damaged
            self._zero = 0.0
        self._earlier_zero: float | None = None  # `_zero` before the clock was set back
        # MP3: seconds by which FFmpeg's timestamps lag behind, because it does not count the frames that are missing
        self._shift = 0.0
        self._first_shift: float | None = None
        self._first_pts: int | None = None  # FLAC: the timestamp of the packet's next frame, in samples
        self._converter: Any = None
        self._rate = 0  # in Hz
        self._written = 0  # samples that were yielded
        self._failure: Exception | None = None  # an error since the last frame
        self._lost_seconds = 0.0  # of the packets that failed since the last frame
        self._position = 0  # where the newest packet is in the file
        self._frame_position = 0  # where the last packet is that gave a frame

    def decode(self) -> Iterator[tuple[int, np.ndarray]]:
        """Decode the track.

        Yields:
            Sample rate in Hz, samples (T, channels) float32 of each block.

        Raises:
            FFmpegError: If nothing can be decoded.
        """
        for packet, error in self._packets:
            for frame in self._frames_of(packet, error):
                blocks = self._convert(frame)
                if blocks is None:
                    continue
                gap = self._gap_before(frame)
                damaged = (
                    self._failure is not None
                    or not self._container
                    or self._structure.overlaps_damage(self._frame_position, self._position)
                )
                if gap > (SHORTEST_LOSS if damaged else JITTER):
                    self._check_seconds(self._seconds + gap)
                    if damaged:
                        self._loss.gaps.append((self._seconds, gap))
                    for silence in _silence(round(gap * self._rate), blocks):
                        yield self._write(silence)
                self._failure, self._lost_seconds, self._frame_position = None, 0.0, self._position
                for block in blocks:
                    yield self._write(block)
        if self._written:
            self._report_end()
        elif self._failure is not None:
            raise self._failure

    @property
    def _seconds(self) -> float:
        return self._written / self._rate

    def _write(self, block: np.ndarray) -> tuple[int, np.ndarray]:
        self._written += len(block)
        return self._rate, block

    def _frames_of(self, packet: Any, error: Exception | None) -> list[Any]:
        """Decode a packet.

        Args:
            packet: The packet; None: the demuxer failed.
            error: The demuxer's error.

        Returns:
            Its frames; none if it is damaged.
        """
        frames: list[Any] = []
        self._first_pts = None
        if packet is not None:
            if packet.pos is not None:
                self._position = packet.pos
            time = self._structure.time_at(self._position)
            if time is not None and packet.pts is not None:
                self._shift = time - float(packet.pts * packet.time_base)
                if self._first_shift is None:
                    self._first_shift = self._shift
            if self._is_flac_file:  # FFmpeg merges blocks before a damaged one, and gives them a later time
                self._first_pts = flac_sample(bytes(packet), self._structure.block)
            try:
                if packet.is_corrupt:
                    error = error or _broken()
                else:
                    frames = packet.decode()
            except (self._av.FFmpegError, ValueError) as reason:
                error = reason
        if error is None:
            return frames
        self._failure = error
        if packet is not None and packet.duration:
            self._lost_seconds += float(packet.duration * packet.time_base)
        return []

    def _convert(self, frame: Any) -> list[np.ndarray] | None:
        """Return a frame's samples (T, channels) float32 in blocks; None if they are damaged."""
        if self._converter is None:
            self._rate = self._track.codec_context.sample_rate or frame.sample_rate
            self._check_rate(self._rate)
            self._converter = self._resampler(frame)
        try:
            blocks = [piece.to_ndarray().T for piece in self._converter.resample(frame)]
        except (self._av.FFmpegError, ValueError) as reason:  # the frame has another form than those before it
            self._failure, self._converter = reason, self._resampler(frame)
            return None
        if self._lossy and any(np.abs(block).max(initial=0.0) > MAX_OVERSHOOT for block in blocks):
            self._failure = self._failure or _broken()
            self._lost_seconds += frame.samples / self._rate
            return None
        return blocks

    def _resampler(self, frame: Any) -> Any:
        return self._av.AudioResampler(format="fltp", layout=frame.layout, rate=self._rate)

    def _gap_before(self, frame: Any) -> float:
        """Return the seconds between the sound so far and a frame; negative if the clock was set back."""
        pts = frame.pts if self._first_pts is None else self._first_pts
        self._first_pts = None
        if pts is None:
            return 0.0 if self._failure is None else self._lost_seconds
        time = float(pts / self._rate if self._is_flac_file else pts * frame.time_base)
        if self._zero is None:
            start = self._track.start_time
            self._zero = time if start is None else float(start * self._track.time_base)
        gap = time - self._zero + self._shift - (self._first_shift or 0.0) - self._seconds
        if gap < -JITTER:  # the clock was set back: it goes on from here
            self._zero, self._earlier_zero = self._zero + gap, self._zero
        elif gap > JITTER and self._is_mistimed(gap, time, self._zero):
            self._loss.mistimed = True  # the sound goes on
            self._zero, self._earlier_zero = self._zero + gap, None
            return 0.0
        return gap

    def _is_mistimed(self, gap: float, time: float, zero: float) -> bool:
        """Return whether a frame's timestamp is damaged, or those before it were.

        Args:
            gap: Seconds between the sound so far and the frame.
            time: The frame's timestamp in seconds.
            zero: The time in seconds at which the sound begins on the file's clock.
        """
        if self._earlier_zero is not None and abs(gap + zero - self._earlier_zero) < JITTER:
            return True  # the clock returns to where it was before it was set back
        declared = self._structure.seconds
        if self._container:
            declared = _declared_seconds(self._opened, self._track, self._structure, zero)
        end = self._seconds
        if declared is not None and end < declared + MAX_LATE_SECONDS < end + gap:
            return True
        return self._packets.jump_back(time - gap, time)

    def _report_end(self) -> None:
        """Report what is missing after the last frame."""
        end, structure = self._seconds, self._structure
        if self._failure is not None or structure.cut or structure.overlaps_damage(self._frame_position + 1, 2**63):
            if self._container:
                declared = _declared_seconds(self._opened, self._track, structure, self._zero or 0.0)
                self._loss.cut_off(end, declared, CUT_SLACK)
            elif structure.seconds is not None and end < structure.seconds <= MAX_SECONDS:
                self._loss.cut_off(end, structure.seconds)
            else:
                self._loss.cut_off(end, end * structure.share if structure.share > 1 else None)
        elif self._is_flac_file and structure.seconds is not None:
            self._loss.cut_off(end, structure.seconds, FLAC_SLACK)


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
        """Return whether timestamps, in seconds, that jumped from `start` to `end` return later.

        They return into what they jumped over, or by as much.
        """
        if self._ahead is None:
            self._ahead = deque(self._source)
            self._times = np.array(
                [
                    np.nan if packet is None or packet.pts is None else float(packet.pts * packet.time_base)
                    for packet, _ in self._ahead
                ]
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


def _container_start(opened: Any, track: Any) -> float:
    """Return the time in seconds at which a container's clock starts.

    It is 0, unless all of its tracks begin before it, or much later.
    """
    start = track.start_time * track.time_base if opened.start_time is None and track.start_time is not None else None
    first = float(start) if start is not None else (opened.start_time or 0) / 1e6
    return first if first < 0 or first > LATEST_START else 0.0


def _silence(samples: int, like: list[np.ndarray]) -> Iterator[np.ndarray]:
    channels = like[0].shape[1] if like else 1
    for start in range(0, samples, SILENT_BLOCK):
        yield np.zeros((min(SILENT_BLOCK, samples - start), channels), np.float32)


def _declared_seconds(opened: Any, track: Any, structure: FileStructure, zero: float) -> float | None:
    """Return the seconds that a container declares for its sound, or for all of its tracks; None: unknown."""
    if structure.seconds is not None or structure.fragmented:  # then the track's duration is that of what was read
        return structure.seconds
    if track.duration is not None:
        return float((track.duration + (track.start_time or 0)) * track.time_base) - zero
    return None if opened.duration is None else opened.duration / 1e6 - zero
