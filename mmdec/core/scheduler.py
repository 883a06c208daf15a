"""Continuous batching: many decodings in one thread, which share the passes of their models.

Each decoding is a generator (`mmdec.core.loop.decode_steps`) that asks for a pass and goes on with its result. In each
step the scheduler collects the drafts that wait, has those of one model scored in one pass, and hands each decoding its
scores. So a decoding joins at any round, and leaves at its end, without waiting for the others. A row's tokens do not
depend on which rows share its passes.

Prompts are read between two rounds, in pieces, so that running rows wait for a limited number of tokens. What does not
fit into the limits (rows, tokens in caches) waits; requests of higher priority go first.

Some computations gain nothing from batching, such as an encoder's pass. These side jobs go before drafts of the same
priority, so that more drafts share the passes that follow. With several CPU threads, a second Python thread runs side
jobs with half of them, beside the passes of this one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any, TypeVar, cast, final

import torch

from mmdec.core.steps import Compute, Ended, PassRequest, PassResult, Prefill, Score, Steps, next_step, time_pass
from mmdec.errors import InputError
from mmdec.kernels.threads import own_threads, set_own_threads
from mmdec.types import PrefillOutput, Round, SharedPassTarget

Key = TypeVar("Key")  # type of the names of decodings
SIDE_JOB_WAIT_SECONDS = 0.005  # seconds that a step waits for the side thread if there is nothing else to do


@dataclass(frozen=True)
class SchedulerLimits:
    """Limits of what may run at the same time. Other requests wait."""

    max_rows: int = 8  # rows of all running decodings
    # tokens in all caches, counted as the maximum length of each running row, or None without a limit
    max_cache_tokens: int | None = None
    # tokens of prompts that are read between two rounds of the running rows, or None for all waiting prompts
    max_prompt_tokens_per_step: int | None = 256

    def check(self, rows: int, tokens: int) -> None:
        """Raise InputError for a decoding that could never fit.

        Args:
            rows: Number of its rows.
            tokens: Number of tokens that its cache may come to hold, over all rows.
        """
        if rows > self.max_rows:
            raise InputError(f"`rows` must be at most {self.max_rows}, but is {rows}. Add fewer at a time.")
        if self.max_cache_tokens is not None and tokens > self.max_cache_tokens:
            raise InputError(
                f"`tokens` must be at most {self.max_cache_tokens}, for prompt and answer together, but is {tokens}. "
                "Shorten the prompt or lower the maximum length."
            )


@final
@dataclass(eq=False)
class Task:
    """A decoding in the scheduler: its generator, what it waits for, and how it ended."""

    steps: Steps[Any]
    rows: int  # that have not ended
    tokens: int
    priority: int  # the lower, the earlier
    on_round: Callable[[Round], None] | None
    number: int
    error: BaseException | None = None
    result: Any = None  # what the generator returned
    done: bool = False
    pending: PassRequest | None = field(default=None, repr=False)  # the pass that it waits for
    # the pass over the prompt, while it is under way
    pieces: Iterator[PrefillOutput[Any] | None] | None = field(default=None, repr=False)
    prefill_seconds: tuple[float, float] = (0.0, 0.0)  # wall-clock and CPU seconds of the prompt's pieces so far


@final
class Scheduler:
    """Drives decodings in the thread that calls `step` or `run`. Call `close` at the end.

    Args:
        limits: What may run at the same time.
    """

    def __init__(self, limits: SchedulerLimits = SchedulerLimits()) -> None:
        self.limits = limits
        self._side_thread = ThreadPoolExecutor(1, "mmdec-side")  # starts its thread when it is needed
        self._side_job: tuple[Task, Future[PassResult[Any]]] | None = None  # what the side thread computes now
        self.waiting: list[Task] = []
        self.running: list[Task] = []
        self._numbers = count()

    @property
    def rows(self) -> int:
        """The number of rows that run."""
        return sum(task.rows for task in self.running)

    @property
    def tokens(self) -> int:
        """The number of tokens that the caches of running rows may come to hold."""
        return sum(task.tokens for task in self.running)

    def add(
        self,
        steps: Steps[Any],
        rows: int = 1,
        tokens: int = 0,
        priority: int = 0,
        on_round: Callable[[Round], None] | None = None,
    ) -> Task:
        """Add a decoding. It starts in a later `step`, as soon as it fits.

        Args:
            steps: The decoding, not yet started.
            rows: Number of its rows.
            tokens: Number of tokens that its cache may come to hold, over all rows.
            priority: Decodings of a lower number start first.
            on_round: Called with each round. An exception that it raises ends only this decoding.

        Raises:
            InputError: If the decoding could never fit.
        """
        self.limits.check(rows, tokens)
        task = Task(steps, rows, tokens, priority, on_round, next(self._numbers))
        self.waiting.append(task)
        return task

    def cancel(self, task: Task) -> None:
        """End a decoding now. Its rows leave before the next pass."""
        self._end(task, None)

    def run(self) -> None:
        """Run all decodings to their ends. Errors of decodings are in `Task.error`."""
        while self.step():
            pass

    def close(self) -> None:
        """Cancel all decodings, and end the side thread."""
        with ExitStack() as stack:
            stack.callback(self._side_thread.shutdown)
            for task in (*self.waiting, *self.running):
                stack.callback(self.cancel, task)

    def step(self) -> bool:
        """Run one round: start what fits, read prompts, score the drafts that wait.

        Of prompts, as many tokens are read as the limits allow: a piece of a long one, or several short ones. Instead
        of a prompt, one other computation may run, such as that of an encoder.

        Returns:
            Whether there is more to do.
        """
        self._admit()
        sharable = [task for task in self.running if isinstance(task.pending, Score)]
        side_jobs = sorted(filter(_is_side_job, self.running), key=_precedence)
        exclusive = [task for task in self.running if task not in sharable and task not in side_jobs]
        side_jobs = self._offload(side_jobs, busy=bool(sharable or exclusive))
        side_job = self._side_job_for_this_thread(side_jobs, sharable)
        if side_job is not None:
            exclusive.append(side_job)
        exclusive.sort(key=_precedence)

        if self._side_job is not None and not (exclusive or sharable):
            wait([self._side_job[1]], SIDE_JOB_WAIT_SECONDS)
        threads = torch.get_num_threads()
        # the side thread has half of the CPU threads
        with nullcontext() if self._side_job is None else own_threads(threads - threads // 2):
            started = self._run_exclusive(exclusive)
            if side_job is not None and side_job in started:
                # the other drafts share the next pass with the drafts that follow the side job
                sharable = [task for task in sharable if task.priority < side_job.priority]
            # a callback may have cancelled some
            for group in _shared_passes([task for task in sharable if not task.done]):
                self._run(group)
        self._collect_side_job()
        return bool(self.running or self.waiting)

    def _offload(self, side_jobs: Sequence[Task], busy: bool) -> list[Task]:
        """Let the side thread run the first side job, if it has nothing to do and this thread has.

        Args:
            side_jobs: Tasks that wait for one, in their order.
            busy: Whether this thread has other passes to run.

        Returns:
            The tasks whose side jobs the side thread does not run.
        """
        threads = torch.get_num_threads()
        can_start = self._side_job is None and not torch.is_autocast_enabled("cpu")  # which holds for one thread alone
        if can_start and threads > 1 and len(side_jobs) + busy > 1 and side_jobs:
            request = cast(Compute[Any], side_jobs[0].pending)
            self._side_job = side_jobs[0], self._side_thread.submit(_run_side_job, request, threads // 2)
        offloaded = None if self._side_job is None else self._side_job[0]
        return [task for task in side_jobs if task is not offloaded]

    def _side_job_for_this_thread(self, side_jobs: Sequence[Task], drafts: Sequence[Task]) -> Task | None:
        """Return the first of the remaining side jobs' tasks, or None if this thread must not run it now.

        While the side thread works, no side job holds up drafts of a higher priority.
        """
        if not side_jobs:
            return None
        holds_up_drafts = any(task.priority < side_jobs[0].priority for task in drafts)
        return None if self._side_job is not None and holds_up_drafts else side_jobs[0]

    def _collect_side_job(self) -> None:
        """Continue the task whose side job the side thread has run, if it has."""
        if self._side_job is None or not self._side_job[1].done():
            return
        (task, future), self._side_job = self._side_job, None
        try:
            result = future.result()
        except Exception as error:
            self._end(task, error)
        else:
            if not task.done:
                self._advance(task, result)

    def _admit(self) -> None:
        """Start waiting decodings in the order of their priority, as long as the next one fits."""
        self.waiting.sort(key=_precedence)
        while self.waiting:
            task, max_tokens = self.waiting[0], self.limits.max_cache_tokens
            fits = self.rows + task.rows <= self.limits.max_rows and (
                max_tokens is None or self.tokens + task.tokens <= max_tokens
            )
            if self.running and not fits:
                return
            self.running.append(self.waiting.pop(0))
            self._advance(task, None)

    def _run_exclusive(self, tasks: Sequence[Task]) -> list[Task]:
        """Run passes that nobody shares: as many as the limit allows.

        Returns:
            Their tasks.
        """
        limit, tokens, run = self.limits.max_prompt_tokens_per_step, 0, list[Task]()
        for task in tasks:
            if task.done:  # a callback of another one has cancelled it
                continue
            if limit is not None:
                request = task.pending
                prompt_tokens = request.prompt_tokens if isinstance(request, Prefill) else None
                tokens += limit if prompt_tokens is None else min(prompt_tokens, limit)
                if tokens > limit and task is not tasks[0]:
                    break
            self._run([task])
            run.append(task)
        return run

    def _run(self, tasks: Sequence[Task]) -> None:
        """Run the pass that decodings share, or that one asks for (of its prompt one piece), and continue them."""
        request = cast(PassRequest, tasks[0].pending)
        results: Sequence[PassResult[Any] | None]
        try:
            if len(tasks) > 1:
                requests = [cast(Score, task.pending) for task in tasks]
                parts = [(each.session, each.draft) for each in requests]
                target = cast(SharedPassTarget, requests[0].target)
                shared = time_pass(request.device, partial(target.score_together, parts))
                rows = sum(len(draft.tokens) for _, draft in parts)
                results = [PassResult(scores, shared.seconds, shared.cpu_seconds, rows) for scores in shared.value]
            elif isinstance(request, Prefill) and isinstance(request.target, SharedPassTarget):
                results = [self._read_piece(tasks[0], request, request.target)]
            else:
                results = [time_pass(request.device, request.compute)]
        except Exception as error:
            if len(tasks) == 1:
                self._end(tasks[0], error)
                return
            for task in tasks:  # find out whose fault it was; the other decodings go on
                if not task.done:
                    self._run([task])
            return
        for task, result in zip(tasks, results, strict=True):
            if result is not None and not task.done:
                self._advance(task, result)

    def _read_piece(
        self, task: Task, request: Prefill, target: SharedPassTarget
    ) -> PassResult[PrefillOutput[Any]] | None:
        """Read the next piece of a prompt.

        Returns:
            The result of the whole pass after the last piece, else None.
        """
        if task.pieces is None:
            task.prefill_seconds = 0.0, 0.0
            task.pieces = target.prefill_in_pieces(
                request.inputs, request.needs, self.limits.max_prompt_tokens_per_step
            )
        piece = time_pass(request.device, partial(next, task.pieces))
        seconds, cpu_seconds = task.prefill_seconds
        task.prefill_seconds = seconds + piece.seconds, cpu_seconds + piece.cpu_seconds
        if piece.value is None:
            return None
        task.pieces = None
        return PassResult(piece.value, *task.prefill_seconds)

    def _advance(self, task: Task, result: PassResult[Any] | None) -> None:
        """Continue a decoding until it asks for a pass or ends."""
        try:
            while isinstance(step := next_step(task.steps, result), Round):
                result = None
                task.rows = len(step.rows) - sum(step.done)  # rows that have ended make room for others
                if task.on_round is not None:
                    task.on_round(step)
                if task.done:  # `on_round` has cancelled it
                    return
        except Exception as error:
            self._end(task, error)
            return
        if isinstance(step, Ended):
            task.result = step.result
            self._end(task, None)
        else:
            task.pending = step

    def _end(self, task: Task, error: BaseException | None) -> None:
        if task.done:
            return
        if self._side_job is not None and self._side_job[0] is task:  # its model may be changed once it has ended
            wait([self._side_job[1]])
        task.done, task.error, task.pending = True, error, None
        for tasks in (self.waiting, self.running):
            if task in tasks:
                tasks.remove(task)
        if not getattr(task.steps, "gi_running", False):  # else it ends itself, after the callback that cancelled it
            task.steps.close()


def decode_together(
    decodings: Iterable[tuple[Key, Steps[Any], int]],
    max_rows: int,
    refill: int = 1,
    on_refusal: Callable[[Key, InputError], None] | None = None,
) -> Generator[tuple[Key, Any]]:
    """Run decodings to their ends, as many at the same time as fit.

    If one fails, or the iterator is closed, the others are cancelled.

    Args:
        decodings: (name, steps, number of rows) of each. The next one is taken when there are free rows.
        max_rows: Number of rows that may run at the same time.
        refill: Number of free rows from which further decodings begin.
        on_refusal: Called with the name of a decoding that raised InputError, and the error; the others go on. None:
            such an error is raised as any other.

    Yields:
        (name, result) of each decoding, as they end.

    Raises:
        Exception: What a decoding raised.
    """
    scheduler, running = Scheduler(SchedulerLimits(max_rows, max_prompt_tokens_per_step=None)), dict[Task, Key]()
    waiting = iter(decodings)
    try:
        while True:
            room = max_rows - sum(task.rows for task in running)
            with torch.no_grad():  # `decodings` may prepare their inputs with models when they are taken
                if room >= refill or not running:
                    while room > 0 and (decoding := next(waiting, None)) is not None:
                        key, steps, rows = decoding
                        running[scheduler.add(steps, rows)] = key
                        room -= rows
                if not running:
                    return
                scheduler.step()
            for task in [task for task in running if task.done]:
                key = running.pop(task)
                if isinstance(task.error, InputError) and on_refusal is not None:
                    on_refusal(key, task.error)
                    continue
                if task.error is not None:
                    raise task.error
                yield key, task.result
    finally:
        scheduler.close()


def _is_side_job(task: Task) -> bool:
    request = task.pending
    return isinstance(request, Compute) and request.runs_on_side_thread and request.device.type == "cpu"


def _run_side_job(request: Compute[Any], threads: int) -> PassResult[Any]:
    set_own_threads(threads)
    return time_pass(request.device, request.compute)


def _precedence(task: Task) -> tuple[int, int]:
    return task.priority, task.number


def _shared_passes(tasks: Sequence[Task]) -> list[list[Task]]:
    """Group the decodings whose drafts can be scored in one pass: those of the same model, if its target can."""
    groups = defaultdict[object, list[Task]](list)
    for task in tasks:
        request = cast(Score, task.pending)
        target, key = request.target, cast(object, id(task))
        if isinstance(target, SharedPassTarget) and target.shares_passes(request.session):
            key = target.model
        groups[key].append(task)
    return list(groups.values())
