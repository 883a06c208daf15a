"""Decodes several recordings at once: each has its own `generate` call, and their decoder passes are computed together.

A job is one recording. Each job has a thread, but only one of these threads runs at a time, until its job needs a pass
of the model. When all jobs wait, the caller's thread computes their passes together. Then each job goes on. If a job
ends, the next job begins at once. So one recording may be in its first window while another is decoded again at a
higher temperature, and nothing has to be padded.

If torch has two threads or more, one thread runs the encoder for new jobs, while the other threads run decoder passes.
The encoder is limited by arithmetic, and decoder passes are limited by memory bandwidth.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, final

import torch

from mmdec.core.timing import Stopwatch, wait_for_other_thread
from mmdec.kernels.threads import own_threads, set_own_threads

T = TypeVar("T")
Part = TypeVar("Part")
Several = Callable[[Sequence[Any]], Sequence[Any]]  # computes one pass for several jobs: their inputs -> their results


class _Dropped(BaseException):
    """Raised in a job's thread to end the job, because its result is no longer needed."""


@final
@dataclass(frozen=True)
class _Request:
    """A computation that a job asks for. The job waits until another thread has computed it."""

    several: Several  # the computation: a list of inputs -> a list of results
    part: Any  # this job's input
    shared: bool  # whether the inputs of all jobs are computed in one call of `several`
    apart: bool  # whether `several` may run in another thread, at the same time as decoder passes
    inference: bool  # whether the job runs in torch's inference mode

    def run(self, parts: Sequence[Any]) -> Sequence[Any]:
        with torch.inference_mode(self.inference), torch.no_grad():
            return self.several(parts)

    def answer(self) -> tuple[Any, float]:
        """Compute this job's request by itself.

        If another thread may compute the request (`apart`), torch always uses one thread, so that all threads give the
        same bits.

        Returns:
            The result, or the exception that was raised; and the seconds that it took.
        """
        stopwatch = Stopwatch()
        try:
            with own_threads(1) if self.apart else nullcontext():
                return self.run([self.part])[0], stopwatch.lap()
        except Exception as error:
            return error, stopwatch.lap()


@final
class _Job(Generic[T]):
    """One job: its thread, its present request (`wish`) and its result.

    The thread runs only while the caller waits in `go_on`.
    """

    def __init__(self, function: Callable[[], T], current: threading.local) -> None:
        self.wish: _Request | None = None  # the computation that the job waits for; None: the job has ended
        # the result of that computation, if a second thread computes it; else None
        self.later: Future[tuple[Any, float]] | None = None
        self.result: T | None = None
        self._error: BaseException | None = None
        # the last computation's result, or the exception that it raised; and its seconds
        self._answer: tuple[Any, float] = None, 0.0
        self._dropped = False
        self._mine, self._callers = threading.Semaphore(0), threading.Semaphore(0)
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._run, function, current), daemon=True)
        self._thread.start()

    def go_on(self, answer: Any = None, seconds: float = 0.0) -> None:
        """Continue the job until it asks for a computation or ends.

        If the job raised an exception, raise it here.

        Args:
            answer: The result of the job's last computation, or an exception, which is then raised in the job.
            seconds: The job's share of the time that the computation took.
        """
        self._answer = answer, seconds
        self._mine.release()
        self._callers.acquire()
        if self.wish is None and self._error is not None:
            raise self._error

    def drop(self) -> None:
        """End the job's thread, also if the job has not finished."""
        self._dropped = True
        self._mine.release()
        self._thread.join()

    def wait(self, wish: _Request) -> Any:
        """Ask for a computation, from the job's thread, and wait for its result; raise its exception if it failed."""

        def wait() -> tuple[Any, float]:
            self.wish = wish
            self._callers.release()
            self._mine.acquire()
            if self._dropped:
                raise _Dropped
            return self._answer

        answer = wait_for_other_thread(wait)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _run(self, function: Callable[[], T], current: threading.local) -> None:
        self._mine.acquire()
        current.job = self
        try:
            set_own_threads(1)  # one torch thread is enough, because the caller's thread computes the passes
            self.result = function()
        except BaseException as error:
            self._error = error
        self.wish = None
        self._callers.release()


