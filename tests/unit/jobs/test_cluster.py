"""Tests many rows with Ray, if it is installed: a worker and the driver are killed, and each row is processed once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import soundfile

import mmdec
from mmdec.jobs.many import ROWS_PER_PART
from tests.conftest import RATE, buzz
from tests.support import tiny_whisper
from tests.support.grid import WHOLE
from tests.support.many_rows import check_once, table
from tests.support.running_servers import ROOT

COUNT = 2000 if WHOLE else 6 * ROWS_PER_PART
PATIENCE = 1200.0  # seconds; Ray starts slowly on a busy machine
pytest.importorskip("ray")


def wait(true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def below(pid: int) -> dict[int, str]:
    """Return the processes that a process has started, directly or not, and their command lines."""
    result, parents = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            status = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(status[1])
            if status[0] != "Z":
                result[int(folder.name)] = (folder / "cmdline").read_text()
    own, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in own} - own
        own |= more
        grown = bool(more)
    return {each: result[each] for each in own - {pid} if each in result}


def test_rows_are_done_once_though_a_worker_and_the_driver_die(tmp_path: Path) -> None:
    model, results = tiny_whisper.write(tmp_path / "whisper"), tmp_path / "out" / "results"
    for seed in range(3):
        soundfile.write(tmp_path / f"{seed}.wav", buzz(0.5, seed), RATE)
    rows = [{"path": f"{index % 3}.wav", "id": f"n{index}"} for index in range(COUNT)]
    (tmp_path / "list.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = [sys.executable, "-m", "mmdec", "transcribe", str(tmp_path / "list.jsonl"), "--model", str(model)]
    words += ["--language", "en", "--device", "cpu", "--threads", "1", "--engine", "ray", "--workers", "2"]
    words += ["--output", str(tmp_path / "out")]
    parts, rng = -(-COUNT // ROWS_PER_PART), random.Random()
    moments = sorted(rng.sample(range(1, parts), 2))

    def done() -> int:
        return len([*results.glob("[0-9]*")])

    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL) as driver:
        wait(lambda: done() >= moments[0] or driver.poll() is not None)
        workers = [pid for pid, line in below(driver.pid).items() if line.startswith("ray::Map")]
        os.kill(rng.choice(workers), signal.SIGKILL)
        wait(lambda: done() >= moments[1] or driver.poll() is not None)
        left = below(driver.pid)
        assert driver.poll() is None
        driver.kill()
    end = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in left) and time.monotonic() < end:
        time.sleep(0.1)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    before = done()
    assert before < parts
    ended = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    report = json.loads(ended.stdout)
    print(report, moments, before, parts)
    assert 0 < report["done_now"] <= COUNT - (before - 1) * ROWS_PER_PART
    check_once(tmp_path / "out", COUNT)
    expected = mmdec.transcribe([tmp_path / f"{n}.wav" for n in range(3)], model=model, language="en")
    result = table(tmp_path / "out", "results")
    assert [row["id"] for row in result] == [f"n{index}" for index in range(COUNT)]
    assert all(row["text"] == expected[row["row"] % 3].text for row in result)
