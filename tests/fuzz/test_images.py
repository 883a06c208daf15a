"""Tests reading of four thousand odd pictures: each gives an mmdec error or the picture's pixels, twice the same, in
limited time.

Each file is read in two processes whose new memory is filled with different bytes, each time after another picture. So
a result with uninitialised memory, or with bytes of the other picture, differs between the processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.grid import WHOLE

pytestmark = pytest.mark.slow

ALL, SHARE = 4000, 80
PART = 1000  # files in a process
POISONS = (0x35, 0xCA)  # what glibc writes into memory that it hands out; elsewhere only the other picture does
FIRST = list(range(0, ALL, PART)) if WHOLE else [0]


@pytest.mark.parametrize("first", FIRST)
def test_odd_images_are_read_or_refused_clearly(first: int, tmp_path: Path) -> None:
    answers = []
    for poison in POISONS:
        written = tmp_path / f"{poison}.jsonl"
        last = first + (PART if WHOLE else SHARE)
        arguments = [str(tmp_path), str(first), str(last), str(poison), str(written)]
        tunables = f"glibc.malloc.perturb={poison}:glibc.malloc.mmap_threshold={1 << 30}"
        done = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.fuzz_image_reader", *arguments],
            env={**os.environ, "GLIBC_TUNABLES": tunables, "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            errors="replace",
        )
        lines = [json.loads(line) for line in written.read_text(encoding="utf-8").splitlines()]
        assert done.returncode == 0, (lines[-1:], done.stderr[-3000:])  # the watchdog's, or a crash
        assert len(lines) == last - first
        assert "Traceback" not in done.stderr
        answers.append(lines)
    one, two = answers
    assert [(line["story"], line["wrong"]) for line in one + two if line["wrong"]] == []
    assert [line["story"] for line, other in zip(one, two, strict=True) if line["answer"] != other["answer"]] == []
    assert 0.1 * len(one) < sum(line["read"] for line in one) < 0.85 * len(one)  # of both kinds enough
