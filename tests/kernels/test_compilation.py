"""Compiles every kernel for GPUs that need not be here: the compiler refuses code that the interpreter runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.grid import WHOLE

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not WHOLE, reason="takes a minute: MMDEC_ALL")
@pytest.mark.parametrize("capability", ["80", "90"])
def test_all_kernels_compile(capability: str, tmp_path: Path) -> None:
    """In a process of its own, without Triton's interpreter and its cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.kernels.compiled_kernels", capability]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
