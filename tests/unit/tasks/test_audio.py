"""Tests bad sound inputs: each kind either works or raises one clear mmdec error."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

import mmdec
from mmdec.errors import InputError
from mmdec.tasks.audio import as_batch, read_audio
from mmdec.tasks.batch import InputBatch
from tests.conftest import RATE, buzz


def assert_refused(message: str, audio: object, sample_rate: object = None) -> None:
    """`read` refuses it, in the form: argument, rule, value, remedy."""
    with pytest.raises(InputError, match=message) as caught:
        read_audio(audio, sample_rate)  # type: ignore[arg-type]
    text = str(caught.value)
    assert text.startswith("`")
    assert " must " in text
    assert " but " in text
    assert text.endswith(".")
    assert "\n" not in text


def test_missing_paths_are_refused(tmp_path: Path) -> None:
    assert_refused(r"must be an existing file, but .*nowhere\.wav' does not exist", tmp_path / "nowhere.wav")
    assert_refused("does not exist", str(tmp_path / "nowhere.wav"))
    assert_refused("is a folder", "")


def test_directories_are_refused(tmp_path: Path) -> None:
    assert_refused("^`audio` must be a file, but '[^']*' is a folder. Name the files in it.$", tmp_path)


@pytest.mark.parametrize("content", [b"", b"R", b"Bonjour, this is text.\n" * 50, b"RIFF\x24\x00", bytes(1000)])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.wav"
    path.write_bytes(content)
    assert_refused("libsndfile can read", path)
    assert_refused("libsndfile can read", io.BytesIO(content))


def test_every_truncated_wav_is_read_or_refused(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    soundfile.write(buffer, buzz(0.3), RATE, format="WAV", subtype="PCM_16")
    whole = buffer.getvalue()
    for size in [*range(0, 46), 100, 3000, len(whole) - 1]:
        try:
            samples = read_audio(io.BytesIO(whole[:size]))
        except InputError:
            continue
        assert len(samples) <= 4800  # what the file still holds
        assert size > 3000


def test_wrong_headers_are_refused(tmp_path: Path) -> None:
    for field, value in ((24, 0), (24, 2**31), (22, 0), (34, 77)):  # rate, rate, channels, bits
        buffer = io.BytesIO()
        soundfile.write(buffer, buzz(0.3), RATE, format="WAV", subtype="PCM_16")
        data = bytearray(buffer.getvalue())
        struct.pack_into("<I" if field == 24 else "<H", data, field, value)
        with pytest.raises(InputError):
            read_audio(io.BytesIO(bytes(data)))


def test_file_objects_of_text_are_refused() -> None:
    assert_refused("binary file object, but gives text", io.StringIO("text"))


def test_empty_arrays_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.wav"
    soundfile.write(path, np.zeros(0, dtype=np.float32), RATE)
    assert_refused("at least one sample, but is empty", path)
    for shape in ((0,), (0, 2), (2, 0)):
        assert_refused("at least one sample", np.zeros(shape, dtype=np.float32), RATE)


def test_too_short_recordings_are_refused() -> None:
    assert_refused("at least 0.1 seconds, but lasts 0.0625", buzz(0.0625), RATE)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_samples_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    sound = buzz(0.5)
    sound[100:103] = value
    assert_refused("3 of 8000 samples are NaN or infinite", sound, RATE)
    assert_refused("NaN or infinite", torch.from_numpy(sound), RATE)
    soundfile.write(tmp_path / "x.wav", sound, RATE, subtype="FLOAT")
    assert_refused("NaN or infinite", tmp_path / "x.wav")


def test_silence_is_refused(tmp_path: Path) -> None:
    assert_refused("is silent: its peak is -inf dB, below -66 dB", np.zeros(RATE, dtype=np.float32), RATE)
    assert_refused("is silent", np.full(RATE, 0.5), RATE)  # an offset is no sound
    assert_refused("its peak is -80 dB", 1e-4 * buzz(1.0) / np.abs(buzz(1.0)).max(), RATE)
    soundfile.write(tmp_path / "x.wav", np.zeros(RATE), RATE)
    assert_refused("is silent", tmp_path / "x.wav")


@pytest.mark.parametrize("decibels", [-64, -67, -70, -73, -76])
def test_quiet_speech_is_not_silence(decibels: int) -> None:
    speech = 10 ** (decibels / 20) * buzz(2.0) / np.abs(buzz(2.0)).max()
    assert len(read_audio(speech, RATE)) == 2 * RATE
    pause = 10 ** ((decibels - 45) / 20) * np.random.default_rng(0).standard_normal(20 * RATE)
    assert len(read_audio(np.concatenate([pause, speech, pause]), RATE)) == 42 * RATE


@pytest.mark.parametrize("decibels", [-68, -74, -77, -90])
@pytest.mark.parametrize("kind", ["white", "pink", "hum", "dither", "click", "turned on"])
def test_quiet_noise_counts_as_silence(kind: str, decibels: int) -> None:
    draw, time = np.random.default_rng(1), np.arange(5 * RATE) / RATE
    white = draw.standard_normal(5 * RATE)
    shaped = np.fft.irfft(np.fft.rfft(white) / np.sqrt(np.arange(len(white) // 2 + 1) + 20))
    noise = {
        "white": white,
        "pink": shaped,
        "hum": np.sin(2 * np.pi * 50 * time) + 0.3 * np.sin(2 * np.pi * 150 * time),
        "dither": np.round(draw.uniform(-1, 1, len(time)) + draw.uniform(-1, 1, len(time))),
        "click": 0.1 * white + 5 * (np.abs(time - 2) < 0.01),
        "turned on": np.where(time < 2, 0, white),
    }[kind]
    assert_refused("is silent", 10 ** (decibels / 20) * noise / np.abs(noise - noise.mean()).max(), RATE)


@pytest.mark.parametrize("rate", [4000, 0, -1, 7999])
def test_too_low_rates_are_refused(rate: int) -> None:
    assert_refused(f"at least 8000 Hz, but is {rate}", buzz(1.0), rate)


def test_impossible_rates_are_refused() -> None:
    assert_refused("at most 192000 Hz", buzz(1.0), 400_000)
    assert_refused("whole number", buzz(1.0), 16000.5)
    assert_refused("whole number", buzz(1.0), True)
    assert_refused("whole number", buzz(1.0), float("nan"))
    assert_refused("whole number", buzz(1.0), "16000")
    assert_refused("must be given with an array", buzz(1.0))
    assert len(read_audio(buzz(1.0), 16000.0)) == RATE  # type: ignore[arg-type]
    assert len(read_audio(buzz(1.0), np.int64(16000))) == RATE  # type: ignore[arg-type]


def test_a_low_rate_of_a_file_is_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "x.wav", buzz(1.0), 4000)
    assert_refused("at least 8000 Hz, but is 4000", tmp_path / "x.wav")


@pytest.mark.parametrize("shape", [(), (2, 3, 4), (100, 90), (1, 1, RATE)])
def test_wrong_shapes_are_refused(shape: tuple[int, ...]) -> None:
    assert_refused("`audio` must have", np.ones(shape, dtype=np.float32), RATE)


@pytest.mark.parametrize("dtype", [np.complex64, np.bool_, np.int64, np.uint64, object, "U3"])
def test_wrong_sample_types_are_refused(dtype: object) -> None:
    assert_refused("floats or integers of at most 32 bit", np.ones(RATE).astype(dtype), RATE)  # type: ignore[call-overload]


def read_all(batch: InputBatch[Any]) -> list[int]:
    """Read each input, and return the indices of those that were not refused."""
    accepted = list[int]()
    for index, item in enumerate(batch.inputs):
        with batch.collecting_error(index):
            read_audio(item, RATE)
            accepted.append(index)
    return accepted


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")  # deprecated since torch 2.13
@pytest.mark.parametrize("kind", ["float8", "sparse", "meta", "quantised"])
def test_a_tensor_that_numpy_cannot_hold_fails_alone(kind: str) -> None:
    sound = torch.from_numpy(buzz(0.5))
    odd = {
        "float8": sound.to(torch.float8_e4m3fn),
        "sparse": sound.to_sparse(),
        "meta": sound.to("meta"),
        "quantised": torch.quantize_per_tensor(sound.float(), 0.1, 0, torch.qint8),
    }[kind]
    batch = as_batch([sound, odd, sound], RATE)
    assert read_all(batch) == [0, 2]
    assert "dense tensor" in str(batch.errors[1])


class Pathless:
    def __fspath__(self) -> str:
        raise RuntimeError("no path")


class Readless:
    @property
    def read(self) -> object:
        raise RuntimeError("no read")


def test_a_failing_object_fails_alone() -> None:
    sound = torch.from_numpy(buzz(0.5))
    items: list[Any] = [sound, Pathless(), Readless(), sound]
    batch = as_batch(items, RATE)
    assert read_all(batch) == [0, 3]
    assert all("RuntimeError: no" in str(error) for error in batch.errors.values())


def test_a_tensor_with_a_negative_bit_is_read() -> None:
    sound = torch.from_numpy(buzz(0.5)).float()
    negated = torch.view_as_complex(torch.stack([sound, -sound], 1)).conj().imag
    assert torch.equal(read_audio(negated, RATE), read_audio(sound, RATE))


@pytest.mark.parametrize("audio", [None, 3, 1.5, object()])
def test_wrong_types_are_refused(audio: object) -> None:
    assert_refused(
        "a path, a file object, a file's bytes, an array, a dict with array and sampling_rate, or a list", audio
    )


def test_bytes_and_dicts_without_sound_are_refused() -> None:
    assert_refused("a sound file that libsndfile can read", b"RIFF")
    assert_refused("`array` and `sampling_rate`, `bytes` or `path`, but is a dict of 'audio'", {"audio": 1})


def wav_bytes(sound: np.ndarray, rate: int = RATE) -> bytes:
    """Return a wav file's bytes."""
    file = io.BytesIO()
    soundfile.write(file, sound, rate, subtype="FLOAT", format="WAV")
    return file.getvalue()


