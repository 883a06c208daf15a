"""A fixture with a folder to run recipes in; it undoes what Lightning's command line changes in the process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch import seed_everything


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to a new folder, and undo the effects of LightningCLI at the end: it seeds all random generators and sets
    environment variables. It also would read pytest's arguments."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["python"])
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    seed_everything(0, verbose=False)
