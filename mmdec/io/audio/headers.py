"""Repairs sound files whose header declares a wrong size of the samples, before libsndfile reads them.

A recorder that crashed or wrote to a pipe leaves a size of 0, of 0xFFFFFFFF, or of the moment when it was last filled
in. libsndfile believes it. Here the size is believed only if the samples end at the end of the file, or are followed by
chunks that do: metadata after the samples is not sound. Otherwise the samples go on to the end of the file, or to the
metadata there. The file itself is not changed or copied: libsndfile reads it through an object that replaces the bytes
of the wrong sizes.
"""

from __future__ import annotations

import io
import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

MAX_CHUNKS = 10_000  # maximum number of chunks that are followed; a file with more is left as it is
MAX_TAIL = 1 << 20  # maximum bytes at the end of a file in which chunks of metadata are looked for
RIFF_TAIL = (
    b"LIST", b"INFO", b"id3 ", b"ID3 ", b"bext", b"cart", b"fact", b"cue ", b"plst", b"smpl", b"inst", b"acid",
    b"iXML", b"axml", b"chna", b"JUNK", b"junk", b"PAD ", b"FLLR", b"PEAK", b"_PMX", b"afsp", b"umid", b"DISP",
    b"levl", b"minf", b"elm1", b"regn", b"strc", b"MEXT", b"ResU", b"SAUR", b"SMED", b"labl", b"note", b"ltxt",
)  # fmt: skip
AIFF_TAIL = (
    b"COMM", b"FVER", b"MARK", b"COMT", b"INST", b"MIDI", b"AESD", b"APPL", b"NAME", b"AUTH", b"(c) ", b"ANNO",
    b"ID3 ", b"PEAK", b"CHAN", b"SAXL", b"bext", b"cart", b"basc", b"trns", b"cate",
)  # fmt: skip
CAF_TAIL = (
    b"pakt", b"info", b"strg", b"mark", b"regn", b"inst", b"midi", b"ovvw", b"peak", b"umid", b"edct", b"free",
    b"uuid", b"chan", b"kuki",
)  # fmt: skip
UNKNOWN32 = 0xFFFFFFFF


@final
@dataclass(frozen=True)
class ChunkLayout:
    """How a format writes its chunks: a name, a size, and the content."""

    first: int  # offset of the first chunk
    name: int  # number of bytes of a name
    size: struct.Struct  # of the size that follows the name
    sound: bytes  # name of the chunk with the samples
    tail: tuple[bytes, ...]  # names of chunks that may follow the samples
    own: int = 0  # number of bytes of name and size that the size counts
    align: int = 2  # a chunk begins at a multiple of this many bytes after the first one
    before: int = 0  # number of bytes in the chunk before its samples

    @property
    def head(self) -> int:
        """The number of bytes of a name and a size."""
        return self.name + self.size.size


RIFF = ChunkLayout(12, 4, struct.Struct("<I"), b"data", RIFF_TAIL)
RIFX = ChunkLayout(12, 4, struct.Struct(">I"), b"data", RIFF_TAIL)
AIFF = ChunkLayout(12, 4, struct.Struct(">I"), b"SSND", AIFF_TAIL, before=8)
CAF = ChunkLayout(8, 4, struct.Struct(">q"), b"data", CAF_TAIL, align=1, before=4)
W64_NAME = b"\xf3\xac\xd3\x11\x8c\xd1\x00\xc0\x4f\x8e\xdb\x8a"  # how the name of a standard chunk of W64 ends
W64_TAIL = (
    b"list\x2f\x91\xcf\x11\xa5\xd6\x28\xdb\x04\xc1\x00\x00",
    *(name.lower() + W64_NAME for name in RIFF_TAIL if name != b"LIST"),
)
W64 = ChunkLayout(40, 16, struct.Struct("<Q"), b"data" + W64_NAME, W64_TAIL, own=24, align=8)

