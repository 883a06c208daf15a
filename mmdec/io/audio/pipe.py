"""Reads raw samples or a wav file from a pipe, chunk by chunk."""

from __future__ import annotations

import io
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from mmdec.checks.arguments import check_choice
from mmdec.errors import InputError
from mmdec.io.audio.headers import RIFF_TAIL
from mmdec.io.audio.mixing import Mixer
from mmdec.io.audio.samples import SAMPLE_RATE, check_rate
from mmdec.io.audio.structure import AudioLoss, is_unknown_size

# name of a sample encoding -> the NumPy dtype with which its bytes are read
ENCODINGS = {"s16": "<i2", "s24": "u1", "s32": "<i4", "u8": "u1", "f32": "<f4"}
SAMPLE_BYTES = {"s16": 2, "s24": 3, "s32": 4, "u8": 1, "f32": 4}  # name of a sample encoding -> bytes per sample
READ_BYTES = 1 << 14  # maximum bytes that are read from a pipe at a time
# maximum seconds of audio that are buffered for a slow caller; then reading from the pipe stops
MAX_BUFFERED_SECONDS = 30.0
# maximum bytes of the chunks before the samples in a wav stream; more is taken for a damaged file
MAX_HEADER_BYTES = 1 << 20
# number of bytes read first from a pipe; they show whether it is a sound file or samples without a header
SIGNATURE_BYTES = 12
# the first bytes of sound files in formats other than wav
FILE_SIGNATURES = (
    b"fLaC",
    b"OggS",
    b"ID3",
    b"\x1aE\xdf\xa3",
    b"FORM",
    b".snd",
    b"dns.",
    b"caff",
    b"riff",
    b"RIFX",
    b"NIST",
)
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE  # codes for the sample format in a wav header


@dataclass(frozen=True)
class PipedSound:
    """A stream of raw samples, with its format and the bytes that were already read."""

    rate: int  # sample rate in Hz
    channels: int
    encoding: str  # a key of `ENCODINGS`
    size: int | None  # number of bytes of samples that the header declares; None: unknown
    head: bytes  # first bytes of samples, which were read together with the header
    # whether it is the content of a wav file, which may have padding and chunks after the samples
    in_file: bool = False


def read_pipe(
    stream: BinaryIO,
    rate: int | None = None,
    encoding: str | None = None,
    loss: AudioLoss | None = None,
    remarks: list[str] | None = None,
) -> tuple[int, Iterator[np.ndarray]] | BinaryIO:
    """Read audio from a pipe: samples without a header, a wav stream, or another sound file.

    Args:
        rate, encoding: Sample rate in Hz and sample format (such as "s16") of samples without a header. Both None:
            16000 and "s16", unless the first bytes are those of a sound file.
        loss: Filled in at the end of a wav stream that is cut off.
        remarks: A list to which remarks about a wav stream's channels are added at its end.

    Returns:
        (rate in Hz, iterator of samples (T,) as they arrive); for a sound file other than wav, its whole content as a
        file object.

    Raises:
        InputError: For an unknown encoding, or a wav stream that cannot be read.
    """
    if encoding is not None:
        check_choice("encoding", encoding, tuple(SAMPLE_BYTES), "s16 is the usual one.")
    head = stream.read(SIGNATURE_BYTES) if rate is None and encoding is None else b""
    if is_wav(head):
        sound = wav_stream(head, stream)
    elif looks_like_a_file(head):
        return io.BytesIO(head + stream.read())
    else:
        sound = PipedSound(rate or SAMPLE_RATE, 1, encoding or "s16", None, head)
    return sound.rate, stream_pieces(sound, stream, loss, remarks)


def looks_like_a_file(head: bytes) -> bool:
    """Return whether a stream is a sound file other than wav: such a file can only be decoded when it is complete.

    Args:
        head: The stream's first 12 bytes.
    """
    return head.startswith(FILE_SIGNATURES) or head[4:8] == b"ftyp"


def is_wav(head: bytes) -> bool:
    """Return whether a stream is a wav file.

    Args:
        head: The stream's first 12 bytes.
    """
    return head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE"


def wav_stream(head: bytes, stream: BinaryIO) -> PipedSound:
    """Read a wav header from a stream, up to its samples.

    Args:
        head: The first 12 bytes, which were read already.
        stream: Continues after them.

    Returns:
        The stream's format; `stream` then continues with the first sample.

    Raises:
        InputError: If the header cannot be read.
    """
    form, left, wide = None, MAX_HEADER_BYTES, 0
    while True:
        name, size = struct.unpack("<4sI", _read_exactly(stream, 8))
        if name == b"data":
            break
        left -= size + size % 2
        if left < 0:
            raise _broken(f"its chunk {name!r} declares {size} bytes")
        content = _read_exactly(stream, size + size % 2)
        if name == b"fmt " and size >= 16:
            form = content
        elif name == b"ds64" and size >= 16:  # the sizes of an RF64 file
            wide = struct.unpack("<Q", content[8:16])[0]
    if form is None:
        raise _broken("it has no format before its samples")
    code, channels, rate, _, _, bits = struct.unpack("<HHIIHH", form[:16])
    if code == EXTENSIBLE and len(form) >= 26:
        code = struct.unpack("<H", form[24:26])[0]
    encodings = {(PCM, 8): "u8", (PCM, 16): "s16", (PCM, 24): "s24", (PCM, 32): "s32", (FLOAT, 32): "f32"}
    encoding = encodings.get((code, bits))
    if encoding is None:
        raise _broken(f"its samples have code {code} and {bits} bits")
    if not 1 <= channels <= 8:
        raise _broken(f"it has {channels} channels")
    check_rate(rate, " in the wav stream")
    has_size = not is_unknown_size(size)
    if not has_size and not is_unknown_size(wide, wide=True):
        has_size, size = True, wide
    return PipedSound(rate, channels, encoding, size if has_size else None, b"", in_file=True)


