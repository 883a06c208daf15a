"""Finds where a sound file is cut off or damaged, and says in words what could not be read.

The evidence is the sizes and checksums that the file itself contains.

Only the file's structure is read here; the samples are decoded elsewhere. A file whose structure is not known, or that
declares no sizes, counts as whole.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from mmdec.io.audio.samples import MAX_SECONDS

# Sizes in bytes that programs declare if they do not know the length; so is 0. Some programs subtract a header.
UNKNOWN_SIZES = (2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1)
HEADER_BYTES = 2**16  # maximum bytes of such a header
MAX_LISTED = 3  # maximum number of gaps that a note lists
SHORTEST_LOSS = 0.01  # seconds; a shorter difference between timestamps and samples is rounding, not a loss
# seconds by which the durations of an MP4's track, of its media and of its table of timestamps may differ
TABLE_SLACK = 0.25
MAX_HEADER = 1 << 24  # maximum bytes of an MP4's header that are read
MAX_PLACES = 1000  # maximum number of damaged places that are searched for what follows them
MAX_JUNK = 1 << 16  # bytes at the beginning of a file of no known format in which an MP3 is searched for
MIN_MP3_FRAMES = 8  # consecutive frames that prove an MP3 after such bytes
MAX_MP3_BYTES = 2**29  # an MP3 is read into memory; a larger one is not examined
BOX_NAME = re.compile(rb"[A-Za-z0-9\xa9 ]{4}")  # the name of a chunk or box


@dataclass
class FileStructure:
    """What a file's structure says about its being whole."""

    cut: bool = False  # whether the file ends before its declared end
    share: float = 1.0  # declared bytes of samples / bytes of samples that are there; 1: unknown, or nothing is missing
    seconds: float | None = None  # duration that a FLAC, an MP3, or an MP4 of fragments declares; None: none
    start: int = 0  # position at which an MP3 begins after other bytes; all other positions count from it
    # byte position -> bytes that decoders should read there
    patches: dict[int, bytes] = field(default_factory=lambda: {})
    block: int = 0  # samples of a FLAC's block, if all have the same length
    mistimed: bool = False  # whether an MP4's table of timestamps is damaged; `patches` have one without holes
    fragmented: bool = False  # whether an MP4 consists of fragments
    # ranges of bytes (start, end) that do not have the format's structure
    damaged: list[tuple[int, int]] = field(default_factory=lambda: [])
    # MP3: byte position of each frame; and its time in seconds, in which frames that are missing before it are counted
    positions: list[int] = field(default_factory=lambda: [])
    times: list[float] = field(default_factory=lambda: [])

    def time_at(self, position: int) -> float | None:
        """Return the time in seconds of the MP3 frame at a byte position; None for another format."""
        index = bisect_left(self.positions, position)
        return self.times[min(index, len(self.times) - 1)] if self.times else None

    def overlaps_damage(self, start: int, end: int) -> bool:
        """Return whether a damaged range overlaps the bytes from `start` to `end`."""
        first = bisect_left(self.damaged, start, key=lambda range_: range_[1])
        return first < len(self.damaged) and self.damaged[first][0] < end


@dataclass
class AudioLoss:
    """What of a recording could not be read. Filled in while it is decoded."""

    gaps: list[tuple[float, float]] = field(default_factory=lambda: [])  # (start, length), both in seconds
    end: float | None = None  # where the recording is cut off, in seconds; None: it is not
    whole: float | None = None  # seconds that the file declares; None: unknown
    mistimed: bool = False  # whether damaged timestamps were ignored
    unplaced: bool = False  # whether parts are missing whose place and length are not known

    def cut_off(self, end: float, whole: float | None, slack: float = 0.0) -> None:
        """Record that the file is cut off.

        Args:
            end: Seconds that were read.
            whole: Seconds that it declares; None: unknown.
            slack: Seconds that may be missing. A duration that no recording may have was never filled in.
        """
        if whole is not None and whole > MAX_SECONDS:
            return
        if whole is None or whole - end > slack:
            self.end, self.whole = end, whole

    @property
    def note(self) -> str:
        """Describe the place and the length of what is missing; "" if nothing is."""
        parts = list[str]()
        if self.gaps:
            gaps = ", ".join(f"{_seconds(length)} s at {_seconds(start)} s" for start, length in self.gaps[:MAX_LISTED])
            more = len(self.gaps) - MAX_LISTED
            if more > 0:
                gaps += f" and {more} more ({_seconds(sum(length for _, length in self.gaps))} s in all)"
            parts.append(f"{gaps} could not be read")
        if self.mistimed:
            parts.append("timestamps are damaged and were ignored, so that times may be wrong")
        if self.unplaced:
            parts.append("parts of the file could not be read, so that times may be early; mmdec[av] would place them")
        if self.end is not None and self.whole is not None:
            end, whole = _seconds(self.end), _seconds(self.whole)
            if end == whole:
                end, whole = f"{self.end:.3f}", f"{self.whole:.3f}"
            parts.append(f"the file ends at {end} s of {whole} s")
        elif self.end is not None:
            parts.append(f"the file was cut off at {_seconds(self.end)} s")
        return "; ".join(parts)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 1 or seconds == 0 else f"{seconds:.2g}"


