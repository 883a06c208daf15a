"""Tests reading and writing of files: which are opened, how much is read, and the error message of each problem."""

from __future__ import annotations

import errno
import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import mmdec
from mmdec import cli
from mmdec.checks import files
from mmdec.cli import inputs as outputs
from mmdec.cli.translate import AUDIO_SUFFIXES
from mmdec.errors import InputError
from mmdec.hub.publish import atomic_folder
from mmdec.io import audio
from mmdec.tasks.audio import read_audio
from tests.conftest import RATE, buzz
from tests.support.bad_list import encoded
from tests.support.tiny_whisper import write

OTHER = np.tile(buzz(6.0, 77), 8)  # longer than any file below: its samples lie where theirs are read


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return audio.save_audio(tmp_path_factory.mktemp("sounds") / "other.mp3", OTHER)


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "whisper")


CUT = {  # the file's bytes, the least part of its samples that half of it gives, its rate: read at that, bits are kept
    "mp3": (lambda: encoded(buzz(4.0, 3), "MP3"), 0.3, RATE),
    "ogg": (lambda: encoded(buzz(4.0, 3), "OGG"), 0.2, RATE),
    "wav": (lambda: encoded(buzz(4.0, 3), "WAV"), 0.49, RATE),
    "flac": (lambda: encoded(buzz(4.0, 3), "FLAC"), 0.3, RATE),
    "au": (lambda: encoded(buzz(4.0, 3, 8000), "AU", "ULAW", 8000), 0.49, 8000),
}


@pytest.mark.parametrize("kind", CUT)
@pytest.mark.parametrize("share", [0.5, 0.77])
def test_a_truncated_file_gives_only_its_own_samples(kind: str, share: float, other: Path, tmp_path: Path) -> None:
    make, least, rate = CUT[kind]
    content = make()
    path = tmp_path / f"whole.{kind}"
    path.write_bytes(content)
    whole = audio.load_audio(path, rate)
    path.write_bytes(content[: int(share * len(content))])
    assert len(whole) == pytest.approx(4 * rate, abs=10)
    for _ in range(3):
        audio.load_audio(other)
        result = audio.load_audio(path, rate)
        assert least * len(whole) < len(result) < 0.8 * len(whole)
        assert torch.equal(result, whole[: len(result)])
        assert audio.sound_seconds(path) == len(result) / rate
    assert torch.equal(audio.load_audio(io.BytesIO(path.read_bytes()), rate), result)


