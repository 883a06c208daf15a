"""Tests reading and writing sound, and the frames of features."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
import torch
import torchaudio.compliance.kaldi as kaldi
from hypothesis import given, settings
from hypothesis import strategies as st
from torchaudio import functional

from mmdec.errors import InputError
from mmdec.io import audio
from mmdec.io.audio import samples as audio_samples
from mmdec.io.audio.files import conversion
from mmdec.io.suffixes import SOUND_SUFFIXES
from tests.conftest import RATE, buzz
from tests.support.tiny_containers import CODECS, contained, silent_film


def tone(hertz: float, rate: int, seconds: float = 1.0) -> torch.Tensor:
    return 0.5 * torch.sin(2 * torch.pi * hertz * torch.arange(int(rate * seconds), dtype=torch.float64) / rate).float()


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 22050, 44100, 48000, 96000, 44101])
def test_resampling_keeps_a_tone(rate: int) -> None:
    result = audio.resample(tone(440, rate), rate)
    assert result.shape == (RATE,)
    assert (result - tone(440, RATE))[200:-200].abs().max() < 1e-3


@pytest.mark.parametrize("rate", [48000, 44101])
def test_resampling_removes_what_would_alias(rate: int) -> None:
    assert audio.resample(tone(10_000, rate), rate)[500:-500].abs().max() < 0.01


@pytest.mark.parametrize(
    ("kind", "subtype", "error"),
    [
        ("wav", "PCM_U8", 1e-2),
        ("wav", "PCM_16", 1e-4),
        ("wav", "PCM_24", 1e-6),
        ("wav", "PCM_32", 1e-7),
        ("wav", "FLOAT", 1e-7),
        ("wav", "DOUBLE", 1e-7),
        ("flac", "PCM_16", 1e-4),
    ],
)
def test_every_sample_format_reads_alike(tmp_path: Path, kind: str, subtype: str, error: float) -> None:
    sound, path = buzz(0.3), tmp_path / f"x.{kind}"
    soundfile.write(path, sound, RATE, subtype=subtype)
    assert torch.allclose(audio.load_audio(path), torch.from_numpy(sound), atol=error)


def test_mp3_and_ogg_read(tmp_path: Path) -> None:
    for name in ("x.mp3", "x.ogg"):
        soundfile.write(tmp_path / name, buzz(0.5), RATE)
        assert audio.load_audio(tmp_path / name).shape[0] == pytest.approx(RATE * 0.5, abs=2500)


@pytest.mark.parametrize(
    ("value", "rate", "message"),
    [
        (np.nan, RATE, "NaN or infinite"),
        (np.inf, RATE, "NaN or infinite"),
        (1e30, RATE, "its peak is"),
        (0.0, 100, "at least 8000 Hz, but is 100"),
        (0.0, 500_000, "at most 192000 Hz, but is 500000"),
        (None, RATE, "at least one sample"),
    ],
)
@pytest.mark.parametrize("read", [audio.load_audio, audio.sound_seconds])
def test_errors_name_the_recordings_file(
    tmp_path: Path, read: Callable[[Path], object], value: float | None, rate: int, message: str
) -> None:
    path = tmp_path / "odd one.wav"
    samples = buzz(0.3)
    samples[1000] = value or samples[1000]
    soundfile.write(path, samples if value is not None else samples[:0], rate, subtype="FLOAT")
    with pytest.raises(InputError, match=message) as caught:
        read(path)
    assert f"'{path}'" in str(caught.value)


def test_a_pipe_is_read() -> None:
    class Pipe:  # neither seeks nor tells
        def read(self, size: int = -1) -> bytes:
            return buffer.read(size)

    buffer = io.BytesIO()
    soundfile.write(buffer, buzz(0.3), RATE, format="WAV")
    buffer.seek(0)
    assert audio.load_audio(Pipe()).shape == (4800,)  # type: ignore[arg-type]


def test_saving_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = audio.save_audio(tmp_path / "new" / "x.wav", torch.from_numpy(buzz(0.2)))
    before = path.read_bytes()

    def broken(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="disk full"):
        audio.save_audio(path, torch.zeros(10))
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["x.wav"]


def test_saving_refuses_an_unknown_suffix(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"`path` must end in \.wav"):
        audio.save_audio(tmp_path / "x.txt", torch.zeros(10))


@given(st.integers(0, 4000))
@settings(max_examples=25, deadline=None)
def test_target_features_share_one_grid(samples: int) -> None:
    sound = torch.from_numpy(buzz(0.25))[:samples]
    frames = 1 + samples // audio.HOP
    assert audio.log_mel(sound).shape == (frames, 80)
    assert audio.energy(sound).shape == (frames,)
    assert audio.pitch(sound).shape == (frames,)


def test_source_features_are_normalised() -> None:
    features = audio.fbank(torch.from_numpy(buzz(2.0)))
    assert features.shape == (198, 80)
    assert torch.allclose(features.mean(0), torch.zeros(80), atol=1e-4)
    assert torch.allclose(features.std(0, correction=0), torch.ones(80), atol=1e-3)
    assert torch.isfinite(audio.fbank(torch.zeros(10))).all()


def test_source_features_do_not_depend_on_the_level() -> None:
    sound = torch.from_numpy(buzz(1.0))
    assert torch.allclose(audio.fbank(sound), audio.fbank(0.25 * sound), atol=1e-2)


def test_log_mel_is_differentiable_even_in_silence() -> None:
    spec = importlib.util.spec_from_file_location("fresh_features", audio_samples.__file__)
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)  # a copy of the module that has kept nothing yet
    spec.loader.exec_module(fresh)
    with torch.inference_mode():  # what decoding keeps serves training too
        fresh.log_mel(torch.zeros(1, 2000))
    sound = torch.zeros(2, 2000, requires_grad=True)
    fresh.log_mel(sound).sum().backward()
    assert sound.grad is not None
    assert torch.isfinite(sound.grad).all()


@pytest.mark.parametrize("hertz", [75.0, 110.0, 180.0, 260.0, 380.0])
def test_pitch_of_a_tone_with_harmonics_is_its_fundamental(hertz: float) -> None:
    sound = sum((tone(hertz * n, RATE) / n for n in range(1, 8)), torch.zeros(RATE))
    assert audio.pitch(sound)[5:-5].median().item() == pytest.approx(hertz, rel=0.01)


def test_noise_and_silence_have_no_pitch() -> None:
    noise = 0.1 * torch.randn(RATE, generator=torch.Generator().manual_seed(0))
    assert (audio.pitch(noise) > 0).float().mean() < 0.02
    assert audio.pitch(torch.zeros(RATE)).sum() == 0


def test_energy_follows_the_level() -> None:
    sound = torch.from_numpy(buzz(1.0))
    assert torch.allclose(audio.energy(2 * sound), 2 * audio.energy(sound), rtol=1e-2)


def test_features_are_those_of_torchaudio() -> None:
    """The networks were trained on them."""
    sound = torch.from_numpy(buzz(2.0))
    bands = kaldi.fbank(sound[None] * 32768.0, num_mel_bins=audio.MELS, sample_frequency=RATE, dither=0.0)
    spread, mean = torch.std_mean(bands, dim=0, correction=0)
    assert (audio.fbank(sound) - (bands - mean) / spread.clamp(min=1e-5)).abs().max() < 2e-4
    filters = functional.melscale_fbanks(513, 20.0, 8000.0, audio.MELS, RATE, norm="slaney", mel_scale="slaney")
    assert (audio_samples._mel_filters(torch.device("cpu")) - filters).abs().max() < 1e-6


def sentence_pattern(lengths: list[float], pause: float) -> torch.Tensor:
    parts = [part for i, seconds in enumerate(lengths) for part in (buzz(seconds, i), np.zeros(int(pause * RATE)))]
    return torch.from_numpy(np.concatenate(parts[:-1]).astype(np.float32))


def test_cuts_fall_into_pauses_and_cover_everything() -> None:
    sound = sentence_pattern([3.0, 2.0, 4.0, 2.5], pause=0.3)
    pieces = audio.split_at_pauses(sound, max_seconds=5.5)
    assert [start for start, _ in pieces] == [0] + [end for _, end in pieces[:-1]]
    assert pieces[-1][1] == len(sound)
    assert all(end - start <= 5.5 * RATE for start, end in pieces)
    assert all(sound[end - 160 : end].abs().max() == 0 for _, end in pieces[:-1])


def test_a_long_pause_always_ends_a_piece() -> None:
    assert len(audio.split_at_pauses(sentence_pattern([1.0, 1.0], pause=0.8))) == 2
    assert len(audio.split_at_pauses(sentence_pattern([1.0, 1.0], pause=0.2))) == 1


@given(st.integers(1, 200_000), st.floats(0.5, 8.0), st.integers(0, 5))
@settings(max_examples=20, deadline=None)
def test_pieces_cover_any_sound(length: int, limit: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    sound = torch.from_numpy((random.standard_normal(length) * (random.random(length) > 0.5)).astype(np.float32))
    pieces = audio.split_at_pauses(sound, max_seconds=limit)
    assert pieces[0][0] == 0
    assert pieces[-1][1] == length
    assert all(a[1] == b[0] for a, b in pairwise(pieces))
    assert all(0 < end - start <= limit * RATE + 160 for start, end in pieces)


def test_trimming_leaves_the_speech() -> None:
    sound = torch.from_numpy(np.concatenate([np.zeros(RATE), buzz(1.0), np.zeros(2 * RATE)]).astype(np.float32))
    trimmed = audio.trim_silence(sound)
    assert 0.9 * RATE < len(trimmed) < 2 * RATE
    assert trimmed.square().sum() == pytest.approx(sound.square().sum().item(), rel=0.02)


@pytest.mark.parametrize(
    ("kind", "subtype"), [("SDS", "PCM_16"), ("HTK", "PCM_16"), ("VOC", "PCM_16"), ("AVR", "PCM_16")]
)
def test_formats_that_are_not_listed_are_refused(tmp_path: Path, kind: str, subtype: str) -> None:
    """libsndfile reads them, some beyond their end."""
    content = io.BytesIO()
    soundfile.write(content, buzz(0.3), RATE, format=kind, subtype=subtype)
    path = tmp_path / "x.wav"
    path.write_bytes(content.getvalue())
    for source in (path, io.BytesIO(content.getvalue())):
        with pytest.raises(InputError, match=rf"`audio` must be one of WAV, .*, but .* is {kind}\. Convert it"):
            audio.load_audio(source)


HIGH_RATE = 48_000
TIME = np.arange(HIGH_RATE) / HIGH_RATE
TONE = (0.3 * np.sin(2 * np.pi * 440 * TIME)).astype(np.float32)[None]  # a second


def hertz(samples: torch.Tensor) -> float:
    """Return the loudest frequency of 16 kHz samples."""
    return float(torch.fft.rfft(samples).abs().argmax()) * 16_000 / len(samples)


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize("suffix", CODECS)
def test_a_saved_tone_is_read_back(suffix: str, as_object: bool, tmp_path: Path) -> None:
    content, path = contained(TONE, suffix), tmp_path / f"tone{suffix}"
    path.write_bytes(content)
    samples = audio.load_audio(io.BytesIO(content) if as_object else path)
    assert len(samples) == pytest.approx(16_000, abs=1_000)  # AAC pads
    assert hertz(samples) == pytest.approx(440, abs=2)
    assert float(samples.abs().max()) == pytest.approx(0.3, abs=0.15)
    assert suffix in SOUND_SUFFIXES
    assert audio.sound_seconds(path) == pytest.approx(1.0, abs=0.06)


def test_the_content_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "tone.wav"
    path.write_bytes(contained(TONE, ".m4a"))
    assert hertz(audio.load_audio(path)) == pytest.approx(440, abs=2)


def test_channels_are_mixed(tmp_path: Path) -> None:
    path = tmp_path / "tone.mov"
    path.write_bytes(contained(np.concatenate([TONE, np.zeros_like(TONE)]), ".mov"))
    assert float(audio.load_audio(path).abs().max()) == pytest.approx(0.15, abs=0.01)


@pytest.mark.parametrize("suffix", CODECS)
def test_without_pyav_the_error_says_what_to_run(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"my talk{suffix}"
    path.write_bytes(contained(TONE, suffix))
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InputError) as caught:
        audio.load_audio(path)
    assert "pip install 'mmdec[av]'" in str(caught.value)
    assert str(caught.value).endswith(f"Or convert it with `ffmpeg -i '{path}' '{tmp_path / 'my talk.wav'}'`.")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("talk.amr", "Convert it with `ffmpeg -i talk.amr talk.wav`."),
        ("a/my talk.amr", "Convert it with `ffmpeg -i 'a/my talk.amr' 'a/my talk.wav'`."),
        ("talk.wav", "Convert it with `ffmpeg -i talk.wav talk-converted.wav`."),
        ("-y.m4a", "Convert it with `ffmpeg -i file:-y.m4a file:-y.wav`."),
        ("12:30.m4a", "Convert it with `ffmpeg -i file:12:30.m4a file:12:30.wav`."),
        ("a;rm b.m4a", "Convert it with `ffmpeg -i 'a;rm b.m4a' 'a;rm b.wav'`."),
        ("a\nb.m4a", "Convert it to 16-bit PCM wav."),
        ("", "Convert it to 16-bit PCM wav."),
    ],
)
def test_the_suggested_ffmpeg_command_quotes_its_paths(path: str, message: str) -> None:
    assert conversion(path) == message


def test_the_command_overwrites_no_recording_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "talk.wav").write_bytes(b"another")
    assert conversion(f"{tmp_path / 'talk.m4a'}").endswith(f"{tmp_path / 'talk-converted.wav'}`.")


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "talk.wav"
    path.touch()
    with pytest.raises(InputError, match=r"\(it is empty\)\. Record or download it again\."):
        audio.load_audio(path)


def test_recordings_over_the_limit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tone.webm"
    path.write_bytes(contained(TONE, ".webm"))
    with pytest.raises(InputError, match="must last at most"):
        audio.load_audio(path, max_seconds=0.5)


def test_a_rate_beyond_the_limits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tone.mov"
    path.write_bytes(contained(TONE, ".mov", 4_000))
    with pytest.raises(InputError, match="`sample_rate` must be at least"):
        audio.load_audio(path)


@pytest.mark.parametrize("suffix", CODECS)
@pytest.mark.parametrize("part", [0.02, 0.3, 0.7])
def test_a_cut_file_is_as_long_as_what_is_left(suffix: str, part: float, tmp_path: Path) -> None:
    """Or it is refused: an MP4's table is at its end."""
    content, path = contained(TONE, suffix), tmp_path / f"tone{suffix}"
    path.write_bytes(content[: int(part * len(content))])
    try:
        samples = audio.load_audio(path)
    except InputError:
        return
    assert len(samples) < 16_000 * (part + 0.2)


def test_a_film_without_sound_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    path.write_bytes(silent_film())
    with pytest.raises(InputError, match="has no audio track"):
        audio.load_audio(path)


@pytest.mark.parametrize("content", [b"#EXTM3U\n#EXTINF:1,\n/etc/hostname\n", b"ffconcat version 1.0\nfile a.wav\n"])
def test_lists_of_other_files_are_not_followed(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FFmpeg would open what they name, on the network too: it is never asked what such a file is."""
    monkeypatch.setattr(av, "open", lambda *_, **__: pytest.fail("it was asked"))
    path = tmp_path / "list.m4a"
    path.write_bytes(content)
    with pytest.raises(InputError, match="libsndfile can read"):
        audio.load_audio(path)
