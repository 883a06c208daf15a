"""Tests the stopwatch, and the split of a round's seconds."""

from __future__ import annotations

import re
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from mmdec.core.timing import RoundTimer, Stopwatch, time_passes

PACKAGE = Path(__file__).parents[3] / "mmdec"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list whose first element `time.perf_counter` shows."""
    shown = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: shown[0])
    return shown


def test_a_stage_sums_its_seconds_and_a_lap_begins_anew(clock: list[float]) -> None:
    stopwatch = Stopwatch()
    clock[0] = 2.0
    assert stopwatch.lap() == 2.0
    for seconds in (3.0, 4.0):
        with stopwatch.stage("encoder"):
            clock[0] += seconds
    assert stopwatch.seconds == {"encoder": 7.0}
    assert (stopwatch.lap(), stopwatch.lap()) == (7.0, 0.0)


def test_a_stage_that_fails_is_measured(clock: list[float]) -> None:
    stopwatch = Stopwatch()
    with suppress(InterruptedError), stopwatch.stage("encoder"):
        clock[0] += 3.0
        raise InterruptedError
    assert stopwatch.seconds == {"encoder": 3.0}


def test_passes_of_this_thread_are_timed(clock: list[float]) -> None:
    class Slow(torch.nn.Module):
        def forward(self, seconds: float) -> None:
            clock[0] += seconds

    network, passes = Slow(), list[tuple[float, float]]()
    with time_passes(network, torch.device("cpu"), lambda spent, args, _: passes.append((spent, args[0]))):
        network(5.0)
        other = threading.Thread(target=network, args=(7.0,))
        other.start()
        other.join(20)
        network(2.0)
    network(1.0)
    assert passes == [(5.0, 5.0), (2.0, 2.0)]


def test_only_core_timing_reads_a_clock() -> None:
    """Seconds that are compared come from one stopwatch, which waits for the device."""
    reading = re.compile(r"perf_counter|process_time")
    files = [path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if reading.search(path.read_text())]
    assert files == ["core/timing.py"]


@pytest.fixture
def worked(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list whose first element the processor's clock shows."""
    shown = [10.0]
    monkeypatch.setattr("time.thread_time", lambda: shown[0])
    monkeypatch.setattr("sys.platform", "linux")
    return shown


@pytest.mark.parametrize(
    ("worked_seconds", "learned"),
    [((2.75, 0.25), (3.0, 1.0, False)), ((0.75, 0.25), (0.75, 0.25, True)), ((2.0, 0.5), (2.0, 0.5, True))],
)
def test_a_round_that_waited_for_a_cpu_costs_its_cpu_seconds(
    worked_seconds: tuple[float, float], learned: tuple[float, float, bool], clock: list[float], worked: list[float]
) -> None:
    """Each stage's CPU seconds replace those of the wall clock."""
    watch = RoundTimer(torch.device("cpu"))
    clock[0], worked[0] = 3.0, 10.0 + worked_seconds[0]
    watch.lap("target")
    clock[0], worked[0] = 4.0, 10.0 + sum(worked_seconds)
    watch.lap("drafter")
    assert watch.round_costs() == learned
    assert watch.seconds == {"target": 3.0, "drafter": 1.0, "core": 0.0}
    watch.start()
    assert watch.round_costs() == (0.0, 0.0, False)


def test_a_stage_ends_the_time_of_the_core(clock: list[float], worked: list[float]) -> None:
    watch = RoundTimer(torch.device("cpu"))
    clock[0] = 1.0
    with watch.stage("drafter"):
        clock[0] = 3.0
    clock[0] = 7.0  # while the decoding waits for its pass
    watch.add_pass(5.0, 5.0)
    clock[0] = 7.5
    watch.lap("core")
    assert watch.seconds == {"target": 5.0, "drafter": 2.0, "core": 1.5}


def test_without_a_cpu_clock_no_round_counts_as_starved(
    clock: list[float], worked: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    watch = RoundTimer(torch.device("cpu"))
    clock[0] = 5.0
    watch.lap("target")
    assert watch.round_costs() == (5.0, 0.0, False)
