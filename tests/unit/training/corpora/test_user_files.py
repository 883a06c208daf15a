"""Tests the user's files: recordings with a transcript file beside each, and a folder of pictures with one question."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmdec.errors import InputError
from mmdec.training.corpora.image_text import ask_about
from mmdec.training.corpora.librispeech import read_recordings


def test_transcripts_lie_beside_recordings(tmp_path: Path) -> None:
    sounds = [tmp_path / "a.wav", tmp_path / "b.flac"]
    for path in sounds:
        path.touch()
    (tmp_path / "a.txt").write_text("  hello\n there \n", encoding="utf-8")
    with pytest.raises(InputError, match=r"b\.txt' cannot be read"):
        read_recordings(sounds)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match=r"b\.txt' cannot be read"):
        read_recordings(sounds)
    (tmp_path / "b.txt").write_text("good bye", encoding="utf-8")
    rows = read_recordings(sounds)
    assert [(row.path, row.text) for row in rows] == [(sounds[0], "hello there"), (sounds[1], "good bye")]
    assert len({row.speaker for row in rows}) == 2
    sounds[1].unlink()
    with pytest.raises(InputError, match="must be sound files"):
        read_recordings(sounds)


def test_one_question_about_each_picture(tmp_path: Path) -> None:
    for name in ("b.PNG", "a.jpg", "notes.txt"):
        (tmp_path / name).touch()
    (tmp_path / "c.png").mkdir()
    rows = ask_about(tmp_path, "What is it?")
    assert [(row.id, row.question, row.images) for row in rows] == [
        (name, "What is it?", (tmp_path / name,)) for name in ("a.jpg", "b.PNG")
    ]
    assert {row.scoring for row in rows} == {""}
    assert [row.id for row in ask_about(tmp_path / "notes.txt", "x")] == ["notes.txt"]
    (tmp_path / "empty").mkdir()
    for path, question in ((tmp_path / "empty", "x"), (tmp_path / "none", "x"), (tmp_path, " ")):
        with pytest.raises(InputError, match="must be"):
            ask_about(path, question)
