"""Devices, dtypes, threads, and the stopwatch that the whole package uses."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import nn

from mmdec.checks.arguments import check_threads, show
from mmdec.types import InputError

CPU = torch.device("cpu")


def check_device(device: str | torch.device | None) -> torch.device:
    """The device, checked to exist on this machine; None takes a GPU if there is one. Raises InputError."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if not isinstance(device, (str, torch.device)):
            raise TypeError
        checked = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"`device` must be 'cpu' or 'cuda', but is {show(device)}. Leave it out to have it chosen."
        ) from error
    if checked.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"`device` must exist, but is '{device}' and this machine has no GPU. Use device='cpu'.")
    if checked.type == "cuda" and (checked.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"`device` must exist, but is '{device}' and the last GPU is cuda:{torch.cuda.device_count() - 1}. "
            "Count from 0."
        )
    if checked.type not in ("cpu", "cuda"):
        raise InputError(f"`device` must be 'cpu' or 'cuda', but is '{device}'. Leave it out to have it chosen.")
    return checked


def dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype of a network's first parameter."""
    return next(module.parameters()).dtype


@contextmanager
def with_threads(threads: int | None) -> Iterator[None]:
    """Set torch's CPU threads within the block; None leaves them unchanged. Raises InputError."""
    count = check_threads(threads)
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@final
class Stopwatch:
    """Wall-clock seconds. Each reading first waits until a GPU has finished its work."""

    def __init__(self, device: torch.device = CPU) -> None:
        """Starts the first lap."""
        self.seconds: dict[str, float] = {}  # of each stage
        self._device = device
        self._lap = self.now()

    def now(self) -> float:
        """Seconds since some fixed moment."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap ended; starts the next one."""
        now = self.now()
        seconds, self._lap = now - self._lap, now
        return seconds

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to `seconds[name]`."""
        start = self.now()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self.now() - start


@contextmanager
def timed_passes(
    module: nn.Module, device: torch.device, on_pass: Callable[[float, tuple[Any, ...], Mapping[str, Any]], None]
) -> Iterator[None]:
    """Call `on_pass(seconds, args, kwargs)` after each forward pass of this thread through `module`.

    For passes inside other libraries' code. Passes of other threads are not reported.
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
