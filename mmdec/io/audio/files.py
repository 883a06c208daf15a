"""Reads and writes sound files.

The length in a file's header is used only to reject files that are too long: every file is decoded to its actual end.
Output files are written atomically.

What cannot be read, because a file is damaged or cut off, is left out or replaced by silence, and noted.

libsndfile reads the formats of `READABLE`. PyAV (extra `mmdec[av]`), which contains FFmpeg, reads the audio of mp4,
m4a, mov, webm and mka. This module tells FFmpeg the format: if FFmpeg guessed it, some formats could make it open other
files or the network. FFmpeg reads only the open file, and decodes only the first audio track.
"""

import codecs
import io
import os
import shlex
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import soundfile
import torch
from torch import Tensor

from mmdec.checks import files
from mmdec.checks.arguments import format_value
from mmdec.checks.files import open_regular, printable, unreadable_error, write_atomically
from mmdec.errors import InputError
from mmdec.io.audio.clock import FLAC_SLACK, ClockDecoder
from mmdec.io.audio.headers import PatchedFile, repair_header
from mmdec.io.audio.mixing import Mixer
from mmdec.io.audio.samples import MAX_SECONDS, SAMPLE_RATE, check_peak, check_rate, check_samples, full_scale, resample
from mmdec.io.audio.structure import AudioLoss, FileStructure, find_magic, read_structure

MAX_BYTES = 2 * 2**30  # maximum bytes of a file object, because it is read into memory
# Bytes of a second of sound, at the least: a header that declares more sound than the file could hold is wrong, and the
# length is checked while decoding.
MIN_BYTES_PER_SECOND = 500
DECLARED_SLACK = 0.05  # seconds by which an MP3 may end earlier than declared: encoders count their padding or do not
MAX_BLOCK_SAMPLES = 1 << 20  # maximum number of samples, summed over all channels, that are read at a time
UNKNOWN_LENGTH = 2**63 - 1  # the length in frames that libsndfile reports if the header has none
# names by which libsndfile calls the formats that can be read
READABLE = ("WAV", "WAVEX", "RF64", "W64", "FLAC", "OGG", "MP3", "AIFF", "AU", "CAF", "NIST")
WRITABLE = {  # suffix of a file -> libsndfile's names of format and sample type
    ".wav": ("WAV", "PCM_16"),
    ".flac": ("FLAC", "PCM_16"),
    ".ogg": ("OGG", "VORBIS"),
    ".mp3": ("MP3", "MPEG_LAYER_III"),
    ".opus": ("OGG", "OPUS"),
    ".aiff": ("AIFF", "PCM_16"),
    ".aif": ("AIFF", "PCM_16"),
    ".au": ("AU", "PCM_16"),
    ".caf": ("CAF", "PCM_16"),
    ".w64": ("W64", "PCM_16"),
}

AudioSource = str | os.PathLike[str] | BinaryIO
MP4, MATROSKA = "mov", "matroska"  # FFmpeg's names of two container formats: for mp4, m4a, mov; and for mkv, mka, webm
CONTAINER_NAMES = {MP4: "an MP4", MATROSKA: "a Matroska or WebM"}
# FFmpeg's names of the formats for which it continues after damage, where libsndfile would stop or lose time
RESUMED = {b"fLaC": "flac", b"OggS": "ogg", b"caff": "caf"}


@dataclass(frozen=True)
class Recording:
    """A sound file's samples, and a note about what of the file could not be read, or was odd about it."""

    samples: Tensor  # (T,) float32 in [-1, 1]
    note: str = ""  # the place and the length of what is missing, and channels that cancel