Content = int | io.BytesIO  # an open file's descriptor, or a file's bytes


def repair_header(content: Content) -> Content | PatchedFile:
    """Return what libsndfile should read: `content` itself, or the same with true sizes if its header lies.

    Args:
        content: A file's descriptor, or its bytes. Formats: RIFF and RIFX wav, RF64, W64, AIFF and AIFC, CAF, AU.
    """
    return _patched_sizes(content) or content


def _patched_sizes(content: Content) -> PatchedFile | None:
    """Return a file with true sizes; None if the header is right, or of another format."""
    head = _read(content, 0, 40)
    kind = head[8:12]
    if head[:4] in (b".snd", b"dns."):
        return _au(content, head)
    if head[:4] == b"RF64" and kind == b"WAVE":
        return _rf64(content)
    layout = None
    if head[:4] in (b"RIFF", b"RIFX") and kind == b"WAVE":
        layout = RIFF if head[:4] == b"RIFF" else RIFX
    elif head[:4] == b"FORM" and kind in (b"AIFF", b"AIFC"):
        layout = AIFF
    elif head[:4] == b"caff":
        layout = CAF
    elif head[:4] == b"riff" and head[24:40] == b"wave" + W64_NAME:
        layout = W64
    offset = None if layout is None else _sound_chunk(content, layout)
    if layout is None or offset is None:
        return None
    start = offset + layout.head
    declared = layout.size.unpack(_read(content, offset + layout.name, layout.size.size))[0] - layout.own
    end = _end_of_sound(content, layout, start, declared)
    if layout is W64:  # libsndfile reads on to the end of a W64 file, so that the metadata must be hidden
        end = start + declared if end is None else end
        size = {offset + layout.name: layout.size.pack(end - start + layout.own)}
        return PatchedFile(content, size, end) if end < _length(content) or start + declared != end else None
    if end is None:
        return None
    largest = UNKNOWN32 if layout.size.size == 4 else 2**63 - 1
    return PatchedFile(content, {offset + layout.name: layout.size.pack(min(end - start, largest))})


def _rf64(content: Content) -> PatchedFile | None:
    """Repair an RF64 file. Its chunk ds64 has the sizes."""
    wide, offset = _sound_chunk(content, RIFF, b"ds64"), _sound_chunk(content, RIFF)
    if wide is None or offset is None:
        return None
    start, sizes = offset + RIFF.head, wide + RIFF.head
    _, declared, _ = struct.unpack("<QQQ", _read(content, sizes, 24).ljust(24, b"\0"))
    end = _end_of_sound(content, RIFF, start, declared)
    if end is None:
        return None
    patch = struct.pack("<QQQ", _length(content) - 8, end - start, 0)  # no count of frames, which could be wrong, too
    return PatchedFile(content, {sizes: patch, offset + RIFF.name: struct.pack("<I", UNKNOWN32)})


def _au(content: Content, head: bytes) -> PatchedFile | None:
    """Repair an AU file, in which nothing follows the samples."""
    if len(head) < 24:
        return None
    order = ">" if head[:4] == b".snd" else "<"
    start, declared = struct.unpack(f"{order}II", head[4:12])
    there = _length(content) - start
    if there <= 0 or there == declared:
        return None
    return PatchedFile(content, {8: struct.pack(f"{order}I", min(there, UNKNOWN32))})


def _sound_chunk(content: Content, layout: ChunkLayout, name: bytes = b"") -> int | None:
    """Return the offset of the chunk with the samples; None if there is none.

    Args:
        name: Of another chunk to look for.
    """
    return next(
        (
            offset
            for offset, chunk_name, _ in _chunks(content, layout, layout.first)
            if chunk_name == (name or layout.sound)
        ),
        None,
    )