def test_dicts_of_datasets_are_read(tmp_path: Path) -> None:
    """Decoded and undecoded columns of sound, and bytes of a file."""
    sound, slow = buzz(0.5), buzz(0.5, rate=8000)
    (tmp_path / "a.wav").write_bytes(wav_bytes(sound))
    expected = read_audio(sound, RATE)
    forms: list[Any] = [
        {"array": sound, "sampling_rate": RATE, "path": "gone.wav"},
        {"array": sound.tolist(), "sampling_rate": float(RATE)},
        {"array": torch.from_numpy(sound), "sampling_rate": np.int64(RATE)},
        {"bytes": wav_bytes(sound), "path": None},
        {"bytes": None, "path": str(tmp_path / "a.wav")},
        {"array": None, "path": tmp_path / "a.wav"},
        wav_bytes(sound),
        bytearray(wav_bytes(sound)),
    ]
    for form in forms:
        assert torch.allclose(read_audio(form), expected, atol=1e-6)
    assert torch.equal(read_audio({"array": slow, "sampling_rate": 8000}), read_audio(slow, 8000))
    assert torch.equal(read_audio(wav_bytes(slow, 8000)), read_audio(slow, 8000))


@pytest.mark.parametrize(
    ("audio", "message"),
    [
        ({"array": [0.1] * 9000}, "must hold `sampling_rate` as well as `array`"),
        ({"array": [0.1] * 9000, "sampling_rate": "fast"}, "whole number"),
        ({"array": [0.1] * 9000, "sampling_rate": 100}, "at least 8000"),
        ({"array": "talk", "sampling_rate": RATE}, "floats or integers"),
        ({"array": [[0.1], [0.1, 0.2]], "sampling_rate": RATE}, "can be read"),
        ({"array": [float("nan")] * 9000, "sampling_rate": RATE}, "NaN"),
        ({"array": [], "sampling_rate": RATE}, "at least"),
        ({"bytes": b"", "path": None}, "`array` and `sampling_rate`"),
        ({"bytes": b"RIFF", "path": None}, "libsndfile can read"),
        ({"path": "nowhere.wav"}, "does not exist"),
        ({"path": 7}, "a dict of 'path'"),
        ({}, "a dict of nothing"),
        ({"array": {"array": [0.1]}, "sampling_rate": RATE}, "floats or integers"),
    ],
    ids=range(13),
)
def test_broken_dicts_are_refused(audio: Any, message: str) -> None:
    assert_refused(message, audio)


