"""Tests what is read of damaged and cut files, what is noted about the rest, and that times are those of the file's
clock."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from mmdec.errors import InputError
from mmdec.io import audio
from mmdec.io.audio import structure as damage
from mmdec.io.audio.pipe import read_pipe, stream_pieces, wav_stream
from tests.support.tiny_containers import CODECS, contained, film

RATE, HIGH_RATE = 16_000, 48_000
FRAGMENTS = {"movflags": "frag_keyframe+empty_moov", "frag_duration": "500000"}


def bursts(rate: int, seconds: int = 6) -> np.ndarray:
    """Return a burst of noise of 0.1 s at each half second, over faint noise. (T,) float32."""
    draw = np.random.default_rng(0)
    samples = 0.01 * draw.standard_normal(rate * seconds)
    for second in range(seconds):
        start = rate * second + rate // 2
        samples[start : start + rate // 10] = 0.3 * draw.standard_normal(rate // 10).clip(-2, 2)
    return samples.astype(np.float32)


def starts(samples: np.ndarray) -> list[float]:
    """When the bursts of 16 kHz samples begin, in seconds."""
    loud = np.flatnonzero(np.abs(samples) > 0.1 * np.abs(samples).max() + 0.05)
    return [float(at / RATE) for before, at in zip([-RATE, *loud], loud, strict=False) if at - before > 0.3 * RATE]


def assert_bursts(recording: audio.Recording, expected: list[float]) -> None:
    assert starts(recording.samples.numpy()) == pytest.approx(expected, abs=0.03)


def read(content: bytes, **options: bool) -> audio.Recording:
    return audio.load_recording(io.BytesIO(content), **options)


FILM = bursts(HIGH_RATE)[None]
TRACKS = [("mp4", "aac"), ("matroska", "aac"), ("matroska", "libopus"), ("webm", "libopus"), ("mov", "pcm_s16le")]


@pytest.mark.parametrize(("kind", "codec"), TRACKS)
@pytest.mark.parametrize("pictures", [True, False])
def test_sound_that_starts_late_is_late(kind: str, codec: str, pictures: bool) -> None:
    recording = read(film(FILM, kind, codec, late=4.0, pictures=pictures))
    assert_bursts(recording, [4.5, 5.5, 6.5, 7.5, 8.5, 9.5])
    assert recording.note == ""


@pytest.mark.parametrize(("kind", "codec"), TRACKS[:-1])
def test_gaps_become_silence(kind: str, codec: str) -> None:
    recording = read(film(FILM, kind, codec, hole=(3.0, 5.0)))
    assert_bursts(recording, [0.5, 1.5, 2.5, 8.5, 9.5, 10.5])
    assert recording.note == ""


@pytest.mark.parametrize(("kind", "codec"), TRACKS)
def test_the_encoders_delay_moves_nothing(kind: str, codec: str) -> None:
    assert_bursts(read(film(FILM, kind, codec)), [0.5, 1.5, 2.5, 3.5, 4.5, 5.5])


@pytest.mark.parametrize(("kind", "codec"), TRACKS)
def test_a_part_of_a_longer_stream_starts_with_its_first_track(kind: str, codec: str) -> None:
    recording = read(film(FILM, kind, codec, late=7200.0, pictures=False))
    assert_bursts(recording, [0.5, 1.5, 2.5, 3.5, 4.5, 5.5])


@pytest.mark.parametrize(("kind", "codec"), TRACKS[:-1])
def test_a_timestamp_of_hours_is_refused(kind: str, codec: str) -> None:
    content = film(FILM, kind, codec, hole=(3.0, 7200.0), pictures=False)
    with pytest.raises(InputError, match="must last at most 3600 seconds, but the file object lasts at least 72"):
        read(content)


@pytest.mark.parametrize("suffix", CODECS)
def test_an_undamaged_container_has_no_note(suffix: str) -> None:
    assert read(contained(FILM, suffix), strict=True).note == ""


def damaged(content: bytes, share: float, size: int) -> bytes:
    """Return the same bytes with `size` bytes of noise in them. share: where, as a share of all bytes."""
    spoilt, start = bytearray(content), int(share * len(content))
    spoilt[start : start + size] = np.random.default_rng(3).bytes(size)
    return bytes(spoilt)


@pytest.mark.parametrize("options", [{}, FRAGMENTS])
def test_a_bad_packet_costs_that_packet(options: dict[str, str]) -> None:
    content = damaged(film(FILM, "mp4", "aac", pictures=False, options=options), 0.3, 300)
    recording = read(content)
    assert_bursts(recording, starts(read(film(FILM, "mp4", "aac", pictures=False, options=options)).samples.numpy()))
    assert recording.note.endswith("could not be read")
    assert recording.note.startswith("0.0")
    with pytest.raises(InputError, match=r"`strict`.*could not be read"):
        read(content, strict=True)


@pytest.mark.parametrize(("kind", "codec"), [("matroska", "aac"), ("webm", "libopus")])
def test_what_follows_a_damaged_cluster_keeps_its_time(kind: str, codec: str) -> None:
    content = damaged(film(FILM, kind, codec, options={"cluster_time_limit": "1000"}), 0.4, 300)
    recording = read(content)
    assert_bursts(recording, [0.5, 1.5, 3.5, 4.5, 5.5])
    assert "could not be read" in recording.note


@pytest.mark.parametrize(
    ("kind", "codec", "options", "note"),
    [
        ("mp4", "aac", FRAGMENTS, r"the file was cut off at 5\.\d s"),
        ("matroska", "aac", {}, r"the file ends at 5\.\d s of 6\.0 s"),
        ("webm", "libopus", {}, r"the file ends at 5\.\d s of 6\.0 s"),
        ("webm", "libopus", {"live": "1"}, r"the file was cut off at 5\.\d s"),
    ],
)
def test_a_cut_container_is_read_to_its_end(kind: str, codec: str, options: dict[str, str], note: str) -> None:
    content = film(FILM, kind, codec, options=options)
    assert read(content, strict=True).note == ""
    cut = content[: int(0.9 * len(content))]
    recording = read(cut)
    assert 5.2 < len(recording.samples) / RATE < 5.8
    assert re.fullmatch(note, recording.note)
    with pytest.raises(InputError, match="`strict`"):
        read(cut, strict=True)


FORMATS = {  # libsndfile's format -> (sample type, whether the file says how long it is)
    "WAV": ("PCM_16", True),
    "RF64": ("PCM_16", True),
    "W64": ("PCM_16", True),
    "AIFF": ("PCM_16", True),
    "AU": ("PCM_16", True),
    "CAF": ("PCM_16", True),
    "NIST": ("PCM_16", True),
    "FLAC": ("PCM_16", True),
    "MP3": ("MPEG_LAYER_III", True),
    "OGG": ("VORBIS", False),
    "OPUS": ("OPUS", False),
}


def encoded(kind: str, seconds: int = 10) -> bytes:
    content = io.BytesIO()
    name = "OGG" if kind == "OPUS" else kind
    soundfile.write(content, bursts(RATE, seconds), RATE, format=name, subtype=FORMATS[kind][0])
    return content.getvalue()


@pytest.mark.parametrize("kind", FORMATS)
def test_an_undamaged_file_has_no_note(kind: str) -> None:
    recording = read(encoded(kind), strict=True)
    assert recording.note == ""
    assert len(recording.samples) == pytest.approx(10 * RATE, abs=10)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_truncated_file_is_noted(kind: str) -> None:
    content = encoded(kind)
    cut = content[: int(0.9 * len(content))]
    recording = read(cut)
    seconds = len(recording.samples) / RATE
    assert 8.5 < seconds < 9.2
    end = f"{seconds:.1f} s"
    known = FORMATS[kind][1]
    assert recording.note == (f"the file ends at {end} of 10.0 s" if known else f"the file was cut off at {end}")
    with pytest.raises(InputError, match="`strict`"):
        read(cut, strict=True)


@pytest.mark.parametrize("kind", ["FLAC", "MP3", "OGG", "OPUS"])
def test_damage_in_the_middle_costs_no_time(kind: str) -> None:
    recording = read(damaged(encoded(kind), 0.5, 300))
    result = starts(recording.samples.numpy())
    expected = [second + 0.5 for second in range(10)]
    assert result[:4] == pytest.approx(expected[:4], abs=0.03)
    assert result[-4:] == pytest.approx(expected[-4:], abs=0.03)
    assert len(recording.samples) == pytest.approx(10 * RATE, abs=0.05 * RATE)
    assert recording.note.endswith("could not be read")


def test_a_cut_flac_is_read_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    content = encoded("FLAC")
    monkeypatch.setitem(sys.modules, "av", None)
    recording = read(content[: int(0.9 * len(content))])
    assert len(recording.samples) > 8 * RATE
    assert "cut off" in recording.note


def test_damage_in_an_ogg_is_noted_without_pyav(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    assert "parts of the file could not be read" in read(damaged(encoded("OGG"), 0.5, 300)).note


@pytest.mark.parametrize("size", [0, 0xFFFFFFFF, 0x7FFFFFFF])
def test_a_size_that_was_never_filled_in_is_no_loss(size: int) -> None:
    content = bytearray(encoded("WAV"))
    content[40:44] = size.to_bytes(4, "little")
    with io.BytesIO(bytes(content)) as file:
        assert not damage.read_structure(file).cut


def test_ogg_files_that_were_joined_are_whole() -> None:
    assert read(encoded("OGG", 3) + encoded("OGG", 2)).note == ""


def test_mp3_files_that_were_joined_are_whole() -> None:
    assert read(encoded("MP3", 3) + encoded("MP3", 2)).note == ""


def test_an_mp3_without_the_number_of_its_frames_is_whole() -> None:
    content = encoded("MP3")
    frame = damage._mp3_frame(content[:4])
    assert frame is not None
    recording = read(content[frame[0] :])  # the first frame declares it
    assert recording.note == ""
    tagged = b"ID3\x04\x00\x00\x00\x00\x00\x10" + bytes(16) + content + b"TAG" + bytes(125)
    assert read(tagged).note == ""


def test_a_flac_of_unknown_length_is_whole() -> None:
    content = bytearray(encoded("FLAC"))
    content[21] &= 0xF0
    content[22:26] = bytes(4)
    assert read(bytes(content), strict=True).note == ""
    assert "cut off" in read(bytes(content[: int(0.9 * len(content))])).note


def test_an_mp4_without_its_table_is_refused() -> None:
    content = contained(FILM, ".mp4")
    with pytest.raises(InputError, match="is damaged: FFmpeg finds"):
        read(content[: content.rindex(b"moov") - 4])


def test_a_piped_wav_that_is_cut_is_noted() -> None:
    content, loss = encoded("WAV"), damage.AudioLoss()
    sound = read_pipe(io.BytesIO(content[: int(0.9 * len(content)) | 1]), loss=loss)
    assert isinstance(sound, tuple)
    assert sum(map(len, sound[1])) == pytest.approx(9 * RATE, abs=50)
    assert loss.note == "the file ends at 9.0 s of 10.0 s"
    assert wav_stream(content[:12], io.BytesIO(content[12:])).size == 20 * RATE


def test_recordings_of_the_repository_are_whole() -> None:
    for path in sorted(Path("data/samples").rglob("*.wav")) + sorted(Path("data/samples").rglob("*.flac")):
        assert audio.load_recording(path, strict=True).note == "", path


def zeroed(content: bytes, share: float) -> bytes:
    spoilt, start = bytearray(content), int(share * len(content))
    spoilt[start : start + 40] = bytes(40)
    return bytes(spoilt)


@pytest.mark.parametrize("share", [0.04, 0.09, 0.14, 0.19, 0.24, 0.5, 0.8, 0.96])
def test_a_flac_with_zeros_in_it_loses_nothing_silently(share: float) -> None:
    recording = read(zeroed(encoded("FLAC"), share))
    expected = np.array([second + 0.5 for second in range(10)])
    # a burst may begin within the block that is lost; the others keep their times
    late = [start for start in starts(recording.samples.numpy()) if np.abs(expected - start).min() > 0.03]
    assert len(late) <= 1
    assert "could not be read" in recording.note or "the file ends at" in recording.note


def with_total(content: bytes, total: int) -> bytes:
    """Return a FLAC that declares another number of samples."""
    changed, at = bytearray(content), content.index(b"fLaC")
    changed[at + 21] = changed[at + 21] & 0xF0 | total >> 32
    changed[at + 22 : at + 26] = (total & 0xFFFFFFFF).to_bytes(4, "big")
    return bytes(changed)


@pytest.mark.parametrize("total", [0, 1, RATE, 2**35, 2**36 - 1])
def test_a_flac_is_read_to_its_end_whatever_it_declares(total: int) -> None:
    recording = read(with_total(encoded("FLAC"), total), strict=True)
    assert len(recording.samples) == 10 * RATE
    assert recording.note == ""
    assert "cut off at 9.0 s" in read(with_total(encoded("FLAC"), total)[:200_000]).note


def test_a_flac_that_declares_more_is_noted() -> None:
    assert read(with_total(encoded("FLAC"), 12 * RATE)).note == "the file ends at 10.0 s of 12.0 s"


def test_a_flac_behind_a_tag_is_read_past_damage() -> None:
    tagged = b"ID3\x04\x00\x00\x00\x00\x00\x10" + bytes(16) + encoded("FLAC")
    assert read(tagged, strict=True).note == ""
    assert "of 10.0 s" in read(tagged[: int(0.9 * len(tagged))]).note
    assert len(read(zeroed(tagged, 0.5)).samples) == 10 * RATE


@pytest.mark.parametrize("frames", [0, 1, 10, 10**6, 2**32 - 1])
def test_an_mp3_is_read_to_its_end_whatever_it_declares(frames: int) -> None:
    content = encoded("MP3")
    at = content.index(b"Xing") + 8
    recording = read(content[:at] + frames.to_bytes(4, "big") + content[at + 4 :], strict=True)
    assert len(recording.samples) == 10 * RATE
    assert recording.note == ""


def test_mp3_files_that_were_joined_are_read_to_the_end() -> None:
    recording = read(encoded("MP3", 3) + encoded("MP3", 2))
    assert len(recording.samples) == pytest.approx(5 * RATE, abs=0.15 * RATE)
    assert recording.note == ""


@pytest.mark.parametrize("junk", [bytes(500), b"\xff" * 500, np.random.default_rng(0).bytes(3000)])
def test_an_mp3_behind_other_bytes_is_read(junk: bytes) -> None:
    recording = read(junk + encoded("MP3"), strict=True)
    assert torch.equal(recording.samples, read(encoded("MP3")).samples)


@pytest.mark.parametrize("kind", ["CAF", "W64", "RF64"])
@pytest.mark.parametrize("size", [2**31 - 1, 2**32 - 1, 2**32 - 16, 10**12, 2**62, 2**63 - 1])
def test_a_wide_size_that_was_never_filled_in_is_no_loss(kind: str, size: int) -> None:
    content = bytearray(encoded(kind))
    at = content.index(b"ds64") + 16 if kind == "RF64" else content.index(b"data") + (4 if kind == "CAF" else 16)
    content[at : at + 8] = size.to_bytes(8, "big" if kind == "CAF" else "little")
    recording = read(bytes(content), strict=True)
    assert len(recording.samples) == 10 * RATE
    assert recording.note == ""


def test_a_piped_wav_with_an_unfilled_wide_size_is_no_loss() -> None:
    content, loss = bytearray(encoded("RF64")), damage.AudioLoss()
    at = content.index(b"ds64") + 16
    content[at : at + 8] = (2**62).to_bytes(8, "little")
    stream = io.BytesIO(bytes(content[12:]))
    sound = wav_stream(bytes(content[:12]), stream)
    assert sum(map(len, stream_pieces(sound, stream, loss))) == 10 * RATE
    assert loss.note == ""


@pytest.mark.parametrize("kind", ["OGG", "OPUS"])
def test_an_ogg_without_the_mark_of_its_end_is_whole(kind: str) -> None:
    content = encoded(kind)
    last = content.rindex(b"OggS")
    page = bytearray(content[last:])
    page[5] &= ~4
    page[22:26] = bytes(4)
    page[22:26] = damage._ogg_checksum(bytes(page)).to_bytes(4, "little")
    recording = read(content[:last] + bytes(page), strict=True)
    assert recording.note == ""
    assert len(recording.samples) == pytest.approx(10 * RATE, abs=100)


def retimed(content: bytes, cluster: int, time: int | None = None) -> bytes:
    """Return a Matroska file with a damaged timestamp in one cluster. time: in ms; None: its highest bit is flipped."""
    at, result = -1, -1
    for _ in range(cluster + 1):
        at = content.index(b"\x1f\x43\xb6\x75", at + 1)
    result = content.index(b"\xe7", at + 5)
    size = content[result + 1] & 0x7F
    value = bytearray(content[result + 2 : result + 2 + size])
    if time is None:
        value[0] ^= 0x80
    else:
        value[:] = time.to_bytes(size, "big")
    return content[: result + 2] + bytes(value) + content[result + 2 + size :]


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(("cluster", "time"), [(1, None), (3, None), (3, 65_535), (3, 4_000), (3, 0), (2, 10)])
def test_a_damaged_timestamp_moves_nothing(live: bool, cluster: int, time: int | None) -> None:
    options = {"cluster_time_limit": "1000"} | ({"live": "1"} if live else {})
    content = film(FILM, "matroska", "libopus", options=options, pictures=False)
    assert read(content, strict=True).note == ""
    spoilt = retimed(content, cluster, time)
    recording = read(spoilt)
    assert_bursts(recording, [0.5, 1.5, 2.5, 3.5, 4.5, 5.5])
    assert "timestamps are damaged" in recording.note
    with pytest.raises(InputError, match=r"`strict`.*timestamps are damaged"):
        read(spoilt, strict=True)


def test_a_damaged_last_timestamp_adds_no_silence() -> None:
    content = film(FILM, "matroska", "libopus", options={"cluster_time_limit": "1000"}, pictures=False)
    spoilt = retimed(content, content.count(b"\x1f\x43\xb6\x75") - 1)
    assert_bursts(read(spoilt), [0.5, 1.5, 2.5, 3.5, 4.5, 5.5])


@pytest.mark.parametrize("distance", [0, 10, 2_000, 10**6, 10**9, 2**31])
def test_a_damaged_table_of_timestamps_loses_nothing(distance: int) -> None:
    content = bytearray(film(FILM, "mp4", "aac", pictures=False))
    at = content.index(b"stts") + 16
    content[at : at + 4] = distance.to_bytes(4, "big")
    recording = read(bytes(content))
    assert_bursts(recording, [0.5, 1.5, 2.5, 3.5, 4.5, 5.5])
    assert "timestamps are damaged" in recording.note
