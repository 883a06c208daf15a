"""Tests that recordings and pictures are inspected once, and again only if a file has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mmdec.training.corpora import admission
from mmdec.training.corpora.admission import seconds_of, sizes_of
from tests.unit.training.corpora.small_corpora import picture, sound


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Return two recordings, a text and a missing one."""
    for number in range(2):
        (tmp_path / f"{number}.flac").write_bytes(sound(number, 0.5 + number))
    (tmp_path / "2.flac").write_bytes(b"no sound")
    return [tmp_path / f"{number}.flac" for number in range(4)]


FOUND = [
    0.5,
    1.5,
    "`audio` must be a sound file that libsndfile can read",
    "`audio` must be an existing file",
]


def test_a_second_run_reads_nothing(paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seconds_of(paths, tmp_path / "kept") == FOUND
    monkeypatch.setattr(admission, "_measure", lambda *_: pytest.fail("read again"))
    assert seconds_of(paths, tmp_path / "kept") == FOUND


def test_repaired_files_are_read_again(paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds_of(paths, tmp_path)
    paths[2].write_bytes(sound(2, 2.0))
    read: list[Path] = []
    measured = admission._measure
    monkeypatch.setattr(admission, "_measure", lambda some, how: measured(read.extend(some) or some, how))
    assert seconds_of(paths, tmp_path) == [*FOUND[:2], 2.0, FOUND[3]]
    assert read == [paths[2]]
    os.utime(paths[0], ns=(0, 0))  # as large as before, but another
    seconds_of(paths, tmp_path)
    assert read == [paths[2], paths[0]]


@pytest.mark.parametrize("content", [b"", b"[[1, 2", b"[]", b"7", b"\xff", b"[1, 2, 3, 4]"])
def test_a_damaged_store_is_rewritten(content: bytes, paths: list[Path], tmp_path: Path) -> None:
    seconds_of(paths, tmp_path)
    (cache,) = tmp_path.glob(".recordings-*.json")
    cache.write_bytes(content)
    assert seconds_of(paths, tmp_path) == FOUND


def test_many_files_are_read_by_several_processes(
    paths: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MIN_PARALLEL_FILES", 2)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert seconds_of(paths, None) == FOUND
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_picture_sizes_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(picture(0, 6))
    assert sizes_of([path], tmp_path) == [36.0]
    path.write_bytes(b"no picture")
    assert sizes_of([path], tmp_path) == ["`image` must be a picture"]
