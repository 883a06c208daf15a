"""A tiny Whisper on disk, loaded, and one that a test may spoil."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmdec.hub.whisper import LoadedWhisper, load_whisper
from tests.support.tiny_whisper import network, processor, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def whisper(folder: Path) -> LoadedWhisper:
    return load_whisper(folder, "cpu")


@pytest.fixture
def loose(whisper: LoadedWhisper) -> LoadedWhisper:
    """One of the test's own, to spoil."""
    whole = processor()
    return LoadedWhisper(network(whole.tokenizer), whole)  # type: ignore[attr-defined]
