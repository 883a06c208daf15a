"""Tests sound files whose header declares a wrong size: the samples are those of the file with the right header."""

import io
import itertools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from mmdec.errors import InputError
from mmdec.io import audio
from mmdec.io.audio.headers import PatchedFile, repair_header
from mmdec.io.audio.pipe import PipedSound, decode_samples, is_wav, looks_like_a_file, stream_pieces, wav_stream
from mmdec.io.audio.samples import SAMPLE_RATE as RATE
from tests.conftest import buzz
from tests.support.grid import slow_but

LIST = b"LIST" + struct.pack("<I", 26) + b"INFOISFT\x0e\0\0\0Lavf58.29.100\0"
BEXT = b"bext" + struct.pack("<I", 602) + bytes(602)
ODD = b"id3 " + struct.pack("<I", 7) + b"ID3\4\0\0\1"
W64_FACT = b"fact\xf3\xac\xd3\x11\x8c\xd1\x00\xc0\x4f\x8e\xdb\x8a" + struct.pack("<QQ", 32, 4800)


@dataclass(frozen=True)
class Format:
    """Where a format declares the size of its samples."""

    name: str  # libsndfile's
    mark: bytes  # the size is behind it
    behind: int  # number of bytes between the beginning of the mark and the size
    size: str  # of `struct`
    metadata: tuple[bytes, ...] = ()  # chunks that may follow the samples
    counted: int = 0  # number of bytes that the size counts in addition to the samples


FORMATS = (
    Format("WAV", b"data", 4, "<I", (LIST, BEXT + LIST, ODD, ODD + b"\0")),
    Format("RF64", b"ds64", 16, "<Q", (LIST, BEXT + LIST, ODD)),
    Format("W64", b"data\xf3", 16, "<Q", (W64_FACT,), 24),
    Format("AIFF", b"SSND", 4, ">I", (b"ANNO\0\0\0\4abcd", b"ID3 \0\0\0\3abc\0"), 8),
    Format("CAF", b"data", 4, ">q", (b"info" + struct.pack(">q", 8) + b"\0\0\0\1a\0b\0",), 4),
    Format("AU", b".snd", 8, ">I"),
)
LIES = {
    "0": lambda true: 0,
    "-1": lambda true: -1,
    "1000": lambda true: 1000,
    "odd": lambda true: 1001,
    "a frame less": lambda true: true - 8,
    "a byte more": lambda true: true + 1,
    "more": lambda true: true + 10**6,
    "2 GB": lambda true: 2**31,
}


def encoded(form: Format, subtype: str, samples: int = 4800, channels: int = 1) -> bytes:
    content = io.BytesIO()
    sound = np.stack([0.9**channel * buzz(samples / RATE, 5) for channel in range(channels)], 1)
    soundfile.write(content, sound, RATE, format=form.name, subtype=subtype)
    return content.getvalue()


def with_size(content: bytes, form: Format, change: Callable[[int], int]) -> bytes:
    """Return the same file, which declares another size."""
    changed, size = bytearray(content), struct.Struct(form.size)
    at = changed.index(form.mark) + form.behind
    (true,) = size.unpack_from(changed, at)
    value = change(true)
    size.pack_into(changed, at, value if form.size[-1] == "q" else value % 2 ** (8 * size.size))
    return bytes(changed)


def by_both_ways(content: bytes, path: Path) -> torch.Tensor:
    """Read a file by its path and as an object."""
    path.write_bytes(content)
    result = audio.load_audio(path)
    assert torch.equal(audio.load_audio(io.BytesIO(content)), result)
    assert audio.sound_seconds(path) == len(result) / RATE
    return result


