"""Fixtures: a tiny Whisper as a folder, the same loaded, and a new one that a test may change."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmdec.whisper.checkpoint import LoadedWhisper, load_whisper
from tests.support.tiny_whisper import network, processor, write


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def whisper(folder: Path) -> LoadedWhisper:
    return load_whisper(folder, "cpu")


@pytest.fixture
def loose(whisper: LoadedWhisper) -> LoadedWhisper:
    """Build a new Whisper, which the test may change."""
    whole = processor()
    return LoadedWhisper(network(whole.tokenizer), whole)  # type: ignore[attr-defined]
