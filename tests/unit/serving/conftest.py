"""Fixtures: tiny models, loaded once for all tests of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import running_servers as served


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return served.models(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def folder(engines: dict[str, Any]) -> Path:
    return engines["whisper"].loaded.directory.parent
