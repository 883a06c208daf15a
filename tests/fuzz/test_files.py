"""Tests reading of three thousand odd sound files: each gives an mmdec error or the file's samples, twice the same, in
limited time.

Each file is read in two processes whose new memory is filled with different bytes, each time after another recording.
So a result with uninitialised memory differs between the processes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.grid import WHOLE

pytestmark = pytest.mark.slow

ALL, SHARE = 3000, 40
PART = 500  # files in a process
POISONS = (0x35, 0xCA)  # what glibc writes into memory that it hands out; elsewhere only the other recording does
FIRST = list(range(0, ALL, PART)) if WHOLE else [0]


def answers(folder: Path, first: int, model: Path, poison: int) -> tuple[list[tuple[dict, dict]], str]:
    """Read each file of a part. Returns (number and story, answer) of each, and what the reader wrote to stderr."""
    last = first + (PART if WHOLE else SHARE)
    written = folder / f"{poison}.jsonl"
    tunables = f"glibc.malloc.perturb={poison}:glibc.malloc.mmap_threshold={1 << 30}"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.fuzz.fuzz_reader",
            str(folder),
            str(first),
            str(last),
            str(model),
            str(written),
        ],
        env={**os.environ, "GLIBC_TUNABLES": tunables, "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        errors="replace",
    )
    lines = [json.loads(line) for line in written.read_text(encoding="utf-8").splitlines()]
    assert done.returncode == 0, (lines[-1:], done.stderr[-3000:])  # the watchdog's, or a crash
    assert len(lines) == 2 * (last - first)
    return list(zip(lines[::2], lines[1::2], strict=True)), done.stderr


@pytest.mark.parametrize("first", FIRST)
def test_odd_files_are_read_or_refused_clearly(first: int, tiny_model: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(answers, tmp_path, first, tiny_model, poison) for poison in POISONS]
        (one, stderr), (two, _) = [run.result() for run in runs]
    assert "Traceback" not in stderr
    wrong = [(case, answer["wrong"]) for case, answer in one + two if answer["wrong"]]
    assert wrong == []
    leaked = [case for (case, a), (_, b) in zip(one, two, strict=True) if a["answer"] != b["answer"]]
    assert leaked == []
    read = sum(answer["read"] for _, answer in one)
    assert 0.15 * len(one) < read < 0.85 * len(one)  # of both kinds enough
    shutil.rmtree(tmp_path)