def read_structure(file: BinaryIO) -> FileStructure:
    """Read a sound file's structure.

    Args:
        file: The open file; it is read from its beginning, and left at any position.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(16)
    file.seek(0)
    read = next((read for recognises, read in READERS if recognises(head)), None)
    try:
        if head[:3] == b"ID3":  # a FLAC may have the tag, too
            file.seek(_after_tags(file))
            read = _flac if file.read(4) == b"fLaC" else _mp3
            file.seek(0)
        if read is None:
            start = _hidden_mp3(file.read(MAX_JUNK))
            file.seek(max(start, 0))
            return FileStructure() if start < 0 else replace(_mp3(file, size - start), start=start)
        return read(file, size)
    except (struct.error, IndexError, ValueError, OverflowError, OSError):
        # a damaged header: the decoder decides about it
        return FileStructure()


def is_unknown_size(declared: int, wide: bool = False) -> bool:
    """Return whether a declared size in bytes comes from a program that did not know the length.

    Args:
        wide: Whether the field has 64 bits; in 32 bits, such programs also write sizes near 2^31 and above.
    """
    if not wide and declared >= 2**31 - HEADER_BYTES:
        return True
    return declared <= 0 or declared >= 2**62 or any(0 <= size - declared < HEADER_BYTES for size in UNKNOWN_SIZES)


def compare_size(declared: int, there: int, block: int = 1, wide: bool = False) -> FileStructure:
    """Compare the declared bytes of samples with those that are there.

    Args:
        block: Bytes of a frame; less than one frame may be missing.
        wide: Whether the declared size has 64 bits.
    """
    if is_unknown_size(declared, wide) or there <= 0 or declared - there < max(block, 2):
        return FileStructure()
    return FileStructure(cut=True, share=declared / there)


def _riff(file: BinaryIO, size: int) -> FileStructure:
    """Read RIFF and RF64, and RIFX and AIFF, whose numbers are big-endian."""
    form = file.read(12)
    order = ">" if form[:4] in (b"FORM", b"RIFX") else "<"
    long, block = None, 1
    while len(head := file.read(8)) == 8:
        name, length = struct.unpack(f"{order}4sI", head)
        offset = file.tell()
        if name in (b"data", b"SSND"):
            wide = name == b"data" and length == 0xFFFFFFFF and long is not None
            return compare_size(long if wide and long is not None else length, size - offset, block, wide)
        content = file.read(min(length, 64))
        if name == b"ds64":
            long = struct.unpack("<Q", content[8:16])[0]
        elif name == b"fmt ":
            block = struct.unpack(f"{order}H", content[12:14])[0]
        file.seek(offset + length + length % 2)
    return FileStructure()


def _w64(file: BinaryIO, size: int) -> FileStructure:
    file.seek(40)
    while len(head := file.read(24)) == 24:
        length = struct.unpack("<Q", head[16:])[0] - 24
        offset = file.tell()
        if head[:4] == b"data":
            return compare_size(length, size - offset, wide=True)
        if length < 0:
            break
        file.seek(offset + length + -length % 8)
    return FileStructure()


def _caf(file: BinaryIO, size: int) -> FileStructure:
    file.seek(8)
    while len(head := file.read(12)) == 12:
        name, length = struct.unpack(">4sq", head)
        if name == b"data":
            return compare_size(length, size - file.tell(), wide=True)
        if length < 0:
            break
        file.seek(length, os.SEEK_CUR)
    return FileStructure()


def _au(file: BinaryIO, size: int) -> FileStructure:
    head = file.read(12)
    start, length = struct.unpack(">II" if head[:4] == b".snd" else "<II", head[4:])
    return compare_size(length, size - start)


def _nist(file: BinaryIO, size: int) -> FileStructure:
    head = file.read(1024)
    start = int(head[8:16])
    fields = dict(re.findall(rb"(\w+) -i (\d+)", head))
    frame = int(fields.get(b"channel_count", b"1")) * int(fields.get(b"sample_n_bytes", b"0"))
    if b"shorten" in head:
        return FileStructure()
    return compare_size(int(fields.get(b"sample_count", b"0")) * frame, size - start, frame)


# each byte with its bits in reverse order: Ogg's checksum is zlib's with the bits the other way round
_REVERSED = bytes(int(f"{value:08b}"[::-1], 2) for value in range(256))


def _ogg_checksum(page: bytes) -> int:
    reflected = zlib.crc32(page.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int.from_bytes(reflected.to_bytes(4, "little").translate(_REVERSED), "big")


def _ogg(file: BinaryIO, size: int) -> FileStructure:
    """Go from page to page, and find damaged ranges and a cut end."""
    structure, sequence = FileStructure(), dict[int, int]()
    offset = lost = tries = 0  # position; where the current damaged range begins
    while offset < size:
        page = _ogg_page(file, offset)
        if page is None:
            tries += 1
            if tries > MAX_PLACES:
                break
            following = _find_next(file, offset + 1, b"OggS")
            if following is None:
                break
            offset = following
            continue
        flags, serial, number = struct.unpack("<B8xII", page[5:22])
        jumped = not flags & 2 and serial in sequence and number != sequence[serial] + 1
        if offset > lost or jumped:
            structure.damaged.append((min(lost, offset - 1), offset))
        sequence[serial] = number
        offset += len(page)
        lost = offset
    # The flag "end of stream" says nothing: browsers and programs that record live streams never set it.
    structure.cut = bool(sequence) and _starts(file, lost, b"OggS")
    return structure


def _ogg_page(file: BinaryIO, offset: int) -> bytes | None:
    """Read an Ogg page with a right checksum; None if there is none at this position."""
    file.seek(offset)
    head = file.read(27)
    if len(head) < 27 or head[:4] != b"OggS":
        return None
    table = file.read(head[26])
    body = file.read(sum(table))
    page = head + table + body
    if len(body) < sum(table) or len(table) < head[26]:
        return None
    blank = page[:22] + bytes(4) + page[26:]
    return page if _ogg_checksum(blank) == int.from_bytes(page[22:26], "little") else None


def _starts(file: BinaryIO, offset: int, name: bytes) -> bool:
    """Return whether the rest of a file from `offset` begins as `name` does."""
    file.seek(offset)
    rest = file.read(len(name))
    return bool(rest) and name.startswith(rest)


def _find_next(file: BinaryIO, offset: int, *names: bytes) -> int | None:
    """Return the position of the first of `names`, all of four bytes, at or after `offset`; None if there is none."""
    file.seek(offset)
    overlap = b""
    while piece := file.read(1 << 16):
        whole = overlap + piece
        places = [place for name in names if (place := whole.find(name)) >= 0]
        if places:
            return offset + min(places)
        overlap = whole[-3:]
        offset += len(whole) - len(overlap)
    return None


def _after_tags(file: BinaryIO) -> int:
    """Return the position after the ID3 tags at a file's beginning."""
    offset = 0
    while True:
        file.seek(offset)
        following = offset + _tag(file.read(10), 0)
        if following == offset:
            return offset
        offset = following


