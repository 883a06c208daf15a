"""torch's CPU threads for the time of one call: as many as the model and the machine can use now.

Threads of one operation wait for each other at its end. On a machine that is busy one of them has no processor, and
all others wait for it at every operation: two threads on two busy cores took eight times as long as one alone. So a
call asks the system how many processors have nothing to do. What a person set is never changed: `threads=`,
OMP_NUM_THREADS, MKL_NUM_THREADS, `torch.set_num_threads`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import final

import torch
from torch import nn

from mmdec.checks.arguments import check_threads

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
FEWEST = 2  # threads that even the smallest model gains from, where processors are free
PARAMETERS = 10_000_000  # of a model for each thread more: smaller products end before their threads have met
READINGS, APART = 3, 0.001  # of what runs now, and seconds between two: what runs for a moment is no load

_kept = False  # `keep_threads` was called


@final
@dataclass(frozen=True)
class Processors:
    """The machine as a call finds it."""

    allowed: int  # that this process may use
    free: int | None = None  # that have nothing to do; None: the system does not tell


def chosen_threads(parameters: int, processors: Processors, most: int) -> int:
    """Threads for one call. parameters: of the model; most: torch's own choice."""
    useful = FEWEST + parameters // PARAMETERS
    free = processors.allowed if processors.free is None else processors.free
    return max(1, min(most, useful, processors.allowed, free))


@contextmanager
def with_threads(threads: int | None, *networks: nn.Module) -> Iterator[None]:
    """Set torch's CPU threads within the block, for this thread of the program alone.

    None keeps what a person set, and else chooses: for these networks, if they are on a CPU. Raises InputError.
    """
    count, before = check_threads(threads), torch.get_num_threads()
    if count is None:
        parameters = sum(p.numel() for network in networks for p in network.parameters() if p.device.type == "cpu")
        chooses = parameters and not _kept and is_default(before)
        count = chosen_threads(parameters, processors_now(), before) if chooses else before
    if count == before:
        yield
        return
    try:
        torch.set_num_threads(count)
        # torch notes the number for threads that begin later, too: theirs shall be as before.
        other = threading.Thread(target=torch.set_num_threads, args=(before,), daemon=True)
        other.start()
        other.join()
        yield
    finally:
        torch.set_num_threads(before)


def keep_threads(threads: int) -> None:
    """Set torch's CPU threads for the rest of the process: calls without `threads=` keep them."""
    global _kept
    torch.set_num_threads(threads)
    _kept = True


def is_default(
    count: int, environment: Mapping[str, str] = os.environ, defaults: Collection[int] | None = None
) -> bool:
    """Whether torch has `count` threads because nobody set them.

    environment: variables of the process. defaults: numbers that torch begins with; None: this machine's, one for each
    core, or for each processor where torch counts those.
    """
    if any(environment.get(name) for name in VARIABLES):
        return False
    return count in (_defaults() if defaults is None else defaults)


def processors_now() -> Processors:
    """The processors that this process may use, and how many are free of other work at this moment."""
    allowed = len(_affinity())
    quota = quota_of(Path("/sys/fs/cgroup"), _text(Path("/proc/self/cgroup")))
    allowed = allowed if quota is None else max(1, min(allowed, int(quota)))
    counts: list[int] = []
    for reading in range(READINGS if allowed > 1 else 0):
        if reading:
            time.sleep(APART)
        running = running_in(_text(Path("/proc/loadavg")))
        if running is None:
            return Processors(allowed)
        counts.append(running)
    others = int(median(counts)) - 1 if counts else 0  # the reader runs, too
    return Processors(allowed, (os.cpu_count() or 1) - others)


def running_in(loadavg: str) -> int | None:
    """What is running or ready to run at this moment, from /proc/loadavg; its averages lag by minutes."""
    fields = loadavg.split()
    count = fields[3].partition("/")[0] if len(fields) > 3 else ""
    return int(count) if count.isdecimal() else None


def quota_of(root: Path, cgroups: str) -> float | None:
    """Processors that control groups allow, a container's for instance; None: no limit.

    root: where they are mounted. cgroups: the process's own, as /proc/self/cgroup lists them.
    """
    own = next((line[3:] for line in cgroups.splitlines() if line.startswith("0::")), "/")
    inner = root / own.strip("/")
    folders = [inner, *inner.parents][: len(inner.parts) - len(root.parts) + 1]  # a parent's limit holds, too
    limits = [_text(folder / "cpu.max").split() for folder in folders]
    old = [_text(root / "cpu" / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]  # of version 1
    shares = [int(a) / int(b) for a, b, *_ in (*filter(None, limits), old) if a.isdecimal() and b.isdecimal()]
    return min(shares, default=None)


def _affinity() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _defaults() -> set[int]:
    cores = Path("/sys/devices/system/cpu")
    mine = _affinity()
    siblings = {_text(cores / f"cpu{one}" / "topology" / "thread_siblings_list") or str(one) for one in mine}
    return {len(siblings), len(mine), os.cpu_count() or 1}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except (OSError, ValueError):  # another system, or none that tells
        return ""
