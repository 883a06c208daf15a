"""Sound from a pipe: samples without a header, or a wav stream, in as large pieces as are waiting."""

import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from mmdec.audio.samples import check_rate
from mmdec.types import InputError

ENCODINGS = {"s16": "<i2", "s24": "u1", "s32": "<i4", "u8": "u1", "f32": "<f4"}  # of samples -> NumPy's name
BYTES = {"s16": 2, "s24": 3, "s32": 4, "u8": 1, "f32": 4}  # of one sample
PIECE = 1 << 14  # bytes that are read at once at most
WAITING = 30.0  # seconds of sound that wait at most; then the pipe waits
HEADER = 1 << 20  # bytes of a wav's chunks before its samples at most
ENDLESS = 2**31 - 2**16  # declared sizes from here on mean that the size is not known
FILES = (b"fLaC", b"OggS", b"ID3", b"\x1aE\xdf\xa3", b"FORM", b".snd", b"caff")  # first bytes of sound files
PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE  # codes of a wav's format


@dataclass(frozen=True)
class PipedSound:
    """A stream of samples whose form is known."""

    rate: int  # Hz
    channels: int
    encoding: str
    size: int | None  # bytes of samples, if a header told
    head: bytes  # bytes of samples that were read already


def looks_like_a_file(head: bytes) -> bool:
    """Whether the first 12 bytes are those of a sound file other than wav, which is read whole."""
    return head.startswith(FILES) or head[4:8] == b"ftyp"


def is_wav(head: bytes) -> bool:
    """Whether the first 12 bytes are those of a wav stream."""
    return head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE"


def wav_stream(head: bytes, stream: BinaryIO) -> PipedSound:
    """Read a wav's header up to its samples. head: the first 12 bytes. Raises InputError if it cannot be read."""
    form, left = None, HEADER
    while True:
        name, size = struct.unpack("<4sI", _exactly(stream, 8))
        if name == b"data":
            break
        left -= size + size % 2
        if left < 0:
            raise _broken(f"its chunk {name!r} declares {size} bytes")
        content = _exactly(stream, size + size % 2)
        if name == b"fmt " and size >= 16:
            form = content
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
    return PipedSound(rate, channels, encoding, size if 0 < size < ENDLESS else None, b"")


def _broken(reason: str) -> InputError:
    return InputError(
        f"`audio` must be a wav stream of whole numbers or 32-bit floats, but {reason}. Send 16-bit samples, for "
        "instance with `ffmpeg -i FILE -f s16le -ac 1 -ar 16000 -`."
    )


def _exactly(stream: BinaryIO, size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise _broken("it ends within its header")
    return content


def samples(content: bytes, encoding: str, channels: int = 1) -> np.ndarray:
    """Bytes of whole frames -> (T,) float32: the channels' mean, integers scaled by their range."""
    data = np.frombuffer(content, ENCODINGS[encoding])
    if encoding == "s24":
        wide = np.zeros((len(data) // 3, 4), np.uint8)
        wide[:, 1:] = data.reshape(-1, 3)
        data, encoding = wide.reshape(-1).view("<i4"), "s32"
    scaled = data.astype(np.float64)
    if encoding == "u8":
        scaled = (scaled - 128) / 128
    elif encoding != "f32":
        scaled /= 2.0 ** (8 * BYTES[encoding] - 1)
    with np.errstate(all="ignore"):  # the caller counts what is not finite
        return scaled.reshape(-1, channels).mean(1).astype(np.float32)


def pieces(sound: PipedSound, stream: BinaryIO) -> Iterator[np.ndarray]:
    """Yield samples (T,) as they come. While the caller works, what arrives is collected, up to `WAITING` seconds.

    Raises: InputError at the end for half a sample.
    """
    frame = BYTES[sound.encoding] * sound.channels
    backlog = _Backlog(stream, sound, round(WAITING * sound.rate) * frame)
    rest = b""
    while piece := backlog.take():
        whole = rest + piece
        used = len(whole) - len(whole) % frame
        rest = whole[used:]
        if used:
            yield samples(whole[:used], sound.encoding, sound.channels)
    if rest:
        raise InputError(
            f"`audio` must end with a whole sample of {frame} bytes, but ends with {len(rest)} bytes of one. Check the "
            f"stream's form, which is {sound.encoding} with {sound.channels} channel{'s' * (sound.channels > 1)}."
        )


class _Backlog:
    """Reads a stream in a thread, so that a microphone's pipe does not overflow."""

    def __init__(self, stream: BinaryIO, sound: PipedSound, most: int) -> None:
        self._stream, self._most, self._left = stream, most, sound.size
        self._waiting = bytearray(sound.head)
        self._ended, self._change = False, threading.Condition()
        self._error: BaseException | None = None
        threading.Thread(target=self._fill, daemon=True).start()

    def take(self) -> bytes:
        """All that is waiting, at least a byte; b"" at the end."""
        with self._change:
            while not self._waiting and not self._ended:
                self._change.wait()
            content = bytes(self._waiting)
            self._waiting.clear()
            self._change.notify_all()
        if not content and self._error is not None:
            raise InputError(f"`audio` must be a stream that can be read, but is not: {self._error}.") from self._error
        return content

    def _fill(self) -> None:
        read = getattr(self._stream, "read1", self._stream.read)
        try:
            while self._left is None or self._left > 0:
                piece = read(PIECE if self._left is None else min(PIECE, self._left))
                if not piece:
                    break
                self._left = None if self._left is None else self._left - len(piece)
                with self._change:
                    while len(self._waiting) >= self._most:
                        self._change.wait()
                    self._waiting += piece
                    self._change.notify_all()
        except Exception as error:  # a closed pipe
            self._error = error
        finally:
            with self._change:
                self._ended = True
                self._change.notify_all()