def load_audio(source: AudioSource, sample_rate: int = SAMPLE_RATE, *, max_seconds: float = MAX_SECONDS) -> Tensor:
    """Read one sound file, mix it down to mono and resample it.

    It reads wav, flac, ogg, mp3, aiff, au, caf and NIST Sphere, with integers of 8 to 32 bits or floats; and with PyAV
    (extra `mmdec[av]`) the audio of mp4, m4a, mov, webm and mka. The whole content is read, even if the header declares
    less. Floats beyond full scale are scaled down to it. Channels that would cancel each other are inverted before they
    are mixed. Times are those of the file's clock: silence stands for sound that starts late, for holes, and for parts
    that cannot be read. `load_recording` also says which parts those are.

    Args:
        source: A path, or a binary file object.
        sample_rate: Hz of the result. Default 16 kHz.
        max_seconds: Longer audio raises an error; if the header shows that it is longer, nothing is decoded.

    Returns:
        Samples (T,) float32 in [-1, 1].

    Raises:
        InputError: For any other file, and for audio with samples that are not finite, too large or missing.
    """
    return load_recording(source, sample_rate, max_seconds=max_seconds).samples


def load_recording(
    source: AudioSource, sample_rate: int = SAMPLE_RATE, *, max_seconds: float = MAX_SECONDS, strict: bool = False
) -> Recording:
    """Read one sound file as `load_audio` does, with a note about what of it could not be read.

    Args:
        strict: Reject a file that cannot be read completely. Default False: read the rest.
    """
    check_rate(sample_rate)
    blocks: list[np.ndarray] = []
    rates, peak = [sample_rate], 0.0
    in_source, loss = _in_source(source), AudioLoss()
    mixer: Mixer | None = None
    # each block of samples is (at most 2^20 / channels, channels)
    for rate, block in _blocks(source, max_seconds, loss, strict):
        rates.append(rate)
        # the peak over all channels: in the mono mix, two channels may cancel
        peak = float(np.fmax.reduce(np.abs(block), axis=None, initial=peak))
        mixer = mixer or Mixer(rate)
        with np.errstate(all="ignore"):  # infinite samples are found by the check after the loop
            blocks.append(mixer.add(block))
    if mixer is not None:
        blocks.append(mixer.end())
    samples = torch.from_numpy(np.concatenate(blocks)) if blocks else torch.zeros(0)
    check_samples(samples, in_source)
    check_peak(peak, in_source)
    note = loss.note
    if mixer is not None:
        samples = mixer.audible(samples)
        note = "; ".join(filter(None, (note, mixer.note)))
    return Recording(resample(full_scale(samples), rates[-1], sample_rate), note)


def sound_seconds(path: str | os.PathLike[str]) -> float:
    """Measure a sound file's duration in seconds by decoding the whole file.

    Raises:
        InputError: For files that `load_audio` rejects.
    """
    in_source, frames, rate, peak = _in_source(path), 0, 1, 0.0
    for rate, block in _blocks(path, MAX_SECONDS, AudioLoss()):  # noqa: B007 - it is used after the loop
        with np.errstate(all="ignore"):  # infinite samples are found by the check that follows
            check_samples(torch.from_numpy(block.mean(axis=1)), in_source)
        peak = float(np.abs(block).max(initial=peak))
        frames += len(block)
    if not frames:
        check_samples(torch.zeros(0), in_source)
    check_peak(peak, in_source)
    return frames / rate


def _in_source(source: AudioSource) -> str:
    """Return text for the end of an error message that names the source: " in 'a.wav'" or " in the file object"."""
    if isinstance(source, (str, os.PathLike)):
        return f" in '{printable(os.fsdecode(source))}'"
    return " in the file object"


def _check_seconds(seconds: float, most: float, name: str) -> None:
    if seconds > most:
        raise InputError(
            f"`audio` must last at most {most:g} seconds, but {name} lasts at least {seconds:.4g}. "
            "Cut it into several files."
        )


class _UnseekableFile(soundfile.SoundFile):
    """A sound file that is read without seeking.

    soundfile itself seeks after each block, which fails for the GSM 6.10 encoding.
    """

    def seekable(self) -> bool:
        return False