def test_a_rate_beside_a_dict_is_refused() -> None:
    with pytest.raises(InputError, match="`sample_rate` must be left out for files and dicts"):
        as_batch({"array": [0.1] * 9000, "sampling_rate": RATE}, RATE)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.uint32])
def test_integers_are_scaled_by_their_range(dtype: type[np.integer]) -> None:
    sound = buzz(0.5)
    info = np.iinfo(dtype)
    half = 2.0 ** (info.bits - 1)
    array = np.round(sound.astype(np.float64) * (half - 1) + (half if info.min == 0 else 0)).astype(dtype)
    assert np.allclose(read_audio(array, RATE).numpy(), sound, atol=2 / half + 1e-6)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_of_every_width_are_read(dtype: type[np.floating]) -> None:
    assert np.allclose(read_audio(buzz(0.5).astype(dtype), RATE).numpy(), buzz(0.5), atol=1e-3)
    assert np.allclose(read_audio(torch.from_numpy(buzz(0.5).astype(dtype)), RATE).numpy(), buzz(0.5), atol=1e-3)


def test_floats_beyond_full_scale_are_brought_back() -> None:
    for scale in (32768.0, 2.0**30):
        assert read_audio(buzz(0.5).astype(np.float64) * scale, RATE).abs().max().item() == pytest.approx(1.0)