def find_magic(file: BinaryIO) -> bytes:
    """Return the first four bytes of a sound file, those after its ID3 tags."""
    file.seek(_after_tags(file))
    return file.read(4)


def _flac(file: BinaryIO, size: int) -> FileStructure:
    """Read a FLAC's number of samples, and hide it: libsndfile reads no more than it declares."""
    offset = _after_tags(file)
    file.seek(offset)
    head = file.read(26)
    if len(head) < 26 or head[4] & 0x7F:
        return FileStructure()
    rate, total = int.from_bytes(head[18:21], "big") >> 4, int.from_bytes(head[21:26], "big") & 2**36 - 1
    patches = {offset + 21: bytes([head[21] & 0xF0, 0, 0, 0, 0])}
    seconds, block = total / rate if rate and total else None, int.from_bytes(head[8:10], "big")
    return FileStructure(seconds=seconds, block=block if head[8:10] == head[10:12] else 0, patches=patches)


def flac_sample(packet: bytes, block: int) -> int | None:
    """Return the position, in samples, that a FLAC's frame declares; None if it declares none.

    Args:
        block: Samples of a block, if all have the same length.
    """
    if len(packet) < 11 or packet[0] != 0xFF or packet[1] & 0xFE != 0xF8:
        return None
    more = max(7 - (packet[4] ^ 0xFF).bit_length(), 0) if packet[4] & 0x80 else 0  # bytes after the first, as in UTF-8
    number = packet[4] & (0x7F if not more else 0x7F >> more)
    for byte in packet[5 : 5 + more]:
        number = number << 6 | byte & 0x3F
    if packet[1] & 1:  # the blocks differ in length, so that samples are counted
        return number
    return number * block if block else None