def _blocks(
    source: AudioSource, max_seconds: float, loss: AudioLoss, strict: bool = False
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (sample rate in Hz, samples (T, channels)) for each block that the decoder returns of a sound file.

    The length in the header is not trusted: each block holds only the frames that the decoder returned.
    `SoundFile.blocks` would return as many frames as the header declares. If the file is cut off, the rest would be
    uninitialised memory, such as samples of another recording.

    Args:
        source: A path or a file object.
        max_seconds: Longer audio raises InputError.
        loss: Is filled with what cannot be read.
        strict: Whether a loss raises InputError at the end.
    """
    frames = 0
    path = os.fsdecode(source) if isinstance(source, (str, os.PathLike)) else ""
    name = f"'{printable(path)}'" if path else "the file object"
    content: int | io.BytesIO = io.BytesIO()
    with ExitStack() as stack:
        try:
            if isinstance(source, (str, os.PathLike)):
                content = stack.enter_context(open_regular(path, "audio"))
            else:
                content = _read_whole(source)
            for rate, block in stack.enter_context(closing(_decode(content, name, path, max_seconds, loss))):
                frames += len(block)
                _check_seconds(frames / rate, max_seconds, name)
                yield rate, block
            if strict and loss.note:
                raise InputError(
                    f"`audio` must be whole with `strict`, but {name} is damaged: {loss.note}. Record or download it "
                    "again, or leave `strict` out to read the rest."
                )
        except InputError:
            raise
        # an error of a decoder, of soundfile or of the system: in each case this file is the cause
        except Exception as error:
            reason = files.error_reason(error)
            if isinstance(error, soundfile.LibsndfileError):
                reason = error.error_string.rstrip(".") or f"error {error.code}"
            remedy = conversion(path)
            if path and os.path.isfile(path) and not os.path.getsize(path):
                reason, remedy = "it is empty", "Record or download it again."
            elif _is_text(content):  # also a web page or an error message that was saved under a sound's name
                reason, remedy = "it is a text file", "Name a recording."
            if path.lower().endswith(".raw"):
                remedy = "Pass samples without a header as an array with its `sample_rate`."
            raise InputError(
                f"`audio` must be a sound file that libsndfile can read, but {name} is not ({reason}). {remedy}"
            ) from error


def _decode(
    content: int | io.BytesIO, name: str, path: str, max_seconds: float, loss: AudioLoss
) -> Generator[tuple[int, np.ndarray]]:
    """Decode an open file with libsndfile, or with PyAV if libsndfile does not know the format or stops at damage.

    Args:
        content: A file descriptor, or the file's bytes.
        name: The file's name, for errors.
        path: Its path; "" for a file object.
        max_seconds: Longer audio raises InputError.
        loss: Is filled with what cannot be read.

    Yields:
        (sample rate in Hz, samples (T, channels)) for each block.
    """
    with _file(content) as opened:
        structure = read_structure(opened)
    container, resumed = container_of(content), _resumable_format(content, structure)
    if container:
        yield from container_blocks(content, container, name, path, max_seconds, structure, loss)
        return
    rate = frames = 0
    failure: soundfile.LibsndfileError | None = None
    if not (resumed and structure.damaged):  # libsndfile would leave damage out without a word, and lose time
        try:
            for rate, block in _libsndfile_blocks(content, name, path, max_seconds, structure, loss):
                frames += len(block)
                yield rate, block
        except soundfile.LibsndfileError as error:
            failure = error
        if failure is None:
            return
        if not resumed:
            raise failure
    decoded = 0
    try:
        for rate, block in _resume_blocks(content, resumed, name, max_seconds, structure, loss):
            decoded += len(block)
            if decoded > frames:  # libsndfile read the samples before these
                yield rate, block[-(decoded - frames) :]
    except (ImportError, *_decoder_errors()) as error:
        if failure is None and not decoded:
            loss.unplaced = True
            yield from _libsndfile_blocks(content, name, path, max_seconds, structure, loss)
        elif not frames and not decoded:
            raise failure or error from None
    if frames > decoded:
        loss.cut_off(frames / rate, None)


def _libsndfile_blocks(
    content: int | io.BytesIO, name: str, path: str, max_seconds: float, structure: FileStructure, loss: AudioLoss
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the sample rate and blocks (n, channels); at the end, note in `loss` what the file lacks."""
    if isinstance(content, int):
        os.lseek(content, 0, os.SEEK_SET)
    else:
        content.seek(0)
    opened: Any = _view(content, structure) or repair_header(content)
    with _UnseekableFile(opened, closefd=False) as file:
        if file.format not in READABLE:
            raise InputError(
                f"`audio` must be one of {', '.join(READABLE)}, but {name} is {file.format}. {conversion(path)}"
            )
        check_rate(file.samplerate, f" in {name}")
        declared = structure.seconds
        if file.frames != UNKNOWN_LENGTH:
            declared = max(file.frames / file.samplerate, declared or 0.0)
        if declared is not None and declared * MIN_BYTES_PER_SECOND <= _size(content):
            _check_seconds(declared, max_seconds, f"{name}, by its header,")
        # if a block of FLAC is damaged, all samples that were asked for at once are lost
        block_size = 4096 if file.format == "FLAC" else max(1, MAX_BLOCK_SAMPLES // file.channels)
        frames = 0
        while len(block := file.read(block_size, dtype="float32", always_2d=True)):
            frames += len(block)
            yield file.samplerate, block
        end = frames / file.samplerate
        if frames and file.format == "FLAC" and structure.seconds is not None:
            loss.cut_off(end, structure.seconds, FLAC_SLACK)
        elif frames and structure.cut:
            declared = file.frames / file.samplerate if structure.seconds else end * structure.share
            loss.cut_off(end, declared if declared > end else None)
        elif frames and structure.seconds is not None and file.frames != UNKNOWN_LENGTH:
            loss.cut_off(end, file.frames / file.samplerate, DECLARED_SLACK)


def _view(content: int | io.BytesIO, structure: FileStructure) -> PatchedFile | None:
    """Return a file as decoders should read it: without the bytes before it, and with patches; None: as it is."""
    if not structure.patches and not structure.start:
        return None
    return PatchedFile(content, structure.patches, start=structure.start)


def _resumable_format(content: int | io.BytesIO, structure: FileStructure) -> str:
    """Return FFmpeg's name of a file's format, if FFmpeg continues after damage in it; "" for another."""
    with _file(content) as file:
        return RESUMED.get(find_magic(file), "mp3" if structure.positions else "")


def _resume_blocks(
    content: int | io.BytesIO, kind: str, name: str, max_seconds: float, structure: FileStructure, loss: AudioLoss
) -> Iterator[tuple[int, np.ndarray]]:
    """Decode a damaged file with PyAV.

    Args:
        kind: FFmpeg's name of its format.

    Raises:
        ImportError: If PyAV is not installed.
    """
    av: Any = import_module("av")
    with (
        _view(content, structure) or _file(content) as file,
        av.open(file, format=kind, metadata_errors="replace") as opened,
    ):
        if opened.streams.audio:
            yield from _on_clock(av, opened, structure, loss, name, max_seconds, False)


def _decoder_errors() -> tuple[type[Exception], ...]:
    """Return the errors of FFmpeg; none if PyAV is not installed."""
    try:
        return (import_module("av").FFmpegError, ValueError)
    except ImportError:
        return ()


def _on_clock(
    av: Any, opened: Any, structure: FileStructure, loss: AudioLoss, name: str, max_seconds: float, container: bool
) -> Iterator[tuple[int, np.ndarray]]:
    return ClockDecoder(
        av,
        opened,
        structure,
        loss,
        check_rate=lambda rate: check_rate(rate, f" in {name}"),
        check_seconds=lambda seconds: _check_seconds(seconds, max_seconds, name),
        container=container,
    ).decode()


class _Content(io.BytesIO):
    """A file's bytes as a file object.

    A seek to before the beginning, which a damaged header may cause, does nothing instead of raising.
    """

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        try:
            return super().seek(offset, whence)
        except (ValueError, OverflowError):
            return self.tell()


def _read_whole(source: BinaryIO) -> io.BytesIO:
    """Read a file object to its end.

    Raises:
        InputError: If it has more than `MAX_BYTES`, so that an endless stream cannot fill the memory.
    """
    content = _Content()
    while piece := _read_piece(source):
        if not isinstance(piece, bytes):
            raise InputError("`audio` must be a binary file object, but gives text. Open it with mode 'rb'.")
        if content.tell() + len(piece) > MAX_BYTES:
            raise InputError(
                f"`audio` must hold at most {MAX_BYTES} bytes, but the file object gives more. Cut it into several."
            )
        content.write(piece)
    content.seek(0)
    return content


def _read_piece(source: BinaryIO) -> bytes:
    try:
        return source.read(1 << 20)
    except Exception as error:  # a closed file, or a class of the caller, may raise any
        raise unreadable_error("audio", "the file object", error, "Open it again, or give its path.") from error


def save_audio(path: str | os.PathLike[str], samples: Tensor | np.ndarray, sample_rate: int = SAMPLE_RATE) -> Path:
    """Write float samples (T,) to a sound file, clipped to [-1, 1].

    If writing fails, an existing file does not change.

    Args:
        path: The file; its suffix chooses the format; integer formats have 16 bits.
        sample_rate: In Hz.

    Returns:
        The path.

    Raises:
        InputError: For an unknown suffix, a rate that the format does not support, and samples that are not finite.
        OSError, with the path, if the system cannot write the file.
    """
    try:
        path = Path(os.fsdecode(path))
    except TypeError as error:
        raise InputError(f"`path` must be a path, but is {format_value(path)}. Name a file.") from error
    suffix = path.suffix.lower()
    if suffix not in WRITABLE:
        raise InputError(
            f"`path` must end in {', '.join(WRITABLE)}, but is '{printable(str(path))}'. Rename the output."
        )
    check_rate(sample_rate)  # above 200 kHz, libsndfile's Vorbis encoder crashes the process
    kind, subtype = WRITABLE[suffix]
    data = _writable(samples)  # with NaN, the MP3 encoder crashes the process
    content = io.BytesIO()  # encode into memory first, because the encoders do not report a full disk
    try:
        with soundfile.SoundFile(content, "w", sample_rate, 1, format=kind, subtype=subtype) as file:
            for start in range(0, len(data), 1 << 16):  # libsndfile's Vorbis encoder fails on minutes of sound at once
                file.write(data[start : start + (1 << 16)])
    except soundfile.SoundFileError as error:
        raise InputError(
            f"`path` must end in a format that takes sound at {sample_rate} Hz, but is '{printable(str(path))}' "
            f"({error}). Write .wav."
        ) from error
    return write_atomically(path, content.getvalue())


def _writable(samples: Tensor | np.ndarray) -> np.ndarray:
    """Convert samples to (T,) float32 within full scale.

    Raises:
        InputError: If they cannot be converted.
    """
    try:
        data = samples.detach().cpu().numpy() if isinstance(samples, Tensor) else np.asarray(samples)
        real = data.dtype.kind in "fiu"
    except Exception as error:  # a caller's object may raise anything when it is converted to an array
        raise InputError(f"`samples` must be an array, but is {format_value(samples)}. Pass (T,) floats.") from error
    if not real or data.ndim != 1:
        raise InputError(f"`samples` must be (T,) floats, but is {data.shape} of {data.dtype}. Pass one channel.")
    data = data.astype(np.float32, copy=False)
    if not np.isfinite(data).all():
        raise InputError("`samples` must be finite numbers, but holds NaN or infinity. Replace them.")
    return np.clip(data, -1.0, 1.0)


def container_of(content: int | io.BytesIO) -> str:
    """Recognise a container format by the file's first bytes.

    Args:
        content: A file descriptor, or bytes.

    Returns:
        FFmpeg's name of the format; "" if it is neither `MP4` nor `MATROSKA`.
    """
    with _file(content) as file:
        head = file.read(12)
    if head[4:8] == b"ftyp":
        return MP4
    return MATROSKA if head[:4] == b"\x1a\x45\xdf\xa3" else ""


def container_blocks(
    content: int | io.BytesIO,
    container: str,
    name: str,
    path: str,
    max_seconds: float,
    structure: FileStructure,
    loss: AudioLoss,
) -> Iterator[tuple[int, np.ndarray]]:
    """Decode the first audio track of a file to its end, on the file's clock.

    Yields (sample rate in Hz, samples (T, channels) float32) for each block.

    Args:
        content: A file descriptor, or the file's bytes.
        container: FFmpeg's name of the file's format.
        name: The file's name in errors.
        path: Its path; "" for a file object.
        max_seconds: Longer audio raises InputError.
        structure: What is damaged in the file.
        loss: Is filled with what cannot be read.

    Raises:
        InputError: If PyAV is not installed, or the file has no audio track or nothing of it can be read.
    """
    try:
        av: Any = import_module("av")
    except ImportError as error:
        raise InputError(
            f"`audio` must be a sound file that libsndfile can read, but {name} is {CONTAINER_NAMES[container]} "
            "file, which PyAV reads, and that is not installed. Run `pip install 'mmdec[av]'`. "
            f"{conversion(path, 'Or convert')}"
        ) from error
    try:
        loss.mistimed |= structure.mistimed
        with (
            _view(content, structure) or _file(content) as file,
            av.open(file, format=container, metadata_errors="replace") as opened,
        ):
            if not opened.streams.audio:
                raise InputError(f"`audio` must hold sound, but {name} has no audio track. Check the recording.")
            yield from _on_clock(av, opened, structure, loss, name, max_seconds, True)
    except av.FFmpegError as error:
        raise InputError(
            f"`audio` must be a whole file, but {name} is damaged: FFmpeg finds '{error.strerror}'. Record or "
            "download it again."
        ) from error


def conversion(path: str, convert: str = "Convert") -> str:
    """Return advice for an unreadable sound file: an FFmpeg command that converts it.

    The command is left out if the file's name is not printable.

    Args:
        convert: How the advice begins.
    """
    if not path or not path.isprintable():
        return f"{convert} it to 16-bit PCM wav."
    source = Path(path)
    target = source.with_suffix(".wav")
    if target == source or os.path.lexists(target):
        target = source.with_name(f"{source.stem}-converted.wav")
    source_name, target_name = (shlex.quote(_plain(str(file))) for file in (source, target))
    return f"{convert} it with `ffmpeg -i {source_name} {target_name}`."


def _plain(path: str) -> str:
    """Change a path so that FFmpeg does not take it for an option ("-i") or a URL ("a:b")."""
    return f"file:{path}" if path.startswith("-") or ":" in path else path


def _is_text(content: int | io.BytesIO) -> bool:
    """Return whether a file begins with text in UTF-8 without control characters."""
    with _file(content) as file:
        head = file.read(1024)
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return bool(text) and all(letter.isprintable() or letter.isspace() for letter in text.lstrip("\ufeff"))


def _size(content: int | io.BytesIO) -> int:
    return os.fstat(content).st_size if isinstance(content, int) else content.getbuffer().nbytes


def _file(content: int | io.BytesIO) -> BinaryIO:
    """Return a file object that reads `content` from its beginning. Closing the object does not close `content`."""
    if isinstance(content, int):
        os.lseek(content, 0, os.SEEK_SET)
        return open(content, "rb", closefd=False)
    return io.BytesIO(content.getbuffer())
