"""Chooses torch's number of CPU threads for one call, from the model's size and the number of idle CPUs.

At the end of each operation, torch's threads wait for each other. On a busy machine a thread without a CPU delays
the other threads at every operation: two threads on two busy cores took eight times as long as one thread. So each call
asks the system how many CPUs are idle. Explicit settings are never changed: `threads=`, OMP_NUM_THREADS,
MKL_NUM_THREADS, `torch.set_num_threads`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import torch
from torch import nn

from mmdec.checks.arguments import check_threads
from mmdec.kernels.threads import own_threads

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
MIN_THREADS = 2  # number of threads for the smallest models, if CPUs are idle
# one more thread for each 10 M parameters; smaller matrix products do not gain from more threads
PARAMETERS_PER_THREAD = 10_000_000
# the system's load is read 3 times, 0.001 s apart, and the median is used, so that short bursts are ignored
LOAD_READINGS, READING_INTERVAL = 3, 0.001

_is_fixed = False  # whether `keep_threads` was called, after which the number of threads is not chosen any more


def choose_threads(parameters: int, idle: int, max_threads: int) -> int:
    """Choose torch's number of CPU threads for one call.

    Args:
        parameters: Number of the model's parameters.
        idle: Number of idle CPUs.
        max_threads: torch's default number of threads.
    """
    return max(1, min(max_threads, MIN_THREADS + parameters // PARAMETERS_PER_THREAD, idle))


@contextmanager
def with_threads(threads: int | None, *networks: nn.Module) -> Iterator[None]:
    """Set torch's number of CPU threads inside the block, for this Python thread only.

    Args:
        threads: The number. None: if the user has set a number, keep it; else choose a number from the sizes of those
            `networks` that are on a CPU.
        networks: The networks that the block runs.

    Raises:
        InputError: For an invalid number.
    """
    count, before = check_threads(threads), torch.get_num_threads()
    if count is None:
        parameters = sum(p.numel() for network in networks for p in network.parameters() if p.device.type == "cpu")
        chooses = parameters and not _is_fixed and is_default(before)
        count = choose_threads(parameters, idle_cpus(), before) if chooses else before
    if count == before:
        yield
        return
    with own_threads(count):
        yield


def keep_threads(threads: int) -> None:
    """Set torch's number of CPU threads for the rest of the process; calls without `threads=` then use it."""
    global _is_fixed
    torch.set_num_threads(threads)
    _is_fixed = True


def is_default(
    count: int, environment: Mapping[str, str] = os.environ, defaults: Collection[int] | None = None
) -> bool:
    """Return whether torch's number of threads is its default and not an explicit setting.

    Args:
        count: torch's number of threads.
        environment: Environment variables.
        defaults: The numbers that torch may choose by default; None: this machine's numbers of cores and of CPUs.
    """
    if any(environment.get(name) for name in THREAD_VARIABLES):
        return False
    return count in (_defaults() if defaults is None else defaults)


def idle_cpus() -> int:
    """Count the idle CPUs that this process may use; if the system does not tell its load, all count as idle."""
    allowed = min(len(_affinity()), quota_of(_read_text(Path("/sys/fs/cgroup/cpu.max"))))
    counts: list[int] = []
    for reading in range(LOAD_READINGS if allowed > 1 else 0):
        if reading:
            time.sleep(READING_INTERVAL)
        running = running_processes(_read_text(Path("/proc/loadavg")))
        if running is None:
            return allowed
        counts.append(running)
    others = int(median(counts)) - 1 if counts else 0  # minus this process, which is running, too
    return min(allowed, _cpu_count() - others)


def running_processes(loadavg: str) -> int | None:
    """Read the number of running processes from the text of /proc/loadavg, whose load averages are minutes old."""
    fields = loadavg.split()
    count = fields[3].partition("/")[0] if len(fields) > 3 else ""
    return int(count) if count.isdecimal() else None


def quota_of(limit: str) -> int:
    """Read from the text of a container's cpu.max how many CPUs it may use; all of them if it has no limit."""
    quota, _, period = limit.strip().partition(" ")
    return max(1, int(quota) // int(period)) if quota.isdecimal() else _cpu_count()


def _cpu_count() -> int:
    return os.cpu_count() or 1


def _affinity() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(_cpu_count()))


def _defaults() -> set[int]:
    cores = Path("/sys/devices/system/cpu")
    mine = _affinity()
    siblings = {_read_text(cores / f"cpu{cpu}" / "topology" / "thread_siblings_list") or str(cpu) for cpu in mine}
    return {len(siblings), len(mine), _cpu_count()}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):  # no such file: an older Linux kernel, or not Linux
        return ""
