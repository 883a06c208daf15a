"""Measures time: a stopwatch that waits for the GPU, and the seconds of a round in drafter, target and core."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, final

import torch
from torch import nn

CPU = torch.device("cpu")
T = TypeVar("T")
STARVED = 0.7  # a thread with less CPU time than this part of the target pass's seconds has waited for a processor


class _Elsewhere(threading.local):
    """Holds, for each thread, the seconds that it waited for others, and the seconds of work that others did for it."""

    waited = worked = 0.0


_elsewhere = _Elsewhere()


def handed_over(wait: Callable[[], tuple[T, float]]) -> T:
    """Call `wait`, in which this thread waits while another thread does this one's work, and perhaps other work.

    `wait` returns a result, and the seconds that this thread's own work took. This thread's stopwatches count only
    these seconds.
    """
    start = time.perf_counter()
    result, seconds = wait()
    _elsewhere.waited += time.perf_counter() - start - seconds
    _elsewhere.worked += seconds
    return result


@final
class Stopwatch:
    """Wall-clock seconds. Each reading first waits until a GPU has finished its work."""

    def __init__(self, device: torch.device = CPU) -> None:
        """Start the first lap. device: the device whose work is timed."""
        self.seconds: dict[str, float] = {}  # stage -> seconds
        self._device = device
        self._lap = self.now()

    def now(self) -> float:
        """Return wall-clock seconds since some fixed moment."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - _elsewhere.waited

    def processor(self) -> float:
        """Return CPU seconds of this thread, since some fixed moment.

        It returns wall-clock seconds for a GPU, whose work takes no CPU time, and on Windows, which counts CPU time in
        steps of 16 ms.
        """
        counts = self._device.type == "cpu" and sys.platform != "win32"
        return time.thread_time() + _elsewhere.worked if counts else self.now()

    def process(self) -> float:
        """Return CPU seconds of all threads of this process, since some fixed moment."""
        return time.process_time()

    def lap(self) -> float:
        """Return the seconds since the last lap ended, and start the next lap."""
        now = self.now()
        seconds, self._lap = now - self._lap, now
        return seconds

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Add the seconds of the block to `seconds[name]`."""
        start = self.now()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - start


@contextmanager
def timed_passes(
    module: nn.Module, device: torch.device, on_pass: Callable[[float, tuple[Any, ...], Mapping[str, Any]], None]
) -> Generator[None]:
    """Call `on_pass(seconds, args, kwargs)` after each forward pass of this thread through `module`.

    It times passes that other libraries start. Passes of other threads are not reported.
    """
    thread, stopwatch, starts = threading.get_ident(), Stopwatch(device), list[float]()

    def before(_module: nn.Module, _args: tuple[Any, ...]) -> None:
        if threading.get_ident() == thread:
            starts.append(stopwatch.now())

    def after(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        if threading.get_ident() == thread:
            on_pass(stopwatch.now() - starts.pop(), args, kwargs)

    hooks = (module.register_forward_pre_hook(before), module.register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@final
class Watch:
    """One round's wall-clock seconds and CPU seconds."""

    def __init__(self, device: torch.device) -> None:
        self._stopwatch = Stopwatch(device)
        self.start()

    def start(self) -> None:
        """Begin a round."""
        self.seconds = {"target": 0.0, "drafter": 0.0, "core": 0.0}
        self._worked = dict(self.seconds)  # stage -> CPU seconds of this thread in the round
        self._stopwatch.lap()
        self._processor = self._stopwatch.processor()

    def lap(self, stage: Literal["target", "drafter", "core"]) -> None:
        """Add the seconds since the last call to the given stage."""
        processor = self._stopwatch.processor()
        self.seconds[stage] += self._stopwatch.lap()
        self._worked[stage] += processor - self._processor
        self._processor = processor

    def learned(self) -> tuple[float, float, bool]:
        """Return the target's seconds in this round so far, the drafter's, and whether the thread waited for a CPU.

        If it waited, the seconds are CPU time. Only the target's pass decides this: a drafter may wait on purpose for
        another process or the network, and this wait is part of its cost.
        """
        starved = self._worked["target"] < STARVED * self.seconds["target"]
        seconds = self._worked if starved else self.seconds
        return seconds["target"], seconds["drafter"], starved
