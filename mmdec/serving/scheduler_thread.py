"""A thread that runs a `Scheduler` for all threads of a process, so that their decodings share passes.

Any thread may submit a decoding, read its rounds, wait for its result, or cancel it. The thread starts with the first
decoding, sleeps while there is nothing to do, and ends with `close`. It never waits for the lock of a model: a decoding
whose model is being changed waits in the queue, and the others continue.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from queue import SimpleQueue
from typing import Any, final

import torch
from torch import nn

from mmdec.core.scheduler import Scheduler, SchedulerLimits, Task
from mmdec.core.steps import Steps
from mmdec.errors import MmdecError
from mmdec.generation.model_lock import try_reading
from mmdec.kernels.threads import set_decoding_threads
from mmdec.tasks.threads import with_threads
from mmdec.types import Round

LOCK_RETRY_SECONDS = 0.01  # seconds after which the lock of a model that is being changed is tried again


class Priority(IntEnum):
    """Which waiting decodings start first, and whose prompts are read first."""

    REALTIME = 0
    CHAT = 1
    JOB = 2


class DecodingStopped(MmdecError):
    """A decoding was cancelled, or its thread was closed."""


@dataclass(frozen=True)
class Load:
    """What the decodings of one model take up."""

    rows: int = 0  # running rows
    waiting: int = 0  # decodings that have not started
    tokens: int = 0  # tokens that the caches of running rows may come to hold


@final
@dataclass(eq=False)
class Decoding:
    """A submitted decoding. Iterating over it gives its rounds as they finish, if it was submitted without `on_round`.

    Any thread may use it.
    """

    thread: SchedulerThread = field(repr=False)
    steps: Steps[Any] = field(repr=False)
    models: Sequence[nn.Module] = field(repr=False)
    rows: int
    tokens: int
    order: tuple[int, int]  # priority and number
    label: str
    on_round: Callable[[Round], None] | None = field(repr=False)
    is_cancelled: bool = False
    future: Future[Any] = field(default_factory=Future[Any], repr=False)  # its result
    task: Task | None = field(default=None, repr=False)  # once it is in the scheduler; only the thread uses it
    locks: ExitStack = field(default_factory=ExitStack, repr=False)

    def __post_init__(self) -> None:
        self._rounds: SimpleQueue[Round | None] = SimpleQueue()
        self.on_round = self.on_round or self._rounds.put
        self.future.add_done_callback(lambda _: self._rounds.put(None))

    def __iter__(self) -> Iterator[Round]:
        """Yield the rounds; then raise the decoding's error, if there is one."""
        while (round_ := self._rounds.get()) is not None:
            yield round_
        self._rounds.put(None)
        self.result()

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.future.done()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end, and return what the generator of steps returned.

        Args:
            timeout: Maximum seconds to wait; None: no limit.

        Raises:
            DecodingStopped: If it was cancelled.
            TimeoutError: If it has not ended in time.
            Exception: What the decoding or its callback raised.
        """
        return self.future.result(timeout)

    def cancel(self) -> None:
        """End the decoding: at once if it waits, else before the next pass."""
        self.thread.cancel(self)


@final
class SchedulerThread:
    """Runs decodings of all threads in one thread of its own.

    Args:
        limits: What may run at the same time.
        threads: torch's CPU threads. None: the number that the user has set, else one chosen from the models' sizes and
            the number of idle CPUs whenever decodings begin.
        on_step: Called after each step with the number of running rows by label.
    """

    def __init__(
        self,
        limits: SchedulerLimits = SchedulerLimits(),
        threads: int | None = None,
        on_step: Callable[[Mapping[str, int]], None] | None = None,
    ) -> None:
        self.limits = limits
        self._threads, self._on_step = threads, on_step
        self._scheduler = Scheduler(limits)
        self._changed = threading.Condition()
        self._waiting: list[Decoding] = []  # without the locks of their models
        self._started: list[Decoding] = []  # in the scheduler
        self._has_news = self._is_closed = False  # whether a decoding was submitted or cancelled
        self._numbers = count()
        self._thread: threading.Thread | None = None

    def submit(
        self,
        steps: Steps[Any],
        models: Sequence[nn.Module] = (),
        rows: int = 1,
        tokens: int = 0,
        priority: Priority = Priority.CHAT,
        label: str = "",
        on_round: Callable[[Round], None] | None = None,
    ) -> Decoding:
        """Add a decoding. It starts as soon as it fits into the limits and nobody changes its models.

        Args:
            steps: The decoding, not yet started. It is run, from its first line on, in the scheduler's thread.
            models: Models that it reads. Their locks are held while it runs.
            rows: Number of its rows.
            tokens: Number of tokens that its cache may come to hold, over all rows.
            priority: Decodings of a lower number start first.
            label: Whose it is, for `load` and `on_step`, such as the model's name.
            on_round: Called with each round in the scheduler's thread. An exception that it raises ends this decoding
                alone. None: the rounds are kept for iterating over the result.

        Returns:
            A `Decoding`.

        Raises:
            InputError: If the decoding could never fit.
            DecodingStopped: If the thread is closed.
        """
        self.limits.check(rows, tokens)
        order = (int(priority), next(self._numbers))
        decoding = Decoding(self, steps, models, rows, tokens, order, label, on_round)
        with self._changed:
            if self._is_closed:
                raise _closed_error()
            self._waiting.append(decoding)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mmdec-scheduler", daemon=True)
                self._thread.start()
            self._wake()
        return decoding

    def cancel(self, decoding: Decoding) -> None:
        """End a decoding: at once if it waits, else before the next pass."""
        with self._changed:
            decoding.is_cancelled = True
            waits = decoding in self._waiting
            self._wake()
        if waits:
            self._end(decoding, _cancelled_error())

    def load(self) -> dict[str, Load]:
        """Return for each label what its decodings take up now; labels without decodings are left out."""
        with self._changed:
            waiting, started = list(self._waiting), list(self._started)
        running = set[Task](self._scheduler.running)
        loads = dict[str, Load]()
        for decoding in (*waiting, *started):
            load, runs = loads.get(decoding.label, Load()), decoding.task in running
            loads[decoding.label] = Load(
                load.rows + decoding.rows * runs, load.waiting + (not runs), load.tokens + decoding.tokens * runs
            )
        return loads

    def close(self) -> None:
        """End all decodings with an error, then the thread, and wait for it. Later decodings are refused."""
        with self._changed:
            self._is_closed = True
            self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _wake(self) -> None:
        self._has_news = True
        self._changed.notify_all()

    def _run(self) -> None:
        set_decoding_threads()
        while self._wait():
            models = self._models()
            try:
                with with_threads(self._threads, *models):
                    while self._models() <= models and self._step():
                        pass
            except Exception as error:  # a fault of the scheduler itself: nobody may wait for ever
                self._end_all(error)
        self._end_all(_closed_error())
        self._scheduler.close()

    def _end_all(self, error: Exception) -> None:
        with self._changed:
            decodings = [*self._waiting, *self._started]
        for decoding in decodings:
            self._end(decoding, error)

    def _wait(self) -> bool:
        """Sleep until there is something to do.

        Returns:
            False once the thread is closed.
        """
        with self._changed:
            if not self._started:
                retry = LOCK_RETRY_SECONDS if self._waiting else None
                self._changed.wait_for(lambda: self._has_news or self._is_closed, retry)
            self._has_news = False
            return not self._is_closed

    def _models(self) -> set[nn.Module]:
        """Return the models of all decodings."""
        with self._changed:
            return {model for decoding in (*self._waiting, *self._started) for model in decoding.models}

    def _step(self) -> bool:
        """Run one step of the scheduler.

        Returns:
            Whether there is more to do at once.
        """
        with self._changed:
            waiting, started = sorted(self._waiting, key=lambda decoding: decoding.order), list(self._started)
            closed = self._is_closed
        if closed:
            return False
        for decoding in started:
            if decoding.is_cancelled:
                self._end(decoding, _cancelled_error())
        for decoding in waiting:
            self._start(decoding)
        if not self._started:
            return False
        with torch.no_grad():
            self._scheduler.step()
        running = Counter[str]()
        for decoding in list(self._started):
            task = decoding.task
            assert task is not None
            running[decoding.label] += decoding.rows * (task.done or task.pending is not None)
            if task.done:
                self._end(decoding, task.error)
        if self._on_step is not None:
            self._on_step(running)
        return True

    def _start(self, decoding: Decoding) -> None:
        """Give a decoding to the scheduler, if nobody changes its models."""
        locks = try_reading(*decoding.models)
        if locks is None:
            return
        with self._changed:
            if decoding.is_cancelled:
                locks.close()
                return
            self._waiting.remove(decoding)
            self._started.append(decoding)
            decoding.locks = locks
            rows, tokens, (priority, _) = decoding.rows, decoding.tokens, decoding.order
            decoding.task = self._scheduler.add(decoding.steps, rows, tokens, priority, decoding.on_round)

    def _end(self, decoding: Decoding, error: BaseException | None) -> None:
        with self._changed:
            decodings = self._waiting if decoding in self._waiting else self._started
            if decoding not in decodings:  # another thread has ended it
                return
            decodings.remove(decoding)
        if decoding.task is None:
            decoding.steps.close()
        else:
            self._scheduler.cancel(decoding.task)
        decoding.locks.close()
        if error is None:
            decoding.future.set_result(None if decoding.task is None else decoding.task.result)
        else:
            decoding.future.set_exception(error)


def _cancelled_error() -> DecodingStopped:
    return DecodingStopped("the decoding was cancelled")


def _closed_error() -> DecodingStopped:
    return DecodingStopped("the decoding was ended, because the process shuts down")