def test_a_truncated_file_is_transcribed_as_its_first_half(
    other: Path, tmp_path: Path, tiny_model: Path, whisper: Path
) -> None:
    content = encoded(buzz(4.0, 3), "MP3")
    path = tmp_path / "x.mp3"
    path.write_bytes(content)
    whole = audio.load_audio(path)
    path.write_bytes(content[: len(content) // 2])
    audio.load_audio(other)
    half = whole[: len(audio.load_audio(path))].clone()
    audio.load_audio(other)
    heard = mmdec.transcribe(path, model=whisper, device="cpu", language="en", timestamps="segment")
    expected = mmdec.transcribe(
        half, sample_rate=RATE, model=whisper, device="cpu", language="en", timestamps="segment"
    )
    assert (heard.text, heard.tokens, heard.seconds) == (expected.text, expected.tokens, expected.seconds)
    audio.load_audio(other)
    spoken = mmdec.translate_speech(path, model=tiny_model, device="cpu")
    assert spoken.units == mmdec.translate_speech(half, sample_rate=RATE, model=tiny_model, device="cpu").units


def test_a_truncated_file_is_noted_in_each_result(
    tmp_path: Path, tiny_model: Path, whisper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = encoded(buzz(2.0, 3), "WAV")
    whole, cut = tmp_path / "whole.wav", tmp_path / "cut.wav"
    whole.write_bytes(content)
    cut.write_bytes(content[:-16_000])
    note, heard = "the file ends at 1.5 s of 2.0 s", dict[int, str]()
    options: dict[str, Any] = {"model": whisper, "device": "cpu", "language": "en"}
    monkeypatch.setattr("mmdec.tasks.usage.cut_note", lambda *_: "")  # texts of the tiny model are cut, too
    results = mmdec.transcribe(
        [whole, cut], on_transcript=lambda i, transcript: heard.update({i: transcript.note}), **options
    )
    assert [result.note for result in results] == [heard[0], heard[1]] == ["", note]
    assert mmdec.transcribe({"bytes": cut.read_bytes(), "path": None}, **options).note == note
    spoken = mmdec.translate_speech(cut, model=tiny_model, device="cpu")
    assert spoken.note == spoken.to_dict()["note"] == note
    for call in (
        lambda: mmdec.transcribe(cut, strict=True, **options),
        lambda: mmdec.translate_speech(cut, model=tiny_model, device="cpu", strict=True),
    ):
        with pytest.raises(InputError, match=note):
            call()


def test_declared_lengths_are_not_trusted(tmp_path: Path) -> None:
    data = bytearray(encoded(buzz(1.0), "WAV"))
    data[40:44] = (2**31 - 1).to_bytes(4, "little")  # the data's size
    (tmp_path / "x.wav").write_bytes(data)
    assert torch.equal(audio.load_audio(tmp_path / "x.wav"), audio.load_audio(io.BytesIO(encoded(buzz(1.0), "WAV"))))
    assert audio.sound_seconds(tmp_path / "x.wav") == 1.0


def flac_of(seconds: int, samples: np.ndarray) -> bytes:
    """Return a FLAC whose header declares a length; 0: none."""
    content = bytearray(encoded(samples, "FLAC"))
    content[21] &= 0xF0  # the stream's information begins at byte 8; its last 36 bits of 18 bytes are the length
    content[22:26] = (seconds * RATE).to_bytes(4, "big")
    return bytes(content)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_too_long_files_are_refused(kind: str) -> None:
    content = encoded(buzz(1.1), kind)
    assert len(audio.load_audio(io.BytesIO(content), max_seconds=1.2)) == pytest.approx(1.1 * RATE, abs=10)
    with pytest.raises(
        InputError, match="must last at most 1 seconds, but the file object, by its header, lasts at le"
    ):
        audio.load_audio(io.BytesIO(content), max_seconds=1.0)


def test_a_header_is_read_before_the_samples(tmp_path: Path) -> None:
    """If the file's bytes could hold that much."""
    content = flac_of(7200, buzz(4.0))
    (tmp_path / "x.flac").write_bytes(content + bytes(7200 * 500))  # who decoded it would find four seconds
    for call in (audio.load_audio, audio.sound_seconds):
        with pytest.raises(InputError, match=r"at most 3600 seconds, but '.*x\.flac', by its header, .* least 7200"):
            call(tmp_path / "x.flac")


def test_a_header_without_a_length_does_not_hide_it() -> None:
    content = io.BytesIO(flac_of(0, buzz(1.1)))
    with pytest.raises(InputError, match="must last at most 1 seconds, but the file object lasts at least"):
        audio.load_audio(content, max_seconds=1.0)


@pytest.mark.parametrize("subtype", ["GSM610", "IMA_ADPCM", "MS_ADPCM", "ULAW", "G721_32"])
def test_compressed_wavs_are_read(subtype: str, tmp_path: Path) -> None:
    sound = buzz(1.0, rate=8000)
    (tmp_path / "x.wav").write_bytes(encoded(sound, "WAV", subtype, 8000))
    result = audio.load_audio(tmp_path / "x.wav", 8000)[:8000].numpy()
    assert np.corrcoef(result, sound)[0, 1] > 0.9


def test_the_content_decides_the_format_and_not_the_name(tmp_path: Path) -> None:
    content = encoded(buzz(0.3), "WAV")
    for name in ("x.raw", "x.RAW", "x.mp3", "x", os.fsdecode(b"\xe9\xff.wav"), "a\nb.wav", "é.wav"):
        (tmp_path / name).write_bytes(content)
        assert len(audio.load_audio(tmp_path / name)) == 4800
        assert len(audio.load_audio(os.fspath(tmp_path / name))) == 4800
    with pytest.raises(InputError, match=r"be an existing file, but .*\\udce9\\n\.wav' does not exist"):
        audio.load_audio(os.fsdecode(b"nowhere/\xe9\n.wav"))
    with pytest.raises(InputError, match="null byte"):
        audio.load_audio("x\0.wav")


def test_floats_of_files_are_levelled_as_arrays_are(tmp_path: Path) -> None:
    for scale, subtype in ((40.0, "FLOAT"), (32768.0, "DOUBLE"), (2.0**30, "FLOAT")):
        sound = buzz(0.5) * np.float32(scale)
        both = np.stack([sound, 0.5 * sound], 1)
        for number, data in enumerate((sound, both)):
            path = tmp_path / f"{number}.wav"
            soundfile.write(path, data, RATE, subtype=subtype)
            result = read_audio(path)
            assert result.abs().max() == 1
            assert torch.allclose(result, read_audio(data, RATE), atol=1e-6)


@pytest.mark.parametrize("subtype", ["FLOAT", "DOUBLE"])
def test_impossible_sample_values_are_refused(subtype: str, tmp_path: Path) -> None:
    loud = buzz(0.5)
    loud[100] = 1e30
    for number, data in enumerate((loud, np.stack([loud, -loud], 1))):  # channels that cancel
        path = tmp_path / f"{number}.wav"
        soundfile.write(path, data, RATE, subtype=subtype)
        for given in ((path, None), (data, RATE), (torch.from_numpy(data), RATE)):
            with pytest.raises(InputError, match=r"samples of at most 2\.15e\+09, but its peak is 1e\+30"):
                read_audio(*given)


@contextmanager
def nobody() -> Iterator[Path]:
    """Yield a folder for a process without root's rights: permissions hold for it."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(65534)
        yield folder
    finally:
        if root:
            os.seteuid(0)
        for inner in folder.iterdir():
            inner.chmod(0o700)
        shutil.rmtree(folder)


def test_missing_permissions_are_named(tmp_path: Path) -> None:
    sound = encoded(buzz(0.3), "WAV")
    with nobody() as folder:
        closed, secret, read_only = folder / "closed", folder / "secret.wav", folder / "kept"
        for inner in (closed, read_only):
            inner.mkdir()
        (closed / "x.wav").write_bytes(sound)
        secret.write_bytes(sound)
        secret.chmod(0)
        closed.chmod(0)
        read_only.chmod(0o555)
        for path in (secret, closed / "x.wav"):
            with pytest.raises(InputError, match=r"can be read, but .* is not \(Permission denied\)\. Check the perm"):
                audio.load_audio(path)
        with pytest.raises(PermissionError, match=r"Permission denied: '.*kept/x\.wav'"):
            audio.save_audio(read_only / "x.wav", buzz(0.2))
        with pytest.raises(PermissionError, match=r"Permission denied: '.*closed/x\.wav'"):
            audio.save_audio(closed / "x.wav", buzz(0.2))


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary files are the system's own full disk."""
    monkeypatch.setattr(files, "open", lambda path, mode: open("/dev/full", "wb"), raising=False)  # noqa: SIM115


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full disk")
def test_a_full_disk_is_named_and_leaves_the_old_file(
    tiny_model: Path, whisper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = tmp_path / "x.wav"
    sound.write_bytes(encoded(buzz(0.5), "WAV"))
    spoken = mmdec.translate_speech(sound, model=tiny_model, device="cpu")
    spoken.save(tmp_path / "y.mp3")
    before = (tmp_path / "y.mp3").read_bytes()
    with monkeypatch.context() as patch:
        full_disk(patch)
        with pytest.raises(OSError, match=r"No space left on device: '.*y\.mp3'") as caught:
            spoken.save(tmp_path / "y.mp3")
        assert caught.value.errno == errno.ENOSPC
        for subcommand, model, suffix in (("translate", tiny_model, "wav"), ("transcribe", whisper, "txt")):
            arguments = [subcommand, str(sound), "-o", str(tmp_path / "out"), "--model", str(model), "--device", "cpu"]
            result = CliRunner().invoke(cli.app, arguments)
            assert result.exit_code == 1
            target = tmp_path / "out" / f"x.{suffix}"
            assert result.stderr == (
                f"failed: {sound}: the output '{target}' cannot be written: No space left on device\n"
                "1 of 1 files failed\n"
            )
    assert (tmp_path / "y.mp3").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "x.wav", "y.mp3"]
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("suffix", sorted(audio.WRITABLE))
def test_the_suffix_decides_the_output_format(suffix: str, tiny_model: Path, tmp_path: Path) -> None:
    sound, target = tmp_path / "x.wav", tmp_path / "new" / f"out{suffix}"
    sound.write_bytes(encoded(buzz(0.5), "WAV"))
    arguments = ["translate", str(sound), "-o", str(target), "--model", str(tiny_model), "--device", "cpu"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    kind, subtype = audio.WRITABLE[suffix]
    info = soundfile.info(target)
    assert (info.format, info.subtype) == (kind, subtype)
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert (target.stat().st_mode & 0o777) == 0o644
    spoken = mmdec.translate_speech(sound, model=tiny_model, device="cpu")
    assert len(audio.load_audio(target)) == pytest.approx(len(spoken.audio), abs=2500)  # a coder's frame or two


def test_the_command_line_knows_what_can_be_written() -> None:
    assert tuple(audio.WRITABLE) == AUDIO_SUFFIXES


def test_outputs_that_are_not_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.wav")
    (tmp_path / "device.wav").symlink_to("/dev/null")
    (tmp_path / "directory.wav").mkdir()
    for name, kind in (("pipe", "a pipe"), ("device", "a device"), ("directory", "a folder")):
        with pytest.raises(InputError, match=rf"`path` must be a file, but '.*{name}\.wav' is {kind}"):
            audio.save_audio(tmp_path / f"{name}.wav", buzz(0.2))
    with pytest.raises(OSError, match="File name too long"):
        audio.save_audio(tmp_path / f"{'x' * 300}.wav", buzz(0.2))
    with pytest.raises(OSError, match="Not a directory"):
        audio.save_audio(tmp_path / "pipe.wav" / "x.wav", buzz(0.2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["device.wav", "directory.wav", "pipe.wav"]


def test_the_longest_names_are_written(tmp_path: Path) -> None:
    name = "é" * 125 + "x.wav"  # 255 bytes
    assert audio.load_audio(audio.save_audio(tmp_path / name, buzz(0.2))).shape == (3200,)
    files.write_atomically(tmp_path / ("x" * 251 + ".txt"), b"text")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    long = tmp_path / ("y" * 300)
    result = outputs.output_paths([loop, long], tmp_path / "out", (".wav",), ".wav")
    assert result == [tmp_path / "out" / "loop.wav", tmp_path / "out" / f"{'y' * 300}.wav"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664), (0o000, 0o666)])
def test_outputs_have_the_default_file_mode(umask: int, mode: int, tmp_path: Path) -> None:
    """A new file's is the caller's umask, a replaced one's stays."""
    before = os.umask(umask)
    try:
        files.write_atomically(tmp_path / "new.txt", b"text")
        for name in ("old.txt", "kept.txt"):
            (tmp_path / name).touch()
            (tmp_path / name).chmod(0o640)
        files.write_atomically(tmp_path / "old.txt", b"text")
        with open(tmp_path / "kept.txt", "w") as file:
            file.write("text")
        with atomic_folder(tmp_path / "model") as fresh:
            (fresh / "inner").mkdir()
            save_file({"a": torch.zeros(1)}, fresh / "inner" / "a.safetensors")
    finally:
        os.umask(before)

    def mode_of(name: str) -> int:
        return (tmp_path / name).stat().st_mode & 0o777

    assert mode_of("new.txt") == mode_of("model/inner/a.safetensors") == mode
    assert mode_of("old.txt") == mode_of("kept.txt") == 0o640
    assert mode_of("model") == mode_of("model/inner") == 0o777 & ~umask
    (tmp_path / "model").chmod(0o700)
    with atomic_folder(tmp_path / "model"):
        pass
    assert mode_of("model") == 0o700


def test_samples_an_encoder_cannot_take_are_refused_first(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`samples` must be finite"):
        audio.save_audio(tmp_path / "x.mp3", np.full(1000, np.nan))
    with pytest.raises(InputError, match="at most 192000 Hz"):
        audio.save_audio(tmp_path / "x.ogg", buzz(0.2), 400_000)
    with pytest.raises(InputError, match="takes sound at 44101 Hz"):
        audio.save_audio(tmp_path / "x.mp3", buzz(0.2), 44_101)
    assert list(tmp_path.iterdir()) == []


def test_minutes_of_vorbis_are_written(tmp_path: Path) -> None:
    sound = np.tile(buzz(10.0), 18)  # given at once they end the process
    assert len(audio.load_audio(audio.save_audio(tmp_path / "x.ogg", sound))) == len(sound)
