"""Sound in mp4, m4a, mov, webm and mka files, which libsndfile does not read: by PyAV (extra `mmdec[av]`).

FFmpeg, which PyAV holds, is told the format by what is in the file. It guesses none: of what it knows some lead to
other files and to the network. It reads from an open file alone, and only the first track of sound is decoded.
"""

from __future__ import annotations

import io
import os
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

from mmdec.audio.samples import check_rate
from mmdec.types import InputError

SUFFIXES = (".m4a", ".m4b", ".mp4", ".mov", ".webm", ".mka", ".mkv")
MP4, MATROSKA = "mov", "matroska"  # FFmpeg's names
KINDS = {MP4: "an MP4", MATROSKA: "a Matroska or WebM"}


def container_of(content: int | io.BytesIO) -> str:
    """FFmpeg's name of the format, by a file's first bytes; "" for all others. content: a descriptor, or bytes."""
    with _file(content) as file:
        head = file.read(12)
    return MP4 if head[4:8] == b"ftyp" else MATROSKA if head[:4] == b"\x1a\x45\xdf\xa3" else ""


def container_blocks(content: int | io.BytesIO, container: str, name: str, path: str) -> Iterator[tuple[int, Any]]:
    """Rate and samples (T, channels) float32 of its first sound track, in pieces, until nothing comes.

    name: what an error calls the file; path: "" for a file object. Raises InputError without PyAV, and where there is
    no sound in it, or it is damaged.
    """
    try:
        av: Any = import_module("av")
    except ImportError as error:
        raise InputError(
            f"`audio` must be a sound file that libsndfile can read, but {name} is {KINDS[container]} file, which "
            f"PyAV reads, and that is not installed. Run `pip install mmdec[av]`. {conversion(path, 'Or convert')}"
        ) from error
    try:
        with _file(content) as file, av.open(file, format=container, metadata_errors="replace") as opened:
            if not opened.streams.audio:
                raise InputError(f"`audio` must hold sound, but {name} has no track of it. Check the recording.")
            track, converter = opened.streams.audio[0], av.AudioResampler(format="fltp")
            for frame in opened.decode(track):
                check_rate(frame.sample_rate, f" in {name}")
                for piece in converter.resample(frame):
                    yield piece.sample_rate, piece.to_ndarray().T
    except av.FFmpegError as error:
        raise InputError(
            f"`audio` must be a whole file, but {name} is damaged: FFmpeg finds '{error.strerror}'. Record or fetch it "
            "again."
        ) from error


def conversion(path: str, convert: str = "Convert") -> str:
    """What to do with a sound file that cannot be read: FFmpeg's command for this one, where it has a plain name.

    convert: how the sentence begins.
    """
    if not path or not path.isprintable():
        return f"{convert} it to 16-bit PCM wav."
    source = Path(path)
    target = source.with_suffix(".wav")
    if target == source:
        target = source.with_name(f"{source.stem}-converted.wav")
    given, made = (shlex.quote(_plain(str(file))) for file in (source, target))
    return f"{convert} it with `ffmpeg -i {given} {made}`."


def _plain(path: str) -> str:
    """A name that FFmpeg takes for a file's: not for an option's, nor for an address."""
    return f"file:{path}" if path.startswith("-") or ":" in path else path


def _file(content: int | io.BytesIO) -> BinaryIO:
    """From its beginning; closing it leaves `content` open."""
    if isinstance(content, int):
        os.lseek(content, 0, os.SEEK_SET)
        return open(content, "rb", closefd=False)
    return io.BytesIO(content.getbuffer())
