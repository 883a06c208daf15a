"""Fixtures of the tests that run threads side by side."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads that take turns after every few operations."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)
