"""Measures time: a stopwatch that waits for the GPU, and the seconds of a round in target, drafter and the rest."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, final

import torch
from torch import nn

CPU = torch.device("cpu")
# if CPU time is below this fraction of a target pass's wall time, the thread has waited for a free CPU
STARVED_CPU_FRACTION = 0.7


@final
class Stopwatch:
    """Measures wall-clock time, CPU time, and the seconds of named stages (`seconds`).

    It starts the first interval that `lap` measures. Before it reads the wall clock, it waits until the GPU has
    finished its work.

    Args:
        device: The device whose work is timed.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self.seconds: dict[str, float] = {}  # stage -> seconds
        self._device = device
        self._lap = self.now()

    def now(self) -> float:
        """Return the wall-clock time in seconds. Only differences of two such times have a meaning."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def cpu_time(self) -> float:
        """Return the CPU time of this thread in seconds. Only differences of two such times have a meaning.

        For a GPU it returns wall-clock time, because the GPU's work takes no CPU time. It does so on Windows, too,
        where CPU time is counted in steps of 16 ms.
        """
        counts = self._device.type == "cpu" and sys.platform != "win32"
        return time.thread_time() if counts else self.now()

    def process_cpu_time(self) -> float:
        """Return the CPU time in seconds of all threads of this process.

        Only differences of two such times have a meaning.
        """
        return time.process_time()

    def lap(self) -> float:
        """Return the wall-clock seconds since the last call of `lap`, or since the object was made."""
        now = self.now()
        seconds, self._lap = now - self._lap, now
        return seconds

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        """Measure the `with` block: add its wall-clock seconds to `seconds[name]`."""
        start = self.now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - start


@contextmanager
def time_passes(
    module: nn.Module, device: torch.device, on_pass: Callable[[float, tuple[Any, ...], Mapping[str, Any]], None]
) -> Generator[None]:
    """During the `with` block, time each forward pass through `module`, also those that other libraries start.

    Args:
        device: The module's device.
        on_pass: Called after each pass of this thread, with the wall-clock seconds and the args and kwargs of
            `forward`.
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
class RoundTimer:
    """Measures one round of decoding: wall-clock and CPU seconds of target, drafter and the rest ("core")."""

    def __init__(self, device: torch.device) -> None:
        self._stopwatch = Stopwatch(device)
        self.start()

    def start(self) -> None:
        """Begin to measure a round: set all seconds to 0."""
        self.seconds = {"target": 0.0, "drafter": 0.0, "core": 0.0}
        self._worked = dict(self.seconds)  # stage -> CPU seconds of this thread in this round
        self._stopwatch.lap()
        self._cpu_time = self._stopwatch.cpu_time()

    def lap(self, stage: Literal["target", "drafter", "core"]) -> None:
        """Add the time since the last call of `lap` or `start` to a stage; "core" is all but the other two."""
        cpu_time = self._stopwatch.cpu_time()
        self.seconds[stage] += self._stopwatch.lap()
        self._worked[stage] += cpu_time - self._cpu_time
        self._cpu_time = cpu_time

    @contextmanager
    def stage(self, stage: Literal["target", "drafter", "core"]) -> Generator[None]:
        """Measure the `with` block: add its time to a stage, and the time before it to "core"."""
        self.lap("core")
        try:
            yield
        finally:
            self.lap(stage)

    def add_pass(self, seconds: float, cpu_seconds: float) -> None:
        """Add the time of a target's pass, which the caller measured; the time since the last lap is not counted."""
        self._stopwatch.lap()
        self._cpu_time = self._stopwatch.cpu_time()
        self.seconds["target"] += seconds
        self._worked["target"] += cpu_seconds

    def round_costs(self) -> tuple[float, float, bool]:
        """Return the target's and the drafter's seconds in this round, and whether the thread waited for a free CPU.

        If the thread waited, the seconds are CPU time, else wall time. Only the target's pass shows whether the thread
        waited, because a drafter may wait for another process or the network, and such a wait is part of its cost.
        """
        waited_for_cpu = self._worked["target"] < STARVED_CPU_FRACTION * self.seconds["target"]
        seconds = self._worked if waited_for_cpu else self.seconds
        return seconds["target"], seconds["drafter"], waited_for_cpu