# MPEG audio: version bits -> rates in Hz, by the header's rate bits; 0 is MPEG 2.5, 2 is MPEG 2, 3 is MPEG 1
MPEG_RATES = {0: (11025, 12000, 8000), 2: (22050, 24000, 16000), 3: (44100, 48000, 32000)}
# layer III's bit rates in kbit/s, for MPEG 1 and for MPEG 2 and 2.5
MPEG1_BITS = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
MPEG2_BITS = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)


def _mp3_frame(head: bytes) -> tuple[int, int] | None:
    """Read the header of an MPEG layer III frame.

    Returns:
        (bytes of the frame, what all frames of a file share); None if it is not a header.
    """
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE6 != 0xE2:
        return None
    version, bits, rate = head[1] >> 3 & 3, head[2] >> 4, head[2] >> 2 & 3
    if version == 1 or rate == 3 or not 0 < bits < 15:
        return None
    factor = 144 if version == 3 else 72
    length = factor * 1000 * (MPEG1_BITS if version == 3 else MPEG2_BITS)[bits] // MPEG_RATES[version][rate]
    return length + (head[2] >> 1 & 1), version << 2 | rate


def _mp3(file: BinaryIO, size: int) -> FileStructure:
    """Go from frame to frame, and find damaged ranges, a cut end and the duration that was declared."""
    if size > MAX_MP3_BYTES:
        return FileStructure()
    content = file.read()
    offset = lost = _mp3_sync(content, _tag(content, 0), None)
    if offset < 0:
        return FileStructure()
    kind = (_mp3_frame(content[offset : offset + 4]) or (0, 0))[1]
    seconds = (1152 if kind >> 2 == 3 else 576) / MPEG_RATES[kind >> 2][kind & 3]  # duration of a frame
    count_at = _xing(content, offset)
    declared = None if count_at is None else int.from_bytes(content[count_at : count_at + 4], "big")
    if declared is not None and not 0 < declared * seconds <= MAX_SECONDS:  # it was never filled in, or is damaged
        declared = None
    structure, length, truncated = FileStructure(), 0, False
    places = list[int]()  # for each damaged range, the number of frames before it
    while offset < size and len(structure.damaged) < MAX_PLACES:
        if content.startswith((b"ID3", b"TAG", b"APETAGEX"), offset):
            offset = lost = _tag(content, offset)
            continue
        frame = _mp3_frame(content[offset : offset + 4])
        if frame is None or frame[1] != kind:
            offset = _mp3_sync(content, offset + 1, kind)
            if offset < 0:
                break
            continue
        if offset > lost:
            structure.damaged.append((lost, offset))
            places.append(len(structure.positions))
        if offset + frame[0] > size:
            truncated = True
            break
        structure.positions.append(offset)
        length += frame[0]
        offset += frame[0]
        lost = offset
    frames = len(structure.positions)
    # The frames in a damaged range cannot be counted. Their number follows from the bytes, and from the declared number
    # of frames, which does not count the frame that declares it.
    counts = [max(1, round((end - start) * frames / max(length, 1))) for start, end in structure.damaged]
    if declared is not None and counts and not truncated:
        factor = max(declared + 1 - frames, 0) / sum(counts)
        counts = [round(count * factor) for count in counts] if factor > 0.5 else counts
    missing, left = 0, list(zip(places, counts, strict=True))
    for index in range(frames):
        while left and left[0][0] <= index:
            missing += left.pop(0)[1]
        structure.times.append((index + missing) * seconds)
    if count_at is not None and (declared is None or declared < frames + missing - 1):  # decoders would stop there
        structure.patches[count_at] = (frames + missing - 1).to_bytes(4, "big")
    structure.cut = truncated or (declared is not None and frames + sum(counts) < declared - 1)
    structure.seconds = None if declared is None else declared * seconds
    return structure