@final
class PassBatcher:
    """Runs jobs, for example one `generate` call for each recording.

    A job hands its computations over by `run_alone` and `run_in_shared_pass`; the thread that called `run` computes
    them.

    Args:
        width: Maximum number of jobs at a time.
    """

    def __init__(self, width: int) -> None:
        self._width, self._current = width, threading.local()

    def run_alone(self, function: Callable[[], T], apart: bool = False) -> T:
        """Called by a job: let the thread that called `run` compute `function()`.

        Args:
            apart: Whether a further thread may compute it, at the same time as passes of other jobs.

        Returns:
            The function's result.
        """
        inference = torch.is_inference_mode_enabled()
        return self._current.job.wait(
            _Request(lambda parts: [part() for part in parts], function, False, apart, inference)
        )

    def run_in_shared_pass(self, several: Callable[[Sequence[Part]], Sequence[T]], part: Part) -> T:
        """Called by a job: take part in a pass that several jobs share.

        Args:
            several: Computes the pass: the jobs' inputs -> their results.
            part: This job's input.

        Returns:
            This job's result.
        """
        return self._current.job.wait(_Request(several, part, True, False, torch.is_inference_mode_enabled()))

    def run(self, functions: Iterable[Callable[[], T]]) -> Generator[tuple[int, T]]:
        """Run each function as a job, at most `width` at a time.

        Yields:
            (index of the function, result) as jobs end.

        Raises:
            Exception: That of a job; the other jobs are then ended.
        """
        threads = torch.get_num_threads()
        if threads == 1:
            yield from self._run(enumerate(functions), None)
            return
        with ThreadPoolExecutor(1, initializer=set_own_threads, initargs=(1,)) as other, own_threads(threads - 1):
            yield from self._run(enumerate(functions), other)

    def _run(
        self, waiting: Iterator[tuple[int, Callable[[], T]]], other: ThreadPoolExecutor | None
    ) -> Generator[tuple[int, T]]:
        jobs = dict[int, _Job[T]]()
        stopwatch, width = Stopwatch(), self._width + (other is not None)
        try:
            while True:
                while len(jobs) < width and (following := next(waiting, None)) is not None:
                    number, function = following
                    jobs[number] = _Job(function, self._current)
                    jobs[number].go_on()
                    _serve(jobs[number], other)
                ended = [number for number, job in jobs.items() if job.wish is None]
                for number in ended:
                    job = jobs.pop(number)
                    job.drop()
                    yield number, job.result  # type: ignore[misc] # not None: the job ended without an error
                if ended:
                    continue
                if not jobs:
                    return
                if _resume_finished(jobs.values(), other):
                    continue
                if (taken := _reclaim_pending(jobs.values())) is not None and taken.wish is not None:
                    taken.later = None
                    taken.go_on(*taken.wish.answer())
                    _serve(taken, other)
                    continue
                ready = [job for job in jobs.values() if job.later is None]
                if ready:
                    wishes = [job.wish for job in ready if job.wish is not None]
                    stopwatch.lap()
                    answers = wishes[0].run([wish.part for wish in wishes])
                    seconds = stopwatch.lap() / len(ready)
                    for job, answer in zip(ready, answers, strict=True):
                        job.go_on(answer, seconds)
                        _serve(job, other)
                else:
                    wait([job.later for job in jobs.values() if job.later is not None], return_when=FIRST_COMPLETED)
        finally:
            for job in jobs.values():
                if job.later is not None:
                    job.later.cancel()
            for job in jobs.values():
                job.drop()


def _resume_finished(jobs: Iterable[_Job[Any]], other: ThreadPoolExecutor | None) -> bool:
    """Continue those jobs whose computations the second thread has finished; return whether there were any."""
    finished = [(job, job.later) for job in jobs if job.later is not None and job.later.done()]
    for job, later in finished:
        job.later = None
        job.go_on(*later.result())
        _serve(job, other)
    return bool(finished)


def _reclaim_pending(jobs: Iterable[_Job[T]]) -> _Job[T] | None:
    """If the other thread is busy, take back a job whose request it has not begun; None if there is no such job.

    The caller then computes this request itself: two encoder passes at the same time take less time than one after the
    other.
    """
    submitted = [job for job in jobs if job.later is not None]
    if not any(job.later.running() for job in submitted if job.later is not None):
        return None
    return next((job for job in submitted if job.later is not None and job.later.cancel()), None)


def _serve(job: _Job[Any], other: ThreadPoolExecutor | None) -> None:
    """Compute a job's requests until it waits for a pass that jobs share, waits for the other thread, or ends.

    Args:
        other: Computes requests that may run apart; None: there is no other thread.
    """
    while (wish := job.wish) is not None and not wish.shared:
        if wish.apart and other is not None:
            job.later = other.submit(wish.answer)
            return
        job.go_on(*wish.answer())