def test_channels_are_mixed_down_whichever_axis_they_lie_on(tmp_path: Path) -> None:
    left, right = buzz(0.5, 1), buzz(0.5, 2)
    both = np.stack([left, right])
    expected = both.mean(axis=0)
    assert np.allclose(read_audio(both, RATE).numpy(), expected, atol=1e-6)
    assert np.allclose(read_audio(both.T, RATE).numpy(), expected, atol=1e-6)
    assert np.allclose(read_audio(left[None], RATE).numpy(), left, atol=1e-6)
    soundfile.write(tmp_path / "x.wav", both.T, RATE, subtype="FLOAT")
    assert np.allclose(read_audio(tmp_path / "x.wav").numpy(), expected, atol=1e-6)


def test_unusual_array_views_are_read() -> None:
    sound = buzz(0.5)
    for view in (sound[::-1][::-1], np.repeat(sound, 2)[::2], np.asfortranarray(sound), sound.astype(">f4")):
        assert np.allclose(read_audio(view, RATE).numpy(), sound)
    sound.flags.writeable = False
    assert len(read_audio(sound, RATE)) == 8000


def test_more_than_an_hour_is_refused_before_it_is_read() -> None:
    assert_refused(
        "must last at most 3600 seconds, but lasts 3700", np.broadcast_to(np.float32(0.1), (3700 * 8000,)), 8000
    )


def test_an_endless_file_object_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            assert size > 0
            return bytes(size)

    monkeypatch.setattr("mmdec.io.audio.files.MAX_BYTES", 3 << 20)
    assert_refused("must hold at most 3145728 bytes, but the file object gives more", Endless())


def test_errors_are_value_errors() -> None:
    assert issubclass(mmdec.InputError, mmdec.MmdecError)
    assert issubclass(mmdec.InputError, ValueError)


@pytest.mark.parametrize("level", [1e-3, 0.1, 1.0])
@pytest.mark.parametrize("rate", [RATE, 44_100])
@pytest.mark.parametrize("noise", [0.0, 1e-5])
def test_a_click_counts_as_silence(level: float, rate: int, noise: float) -> None:
    sound = noise * np.random.default_rng(0).standard_normal(5 * rate)
    sound[2 * rate : 2 * rate + 3] = [level, -level, level]
    assert_refused("is silent", sound, rate)


@pytest.mark.parametrize("seconds", [0.2, 0.5])
def test_a_short_word_in_digital_silence_is_speech(seconds: float) -> None:
    sound = np.concatenate([np.zeros(3 * RATE), buzz(seconds), np.zeros(3 * RATE)])
    assert len(read_audio(sound, RATE)) == len(sound)
    assert len(read_audio(buzz(0.1), RATE)) == 1600