def _mp3_sync(content: bytes, offset: int, kind: int | None) -> int:
    """Return the position of the first frame at or after `offset`; -1 if there is none.

    Another frame, or the end of the file, must follow the frame.

    Args:
        kind: What its header must share with the file's first; None: it is the first.
    """
    for _ in range(1 << 20):
        offset = content.find(b"\xff", offset)
        if offset < 0:
            break
        frame = _mp3_frame(content[offset : offset + 4])
        if frame is not None and kind in (None, frame[1]):
            following = offset + frame[0]
            after = _mp3_frame(content[following : following + 4])
            if (after is not None and after[1] == frame[1]) or following == len(content):
                return offset
        offset += 1
    return -1


def _hidden_mp3(content: bytes) -> int:
    """Find `MIN_MP3_FRAMES` consecutive MP3 frames in bytes of unknown format; -1 if there are none."""
    offset = 0
    while (offset := _mp3_sync(content, offset, None)) >= 0:
        end, count = offset, 0
        kind = (_mp3_frame(content[offset : offset + 4]) or (0, 0))[1]
        while (frame := _mp3_frame(content[end : end + 4])) is not None and frame[1] == kind:
            end, count = end + frame[0], count + 1
            if count == MIN_MP3_FRAMES:
                return offset
        offset += 1
    return -1


def _tag(content: bytes, offset: int) -> int:
    """Return the position after the tag (ID3, APE) that begins at `offset`; `offset` itself if there is none."""
    if content.startswith(b"ID3", offset):
        size = 0
        for byte in content[offset + 6 : offset + 10]:
            size = size << 7 | byte & 0x7F
        return offset + 10 + size
    if content.startswith(b"TAG", offset):
        return offset + 128
    if content.startswith(b"APETAGEX", offset):
        header = content[offset + 23] & 0xA0 == 0xA0 if len(content) > offset + 23 else False
        return offset + 32 + (int.from_bytes(content[offset + 12 : offset + 16], "little") if header else 0)
    return offset


def _xing(content: bytes, offset: int) -> int | None:
    """Find the number of frames in the header of Xing or LAME in a file's first frame.

    Returns:
        Its byte position; None if there is no such header.
    """
    for name in (b"Xing", b"Info"):
        place = content.find(name, offset, offset + 64)
        if place >= 0 and content[place + 7] & 1:
            return place + 8
    return None


def _mp4(file: BinaryIO, size: int) -> FileStructure:
    """Go from box to box, and find a cut end and what must be patched before PyAV reads the file."""
    structure, name = FileStructure(), b""
    for name, start, end in _boxes(file, size, structure):
        structure.fragmented |= name == b"moof"
        if name == b"moov":
            file.seek(start)
            header = file.read(min(end - start, MAX_HEADER))
            structure.seconds = _fragments_seconds(header)
            try:
                patches = _even_times(header)
            except (struct.error, IndexError):  # the header is damaged
                patches = {}
            structure.patches |= {start + offset: patch for offset, patch in patches.items()}
            structure.mistimed |= bool(patches)
        if end > size:
            structure.cut = True
    if name == b"moof":  # its samples are missing
        structure.cut = True
    for start, end in structure.damaged:  # the demuxer should skip them
        if 8 <= end - start < 2**32:
            structure.patches[start] = (end - start).to_bytes(4, "big") + b"free"
    return structure