def _broken(reason: str) -> InputError:
    return InputError(
        f"`audio` must be a wav stream of whole numbers or 32-bit floats, but {reason}. Send 16-bit samples, for "
        "instance with `ffmpeg -i FILE -f s16le -ac 1 -ar 16000 -`."
    )


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise _broken("it ends within its header")
    return content


def decode_samples(content: bytes, encoding: str, channels: int = 1) -> np.ndarray:
    """Convert bytes to samples (T,) float32, or (T, channels) of more than one; integers are scaled to [-1, 1].

    Args:
        content: A whole number of frames.
        encoding: A key of `ENCODINGS`.
    """
    data = np.frombuffer(content, ENCODINGS[encoding])
    if encoding == "s24":
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = data.reshape(-1, 3)
        data, encoding = wide.reshape(-1).view("<i4"), "s32"
    scaled = data.astype(np.float64)
    if encoding == "u8":
        scaled = (scaled - 128) / 128
    elif encoding != "f32":
        scaled /= 2.0 ** (8 * SAMPLE_BYTES[encoding] - 1)
    with np.errstate(all="ignore"):  # the caller checks for infinite samples
        return (scaled.reshape(-1, channels) if channels > 1 else scaled).astype(np.float32)


def stream_pieces(
    sound: PipedSound, stream: BinaryIO, loss: AudioLoss | None = None, remarks: list[str] | None = None
) -> Iterator[np.ndarray]:
    """Yield arrays of mono samples (T,) float32 as they arrive from a stream.

    While the caller works, a thread reads up to `MAX_BUFFERED_SECONDS` seconds ahead.

    Args:
        loss: Is filled at the end, if the stream ends before the end that its header declares.
        remarks: Gets what is odd about the channels at the end.

    Raises:
        InputError: At the end, if the last sample is incomplete, unless the header declares more.
    """
    frame = SAMPLE_BYTES[sound.encoding] * sound.channels
    backlog = _Backlog(stream, sound, round(MAX_BUFFERED_SECONDS * sound.rate) * frame)
    rest, count, mixer = b"", 0, Mixer(sound.rate)
    while piece := backlog.take():
        whole = rest + piece
        used = len(whole) - len(whole) % frame
        rest = whole[used:]
        count += used // frame
        if used:
            frames = decode_samples(whole[:used], sound.encoding, sound.channels)
            yield frames if sound.channels == 1 else mixer.add(frames)
    if len(last := mixer.end()):
        yield last
    if remarks is not None and mixer.note:
        remarks.append(mixer.note)
    if sound.size is not None and count < sound.size // frame:
        if loss is not None:
            loss.cut_off(count / sound.rate, sound.size / frame / sound.rate)
        return
    if rest and not sound.in_file:
        plural = "" if sound.channels == 1 else "s"
        raise InputError(
            f"`audio` must end with a whole sample of {frame} bytes, but ends with {len(rest)} bytes of one. Check the "
            f"stream's form, which is {sound.encoding} with {sound.channels} channel{plural}."
        )


class _Backlog:
    """Reads a stream in a thread and buffers its bytes.

    So a microphone's pipe does not overflow while the caller works.
    """

    def __init__(self, stream: BinaryIO, sound: PipedSound, max_bytes: int) -> None:
        self._stream, self._max_bytes, self._left = stream, max_bytes, sound.size
        self._in_file = sound.in_file
        self._waiting = bytearray(sound.head)
        self._ended, self._change = False, threading.Condition()
        self._error: BaseException | None = None
        threading.Thread(target=self._fill, daemon=True).start()

    def take(self) -> bytes:
        """Wait for at least one byte, and return all bytes that have arrived; b"" at the end of the stream."""
        with self._change:
            while not self._waiting and not self._ended:
                self._change.wait()
            content = bytes(self._waiting)
            self._waiting.clear()
            self._change.notify_all()
        if not content and self._error is not None:
            raise InputError(
                f"`audio` must be a stream that can be read, but is not: {self._error}. Check what writes to it."
            ) from self._error
        return content

    def _fill(self) -> None:
        read = getattr(self._stream, "read1", self._stream.read)
        try:
            odd = self._left is not None and self._left % 2 == 1
            while self._left is None or self._left > 0:
                piece = read(READ_BYTES if self._left is None else min(READ_BYTES, self._left))
                if not piece:
                    return
                self._left = None if self._left is None else self._left - len(piece)
                self._keep(piece)
            if self._in_file and (more := more_sound(self._stream, odd)):
                self._keep(more)
                while piece := read(READ_BYTES):
                    self._keep(piece)
        except Exception as error:  # for example a closed pipe; `take` raises it in the caller
            self._error = error
        finally:
            with self._change:
                self._ended = True
                self._change.notify_all()

    def _keep(self, piece: bytes) -> None:
        with self._change:
            while len(self._waiting) >= self._max_bytes:
                self._change.wait()
            self._waiting += piece
            self._change.notify_all()


def more_sound(stream: BinaryIO, odd: bool) -> bytes:
    """Read on where the samples of a wav stream end by its header, which may be wrong.

    Args:
        odd: Whether a byte of padding follows.

    Returns:
        The first bytes that follow, if they are samples; b"" if they are metadata, or nothing.
    """
    following = stream.read(5)
    name = following[1:5] if odd and following[:1] == b"\0" else following[:4]
    return b"" if name in RIFF_TAIL or following in (b"", b"\0") else following