def _chunks(content: Content, layout: ChunkLayout, offset: int) -> Iterator[tuple[int, bytes, int]]:
    """Yield (offset, name, offset after the content) of each chunk from an offset on, as far as chunks are whole."""
    for _ in range(MAX_CHUNKS):
        head = _read(content, offset, layout.head)
        if len(head) < layout.head:
            return
        size = layout.size.unpack(head[layout.name :])[0] - layout.own
        yield offset, head[: layout.name], offset + layout.head + size
        if size < 0:
            return
        offset = _align(layout, offset + layout.head + size)


def _align(layout: ChunkLayout, offset: int) -> int:
    return offset + (layout.first - offset) % layout.align


def _end_of_sound(content: Content, layout: ChunkLayout, start: int, declared: int) -> int | None:
    """Return the offset at which the chunk of the samples really ends; None if that is what it declares.

    Args:
        start: Offset of the chunk's content.
        declared: Its size.
    """
    length, end = _length(content), start + declared
    if declared >= layout.before and end <= length:
        padding = _read(content, end, layout.align)
        if len(padding) < layout.align and not any(padding):
            return None
        aligned = _align(layout, end)
        # some programs leave the padding out
        places = {end} if any(_read(content, end, aligned - end)) else {end, aligned}
        if any(_ends_in_chunks(content, layout, offset) for offset in places):
            return None
    real = _tail(content, layout, start + layout.before)
    return None if real == end else real


def _ends_in_chunks(content: Content, layout: ChunkLayout, offset: int) -> bool:
    """Return whether chunks follow each other from an offset to the end of the file."""
    length = _length(content)
    for _, name, end in _chunks(content, layout, offset):
        if not all(32 <= byte < 127 for byte in name[:4]) or end > length:
            return False
        if length - end < layout.align:  # at the end but for padding
            return True
    return False


def _tail(content: Content, layout: ChunkLayout, start: int) -> int:
    """Return the offset of the chunks at the end of the file that are metadata; without them, the file's length.

    Args:
        start: Offset of the first sample.
    """
    length = _length(content)
    since = max(start, length - MAX_TAIL)
    last = _read(content, since, length - since)
    for match in re.finditer(b"|".join(map(re.escape, layout.tail)), last):
        if _ends_in_chunks(content, layout, since + match.start()):
            return since + match.start()
    return length


def _length(content: Content) -> int:
    return os.fstat(content).st_size if isinstance(content, int) else content.getbuffer().nbytes


def _read(content: Content, offset: int, size: int) -> bytes:
    """Read up to `size` bytes at an offset; the position of `content` is 0 afterwards."""
    if isinstance(content, io.BytesIO):
        return bytes(content.getbuffer()[offset : offset + size])
    try:
        os.lseek(content, offset, os.SEEK_SET)
        return os.read(content, size)
    finally:
        os.lseek(content, 0, os.SEEK_SET)


@final
class PatchedFile(io.RawIOBase):
    """A file that is read with some of its bytes replaced.

    Args:
        content: A file's descriptor, or its bytes.
        patches: Offset -> the bytes that are read there.
        length: The file ends after this many bytes; None: at its own end.
        start: The file begins at this offset; the other offsets count from it.
    """

    def __init__(
        self, content: Content, patches: Mapping[int, bytes], length: int | None = None, start: int = 0
    ) -> None:
        self._content, self._patches, self._offset, self._start = content, patches, 0, start
        self._length = _length(content) - start if length is None else length

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._offset

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._offset, os.SEEK_END: self._length}[whence]
        self._offset = max(base + offset, 0)
        return self._offset

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        piece = bytearray(
            _read(self._content, self._start + self._offset, max(min(len(view), self._length - self._offset), 0))
        )
        for offset, patch in self._patches.items():
            first, last = max(offset, self._offset), min(offset + len(patch), self._offset + len(piece))
            if first < last:
                piece[first - self._offset : last - self._offset] = patch[first - offset : last - offset]
        view[: len(piece)] = piece
        self._offset += len(piece)
        return len(piece)