def _fragments_seconds(header: bytes) -> float | None:
    """Return the duration of all fragments that an MP4's header declares; None: it declares none.

    Args:
        header: "moov".
    """
    movie, fragments = header.find(b"mvhd"), header.find(b"mehd")
    if movie < 0 or fragments < 0:
        return None
    scale = struct.unpack(">I", header[movie + (24 if header[movie + 4] else 16) :][:4])[0]
    long = header[fragments + 4] == 1
    length = struct.unpack(">Q" if long else ">I", header[fragments + 8 : fragments + (16 if long else 12)])[0]
    return length / scale if scale and length else None


def _even_times(header: bytes) -> dict[int, bytes]:
    """Return what to write where in an MP4's header to give all packets the same distance.

    This is for a first audio track whose table of timestamps disagrees with the durations that both the track and its
    media declare.

    Args:
        header: "moov".
    """
    children = {name: (start, end) for name, start, end in _children(header, 8, len(header))}
    if b"mvhd" not in children:
        return {}
    scale, _ = _clock(header, children[b"mvhd"][0], 12)
    for name, start, end in _children(header, 8, len(header)):
        if name != b"trak":
            continue
        boxes = {name: (start, end) for name, start, end in _descendants(header, start, end)}
        if not {b"hdlr", b"mdhd", b"tkhd", b"stts"} <= boxes.keys():
            continue
        if header[boxes[b"hdlr"][0] + 8 :][:4] != b"soun":
            continue
        media_scale, media = _clock(header, boxes[b"mdhd"][0], 12)
        _, track = _clock(header, boxes[b"tkhd"][0], 12, 4)
        offset, end = boxes[b"stts"]
        entries = min(struct.unpack(">I", header[offset + 4 : offset + 8])[0], (end - offset - 8) // 8)
        table = [struct.unpack(">II", header[offset + 8 + 8 * index :][:8]) for index in range(entries)]
        count = sum(number for number, _ in table)
        if not count or not media or not scale or not media_scale:
            return {}
        seconds = sum(number * distance for number, distance in table) / media_scale
        declared = media / media_scale
        if abs(seconds - declared) <= TABLE_SLACK or abs(track / scale - declared) > TABLE_SLACK:
            return {}
        distance = struct.pack(">I", min(round(media / count), 2**31 - 1))
        return {offset + 12 + 8 * index: distance for index in range(entries)}
    return {}


def _children(header: bytes, offset: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield (name, start of its content, end) of the MP4 boxes in `header` from `offset` to `end`."""
    while offset + 8 <= end:
        length, name = struct.unpack(">I4s", header[offset : offset + 8])
        if length < 8:
            return
        yield name, offset + 8, min(offset + length, end)
        offset += length


def _descendants(header: bytes, offset: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the boxes of a track as `_children` does, those inside others, too."""
    for name, start, stop in _children(header, offset, end):
        yield name, start, stop
        if name in (b"mdia", b"minf", b"stbl"):
            yield from _descendants(header, start, stop)


def _clock(header: bytes, offset: int, field: int, between: int = 0) -> tuple[int, int]:
    """Read the time scale and the duration of the box "mvhd", "mdhd" or "tkhd", whose content begins at `offset`.

    Args:
        field: Offset of the scale in version 0.
        between: Bytes between the two.
    """
    if header[offset] == 1:
        scale, duration = struct.unpack(f">I{between}xQ", header[offset + field + 8 :][: 12 + between])
    else:
        scale, duration = struct.unpack(f">I{between}xI", header[offset + field :][: 8 + between])
    return scale, duration


def _boxes(file: BinaryIO, size: int, structure: FileStructure) -> Iterator[tuple[bytes, int, int]]:
    """Yield (name, start, end) of an MP4's outermost boxes. Adds to `structure` the ranges outside of boxes."""
    offset = 0
    while offset + 8 <= size and len(structure.damaged) < MAX_PLACES:
        file.seek(offset)
        head = file.read(16)
        length, name = struct.unpack(">I4s", head[:8])
        if length == 1 and len(head) == 16:
            length = struct.unpack(">Q", head[8:])[0]
        elif length == 0:
            return
        if length < 8 or not BOX_NAME.fullmatch(name):
            following = _find_next(file, offset + 5, b"moof", b"mdat", b"mfra")
            structure.damaged.append((offset, size if following is None else following - 4))
            if following is None:
                return
            offset = following - 4
            continue
        yield name, offset, offset + length
        offset += length


CLUSTER, SEGMENT, EBML = 0x1F43B675, 0x18538067, 0x1A45DFA3
# Matroska's elements of the first level: SeekHead, Info, Cluster, Tracks, Cues, Attachments, Chapters, Tags; and Void,
# CRC-32
TOP_LEVEL_ELEMENTS = frozenset(
    (0x114D9B74, 0x1549A966, CLUSTER, 0x1654AE6B, 0x1C53BB6B, 0x1941A469, 0x1043A770, 0x1254C367)
)
GLOBAL_ELEMENTS = frozenset((0xEC, 0xBF))
# in a cluster: Timestamp, SilentTracks, Position, PrevSize, SimpleBlock, BlockGroup, EncryptedBlock
CLUSTER_ELEMENTS = frozenset((0xE7, 0x5854, 0xA7, 0xAB, 0xA3, 0xA0, 0xAF))


def _matroska(file: BinaryIO, size: int) -> FileStructure:
    """Go from element to element, and find damaged ranges and a cut end."""
    structure = FileStructure()
    offset = 0
    ends = size  # where the open cluster ends
    inside = False
    while offset < size and len(structure.damaged) < MAX_PLACES:
        inside = inside and offset < ends
        element = _element(file, offset)
        name, start, length = element or (0, offset, 0)
        is_element = (
            name in GLOBAL_ELEMENTS
            or name in TOP_LEVEL_ELEMENTS
            or name in (EBML, SEGMENT)
            or (inside and name in CLUSTER_ELEMENTS)
        )
        if not is_element:
            if offset + 12 > size and element is None:  # the rest is too short for an element
                structure.cut = True
                break
            following = _find_next(file, offset + 1, CLUSTER.to_bytes(4, "big"))
            structure.damaged.append((offset, following or size))
            if following is None:
                break
            offset, inside = following, False
            continue
        if length is not None and start + length > size:
            structure.cut = True
        if name in (SEGMENT, CLUSTER):  # step into it
            offset, inside = start, name == CLUSTER
            ends = size if length is None else start + length
            continue
        if length is None:
            break
        if inside and name in CLUSTER_ELEMENTS and start + length > ends:  # it ends after its cluster
            structure.damaged.append((offset, ends))
            offset, inside = ends, False
            continue
        offset = start + length
    return structure


def _element(file: BinaryIO, offset: int) -> tuple[int, int, int | None] | None:
    """Read the head of an EBML element.

    Returns:
        (its name, where its content starts, bytes of its content; None: not known); None if there is none.
    """
    file.seek(offset)
    head = file.read(12)
    width = 9 - head[0].bit_length() if head else 9
    if width > 4 or len(head) <= width:
        return None
    size_width = 9 - head[width].bit_length()
    if size_width > 8 or len(head) < width + size_width:
        return None
    value = int.from_bytes(head[width : width + size_width], "big") & (1 << 7 * size_width) - 1
    unknown = value == (1 << 7 * size_width) - 1
    return int.from_bytes(head[:width], "big"), offset + width + size_width, None if unknown else value


READERS: tuple[tuple[Callable[[bytes], bool], Callable[[BinaryIO, int], FileStructure]], ...] = (
    (lambda head: head[:4] in (b"RIFF", b"RIFX", b"RF64") and head[8:12] == b"WAVE", _riff),
    (lambda head: head[:4] == b"FORM" and head[8:11] == b"AIF", _riff),
    (lambda head: head[:4] == b"riff", _w64),
    (lambda head: head[:4] == b"caff", _caf),
    (lambda head: head[:4] in (b".snd", b"dns."), _au),
    (lambda head: head[:7] == b"NIST_1A", _nist),
    (lambda head: head[:4] == b"fLaC", _flac),
    (lambda head: head[:4] == b"OggS", _ogg),
    (lambda head: _mp3_frame(head) is not None, _mp3),
    (lambda head: head[4:8] == b"ftyp", _mp4),
    (lambda head: head[:4] == b"\x1aE\xdf\xa3", _matroska),
)
