"""Tests that a cached model is loaded again when its folder has been rewritten, and that the old one is freed."""

from __future__ import annotations

import os
import shutil
import weakref
from pathlib import Path

from mmdec.drafters.medusa.checkpoint import save_heads
from mmdec.hub.cache import LoadedModels, path_version
from mmdec.whisper.checkpoint import load_whisper
from tests.support.tiny_whisper import heads, write


class Network:
    """Stands for a model."""


def rewrite(file: Path, seconds: int) -> None:
    file.touch()
    os.utime(file, (seconds, seconds))


def test_only_the_latest_version_of_a_folder_is_cached(tmp_path: Path) -> None:
    models = LoadedModels[Network]()

    def load(device: str) -> weakref.ref[Network]:
        return weakref.ref(models.get((path_version(tmp_path), device), Network))

    rewrite(tmp_path / "model.safetensors", 1)
    on_cpu, on_gpu = load("cpu"), load("cuda:0")
    assert load("cpu")() is on_cpu() is not None
    rewrite(tmp_path / "model.safetensors", 2)
    again = load("cpu")
    assert on_cpu() is None
    assert again() is not None
    assert on_gpu() is not None  # until it is asked for there
    load("cuda:0")
    assert on_gpu() is None


def test_a_rewritten_drafter_folder_replaces_its_cached_network(tmp_path: Path) -> None:
    models = LoadedModels[Network]()
    rewrite(tmp_path / "heads.safetensors", 1)
    first = weakref.ref(models.get(path_version(tmp_path), Network))
    rewrite(tmp_path / "heads.safetensors", 2)
    models.get(path_version(tmp_path), Network)
    assert first() is None


def test_retrained_heads_in_the_same_folder_are_read(tmp_path: Path) -> None:
    whisper = load_whisper(write(tmp_path / "whisper", with_heads=False), "cpu")
    folder = save_heads(tmp_path / "heads", heads(whisper.model, seed=1))
    first = whisper.read_drafter(folder)
    assert whisper.read_drafter(folder) is first
    shutil.rmtree(folder)
    save_heads(folder, heads(whisper.model, seed=2))
    second = whisper.read_drafter(folder)
    assert second.name != first.name
    assert whisper.read_drafter(folder) is second
