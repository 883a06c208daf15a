"""Tests that text under the name of a sound is called text, without advice to convert it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

import mmdec
from mmdec.errors import InputError

TEXTS = ["Hello.\n", "<!DOCTYPE html>\r\n<p>404</p>", '{"error": "é"}', "\ufeffname,text\n", "é" * 2000]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("named", [True, False])
def test_text_files_are_refused_as_sound(text: str, named: bool, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(text.encode())
    with pytest.raises(InputError, match="it is a text file") as caught:
        mmdec.transcribe(tmp_path / "a.wav" if named else io.BytesIO(text.encode()))
    assert "ffmpeg" not in str(caught.value)


@pytest.mark.parametrize("content", [b"\0\1\2\3" * 9, b"\xff\xfe\xfd" * 9, b"RIFF\0\0\0\0WAVE"])
def test_other_bytes_are_not_called_text(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(InputError) as caught:
        mmdec.transcribe(tmp_path / "a.wav")
    assert "text file" not in str(caught.value)
