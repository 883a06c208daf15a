"""The one stopwatch, and dtypes."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import torch

from mmdec.decode.watch import Watch
from mmdec.runtime import Stopwatch, dtype_of, timed_passes

PACKAGE = Path(__file__).parents[2] / "mmdec"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock shows: its first element."""
    shown = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: shown[0])
    return shown


def test_laps_and_stages(clock: list[float]) -> None:
    stopwatch = Stopwatch()
    clock[0] = 2.0
    assert stopwatch.lap() == 2.0
    for seconds in (3.0, 4.0):
        with stopwatch.stage("encoder"):
            clock[0] += seconds
    assert stopwatch.seconds == {"encoder": 7.0}
    assert (stopwatch.lap(), stopwatch.lap()) == (7.0, 0.0)


def test_passes_of_this_thread_are_timed(clock: list[float]) -> None:
    class Slow(torch.nn.Module):
        def forward(self, seconds: float) -> None:
            clock[0] += seconds

    network, passes = Slow(), list[tuple[float, float]]()
    with timed_passes(network, torch.device("cpu"), lambda spent, args, _: passes.append((spent, args[0]))):
        network(5.0)
        other = threading.Thread(target=network, args=(7.0,))
        other.start()
        other.join(20)
        network(2.0)
    network(1.0)
    assert passes == [(5.0, 5.0), (2.0, 2.0)]


def test_a_networks_dtype() -> None:
    assert dtype_of(torch.nn.Linear(1, 1).to(torch.bfloat16)) == torch.bfloat16


def test_nobody_else_reads_a_clock() -> None:
    """Seconds that are compared come from one stopwatch, which waits for the device."""
    reading = re.compile(r"perf_counter|process_time")
    files = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if reading.search(path.read_text())]
    assert files == ["runtime.py"]


def test_a_rounds_share_of_the_processor(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that worked for 1 of 4 seconds waited for the other three."""
    worked = [10.0]
    monkeypatch.setattr("time.thread_time", lambda: worked[0])
    monkeypatch.setattr("sys.platform", "linux")
    watch = Watch(torch.device("cpu"))
    clock[0], worked[0] = 3.0, 10.75
    watch.target += watch.passed()
    clock[0], worked[0] = 4.0, 11.0
    watch.drafter += watch.passed()
    assert watch.learned() == (3.0, 1.0, 0.25)
    watch.start()
    assert watch.learned() == (0.0, 0.0, 1.0)
    monkeypatch.setattr("sys.platform", "win32")
    watch.start()
    clock[0] = 9.0
    watch.target += watch.passed()
    assert watch.learned() == (5.0, 0.0, 1.0)
