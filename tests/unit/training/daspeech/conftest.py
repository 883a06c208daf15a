"""Fixtures: a checkout for tests of `make train`, as on a machine with two cores and no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmdec.training.daspeech import timed
from tests.support.pretended_training import Checkout
from tests.support.tiny_corpus import TinyCorpus, write_corpus


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_corpus(tmp_path_factory.mktemp("written"), recordings=1, dev=2)


@pytest.fixture
def checkout(written: TinyCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkout:
    monkeypatch.chdir(tmp_path)
    made = Checkout(tmp_path, written)
    monkeypatch.setattr(timed, "phone_errors", lambda model, data: 0.5)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    return made
