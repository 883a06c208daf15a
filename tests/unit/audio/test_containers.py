"""mp4, m4a, mov and webm: read by PyAV, and without it the error says FFmpeg's command."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from mmdec import audio
from mmdec.audio.containers import SUFFIXES, conversion
from mmdec.types import InputError
from tests.support.tiny_containers import CODECS, contained, silent_film

RATE = 48_000
TIME = np.arange(RATE) / RATE
TONE = (0.3 * np.sin(2 * np.pi * 440 * TIME)).astype(np.float32)[None]  # a second


def hertz(samples: torch.Tensor) -> float:
    """The loudest frequency of 16 kHz samples."""
    return float(torch.fft.rfft(samples).abs().argmax()) * 16_000 / len(samples)


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize("suffix", CODECS)
def test_a_tone_comes_back(suffix: str, as_object: bool, tmp_path: Path) -> None:
    content, path = contained(TONE, suffix), tmp_path / f"tone{suffix}"
    path.write_bytes(content)
    samples = audio.load_audio(io.BytesIO(content) if as_object else path)
    assert len(samples) == pytest.approx(16_000, abs=1_000)  # AAC pads
    assert hertz(samples) == pytest.approx(440, abs=2)
    assert float(samples.abs().max()) == pytest.approx(0.3, abs=0.15)
    assert suffix in SUFFIXES
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
    assert "pip install mmdec[av]" in str(caught.value)
    assert str(caught.value).endswith(f"Or convert it with `ffmpeg -i '{path}' '{tmp_path / 'my talk.wav'}'`.")


@pytest.mark.parametrize(
    ("path", "said"),
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
def test_the_command(path: str, said: str) -> None:
    assert conversion(path) == said


def test_what_is_longer_than_the_limit_is_refused(tmp_path: Path) -> None:
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
    with pytest.raises(InputError, match="has no track"):
        audio.load_audio(path)


@pytest.mark.parametrize("content", [b"#EXTM3U\n#EXTINF:1,\n/etc/hostname\n", b"ffconcat version 1.0\nfile a.wav\n"])
def test_lists_of_other_files_are_not_followed(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FFmpeg would open what they name, on the network too: it is never asked what such a file is."""
    monkeypatch.setattr(av, "open", lambda *_, **__: pytest.fail("it was asked"))
    path = tmp_path / "list.m4a"
    path.write_bytes(content)
    with pytest.raises(InputError, match="libsndfile can read"):
        audio.load_audio(path)
