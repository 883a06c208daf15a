"""Tests the number of torch's threads: a call sets it and restores it after; the default depends on the machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from mmdec.errors import InputError
from mmdec.tasks import threads
from mmdec.tasks.threads import (
    PARAMETERS_PER_THREAD,
    THREAD_VARIABLES,
    choose_threads,
    idle_cpus,
    is_default,
    keep_threads,
    quota_of,
    running_processes,
    with_threads,
)

SMALL, LARGE = 3_000_000, 7_000_000_000
NETWORK = nn.Linear(8, 8)


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch has the threads that it began with, three, and one processor is free."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_is_fixed", False)
    monkeypatch.setattr(threads, "_defaults", lambda: {3})
    monkeypatch.setattr(threads, "idle_cpus", lambda: 1)
    yield
    torch.set_num_threads(before)


def test_threads_are_restored_after_the_call() -> None:
    before = torch.get_num_threads()
    with with_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(InputError, match="`threads` must be a whole number from 1"), with_threads(0):
        pass


def test_threads_are_restored_where_none_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = torch.get_num_threads()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError), with_threads(before + 1):
        pass
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("parameters", "idle", "most", "chosen"),
    [
        (SMALL, 2, 2, 2),  # calm
        (SMALL, 1, 2, 1),  # one other process
        (SMALL, -10, 2, 1),  # twelve of them
        (SMALL, 64, 64, 2),  # a small model gains nothing from more
        (4 * PARAMETERS_PER_THREAD, 64, 64, 6),
        (LARGE, 64, 64, 64),
        (LARGE, 40, 64, 40),
        (LARGE, 64, 32, 32),  # torch takes a thread for each core
    ],
)
def test_thread_counts_follow_parameters_and_idle_cpus(parameters: int, idle: int, most: int, chosen: int) -> None:
    assert choose_threads(parameters, idle, most) == chosen


def test_a_call_sets_threads_and_restores_them(busy: None) -> None:
    with with_threads(None, NETWORK):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("variable", THREAD_VARIABLES)
def test_the_environments_number_is_left_alone(busy: None, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "3")
    with with_threads(None, NETWORK):
        assert torch.get_num_threads() == 3


@pytest.mark.parametrize("count", [2, 5])
def test_a_number_set_by_the_user_is_left_alone(busy: None, count: int) -> None:
    torch.set_num_threads(count)
    with with_threads(None, NETWORK):
        assert torch.get_num_threads() == count
    assert torch.get_num_threads() == count


def test_a_number_set_by_keep_threads_is_left_alone(busy: None) -> None:
    """The default's own number, too: a benchmark of three threads has three."""
    keep_threads(3)
    with with_threads(None, NETWORK):
        assert torch.get_num_threads() == 3


def test_a_model_on_a_gpu_changes_no_threads(busy: None) -> None:
    with with_threads(None, nn.Linear(8, 8, device="meta")):
        assert torch.get_num_threads() == 3


def test_threads_are_restored_after_an_error(busy: None) -> None:
    with pytest.raises(RuntimeError), with_threads(None, NETWORK):
        raise RuntimeError
    assert torch.get_num_threads() == 3


def test_other_threads_keep_their_number(busy: None) -> None:
    """One that began before, and one that begins during the call: torch tells new ones what was set last."""
    seen: dict[str, int] = {}
    go = threading.Event()

    def early() -> None:
        torch.get_num_threads()  # torch's first use in this thread
        begun.set()
        assert go.wait(20)
        seen["early"] = torch.get_num_threads()

    begun = threading.Event()
    first = threading.Thread(target=early)
    first.start()
    assert begun.wait(20)
    with with_threads(None, NETWORK):
        go.set()
        second = threading.Thread(target=lambda: seen.update(late=torch.get_num_threads()))
        second.start()
        for thread in (first, second):
            thread.join(20)
        assert torch.get_num_threads() == 1
    assert seen == {"early": 3, "late": 3}


@pytest.mark.parametrize(
    ("count", "environment", "expected"),
    [
        (8, {}, True),
        (4, {}, True),
        (3, {}, False),
        (8, {"OMP_NUM_THREADS": "8"}, False),
        (8, {"MKL_NUM_THREADS": "1"}, False),
        (8, {"OMP_NUM_THREADS": ""}, True),
    ],
)
def test_torchs_default_number_is_recognised(count: int, environment: dict[str, str], expected: bool) -> None:
    assert is_default(count, environment, {4, 8}) is expected


@pytest.mark.parametrize(
    ("content", "running"),
    [("0.37 1.12 0.56 13/108 12975\n", 13), ("", None), ("0.37 1.12 0.56", None), ("a b c d/e f", None)],
)
def test_running_processes_are_counted(content: str, running: int | None) -> None:
    """Not load averages, which lag by minutes."""
    assert running_processes(content) == running


@pytest.mark.parametrize(
    ("limit", "quota"),
    [("150000 100000\n", 1), ("400000 100000\n", 4), ("50000 100000\n", 1), ("max 100000\n", 12), ("", 12)],
)
def test_a_container_quota_limits_threads(limit: str, quota: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    assert quota_of(limit) == quota


@pytest.mark.parametrize(
    ("files", "idle"),
    [
        ({"/proc/loadavg": "0.37 1.12 0.56 5/108 12975"}, 4),  # four others run
        ({"/proc/loadavg": "0.37 1.12 0.56 1/108 12975", "/sys/fs/cgroup/cpu.max": "300000 100000"}, 3),
        ({"/sys/fs/cgroup/cpu.max": "max 100000"}, 8),  # a system that does not tell what runs
        ({"/sys/fs/cgroup/cpu.max": "100000 100000"}, 1),
    ],
)
def test_idle_cpus_are_counted(files: dict[str, str], idle: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(threads, "_affinity", lambda: set(range(8)))
    monkeypatch.setattr(threads, "_read_text", lambda path: files.get(str(path), ""))
    assert idle_cpus() == idle


def test_this_machine_can_be_read() -> None:
    assert 1 <= choose_threads(LARGE, idle_cpus(), 64) <= 64