@pytest.mark.parametrize(
    ("form", "subtype", "lie"),
    slow_but(itertools.product(FORMATS, ("PCM_16", "PCM_24"), LIES), slice(None, None, 5)),
    ids=lambda value: getattr(value, "name", value),
)
def test_a_wrong_size_costs_no_sample_and_adds_none(form: Format, subtype: str, lie: str, tmp_path: Path) -> None:
    right = encoded(form, subtype, 4801, 1)  # an odd number, so that 24 bits need padding
    expected = audio.load_audio(io.BytesIO(right))
    assert len(expected) == 4801
    for metadata in (b"", *form.metadata):
        content = with_size(right + metadata, form, LIES[lie])
        assert torch.equal(by_both_ways(content, tmp_path / "x"), expected), metadata[:4]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_metadata_behind_the_samples_is_not_read_as_sound(form: Format, tmp_path: Path) -> None:
    right = encoded(form, "PCM_16", channels=2)
    expected = audio.load_audio(io.BytesIO(right))
    for metadata in form.metadata:
        assert torch.equal(by_both_ways(right + metadata, tmp_path / "x"), expected)


@pytest.mark.parametrize("form", FORMATS[:5], ids=lambda form: form.name)
def test_a_right_header_is_not_touched(form: Format) -> None:
    for metadata in (b"", *form.metadata[: 0 if form.name == "W64" else None]):  # those of W64 must be hidden
        content = io.BytesIO(encoded(form, "PCM_16") + metadata)
        assert repair_header(content) is content


@pytest.mark.parametrize("subtype", ["ULAW", "FLOAT", "PCM_U8", "IMA_ADPCM"])
def test_other_wav_encodings_are_read(subtype: str) -> None:
    right = encoded(FORMATS[0], subtype)
    expected = audio.load_audio(io.BytesIO(right))
    for change in LIES.values():
        result = audio.load_audio(io.BytesIO(with_size(right, FORMATS[0], change)))
        assert torch.equal(result[: len(expected)], expected)
        assert len(result) <= len(expected) + 1000


def test_the_size_of_the_whole_file_does_not_matter() -> None:
    content = bytearray(with_size(encoded(FORMATS[0], "PCM_16"), FORMATS[0], lambda _: 0))
    for riff in (0, 36, 1036, 0xFFFFFFFF):
        struct.pack_into("<I", content, 4, riff)
        assert len(audio.load_audio(io.BytesIO(content))) == 4800


def test_a_file_without_samples_stays_empty() -> None:
    with pytest.raises(InputError, match="at least one sample, but is empty"):
        audio.load_audio(io.BytesIO(encoded(FORMATS[0], "PCM_16", 0) + LIST))


def test_a_patched_file_reads_as_a_file_does() -> None:
    content = bytes(range(100))
    expected = io.BytesIO(content[:10] + b"abcd" + content[14:90])
    result = PatchedFile(io.BytesIO(content), {10: b"abcd"}, 90)
    for offset, whence, size in ((0, 0, 12), (0, 1, 1), (-3, 2, 9), (8, 0, 3), (12, 0, 100), (11, 0, 1), (95, 0, 4)):
        assert result.seek(offset, whence) == expected.seek(offset, whence)
        assert result.read(size) == expected.read(size)
        assert result.tell() == expected.tell()
    assert result.seek(-1000, 1) == 0  # a damaged header may ask for it


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24"])
@pytest.mark.parametrize("form", FORMATS[:2], ids=lambda form: form.name)
def test_a_pipe_reads_what_the_file_has(form: Format, subtype: str, lie: str) -> None:
    right = encoded(form, subtype, 4801)
    expected = audio.load_audio(io.BytesIO(right))
    assert np.array_equal(through_pipe(with_size(right, form, LIES[lie])), expected)
    for metadata in form.metadata:
        assert np.array_equal(through_pipe(right + metadata), expected)


def through_pipe(content: bytes) -> np.ndarray:
    stream = io.BytesIO(content)
    head = stream.read(12)
    assert is_wav(head)
    sound = wav_stream(head, stream)
    return np.concatenate([*stream_pieces(sound, stream)])


def test_raw_samples_with_half_a_sample_are_refused() -> None:
    with pytest.raises(InputError, match="whole sample of 2 bytes, but ends with 1 bytes"):
        list(stream_pieces(PipedSound(RATE, 1, "s16", None, b""), io.BytesIO(bytes(11))))
    assert len(decode_samples(bytes(10), "s16")) == 5


@pytest.mark.parametrize("form", FORMATS[2:], ids=lambda form: form.name)
def test_other_formats_of_a_pipe_are_read_whole(form: Format) -> None:
    assert looks_like_a_file(encoded(form, "PCM_16")[:12])
