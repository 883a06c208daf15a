"""Fixtures and functions for several tests: tiny models with random weights, and sounds that resemble speech."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # for tests/kernels: it must be set before Triton is first imported
torch.set_num_threads(1)  # the networks of the tests are too small for more

RATE = 16_000


def buzz(seconds: float, seed: int = 0, rate: int = RATE) -> np.ndarray:
    """Make a sound like a voice, (T,) float32: harmonics of a gliding pitch, with a loudness that changes at 4 Hz."""
    random = np.random.default_rng(seed)
    time = np.arange(int(seconds * rate)) / rate
    phase = 2 * np.pi * np.cumsum(120 + 30 * np.sin(2 * np.pi * 0.7 * time + random.uniform(0, 6))) / rate
    voice = sum(np.sin(n * phase) / n for n in range(1, 20))
    syllables = 0.55 + 0.45 * np.sin(2 * np.pi * 4 * time + random.uniform(0, 6))
    return (0.2 * syllables * voice + 0.001 * random.standard_normal(len(time))).astype(np.float32)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a translator's folder with all parts and random weights."""
    from tests.support.tiny_translator import write

    return write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_heard_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the folder of a translator with a Whisper's encoder and piece units, with random weights."""
    from tests.support.tiny_piece_translator import write

    return write(tmp_path_factory.mktemp("models") / "heard")


@pytest.fixture(params=["phones", "pieces"])
def any_model(request: pytest.FixtureRequest, tiny_model: Path, tiny_heard_model: Path) -> Path:
    """Return the folder of a translator of each layout in turn."""
    return tiny_model if request.param == "phones" else tiny_heard_model
