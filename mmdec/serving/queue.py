"""The queue of waiting requests, and the threads that decode them. Requests with equal options are decoded as one
batch.

By default there is one decoding thread. If there are several, the requests are divided among them. This file does not
depend on HTTP: a job's events go to the asyncio event loop of the handler that waits for the job.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any, Protocol, final

import torch

from mmdec.serving.metrics import Metrics

log = logging.getLogger(__name__)
GATHER_SECONDS = 0.02  # seconds to wait for further requests before a batch is taken, if the previous batch had several


class DecodingStopped(Exception):
    """Raised in an engine to stop decoding, because all clients of the batch have disconnected."""


class Engine(Protocol):
    """Decodes the jobs of one task with one model."""

    @property
    def task(self) -> str: ...

    def decode(self, jobs: Sequence[Job]) -> Sequence[Any]:
        """Decode jobs with equal keys as one batch.

        Returns:
            For each job, in order, a result or an exception. A result of None is not counted in the metrics.
        """
        ...


@final
class Job:
    """One request: what to decode, and a queue of events for the handler that waits.

    Must be made in the handler's event loop.

    Args:
        engine: Decodes the job.
        key: The decoding options; jobs of one engine with equal keys may be decoded together.
        rows: Maximum size of such a batch.
        payload: What to decode, such as samples.
        seconds: Duration of the audio, for the metrics.
    """

    def __init__(self, engine: Engine, key: Hashable, payload: Any, rows: int = 1, seconds: float = 0.0) -> None:
        self.engine, self.key, self.payload, self.rows, self.seconds = engine, key, payload, rows, seconds
        self.disconnected = False  # whether the client has disconnected; then the job's row of the batch ends early
        self.streams = False  # whether the client gets text while the job is decoded
        # any number of ("text", piece of text or `StreamUpdate`), then one ("result", the result) or ("error", an
        # exception)
        self.events: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def put_event(self, kind: str, value: Any) -> None:
        """Put an event into the queue of the handler.

        Args:
            kind: "text", "result" or "error". Any thread may call this.
        """
        with suppress(RuntimeError):  # the event loop is already closed: the server was killed
            self._loop.call_soon_threadsafe(self.events.put_nowait, (kind, value))


@final
class DisconnectCriterion:
    """A stopping criterion for `generate`: ends the rows whose clients have disconnected. Holds the jobs of the batch.

    transformers may call it with only some rows of a batch, and does not tell which rows. In this case no row ends
    until all clients have disconnected.
    """

    mmdec_row_wise = True  # tells mmdec that the result for a row depends only on the row's index

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._jobs = jobs

    def __call__(self, ids: Any, scores: Any) -> torch.Tensor:
        gone = [job.disconnected for job in self._jobs]
        return torch.tensor(gone if len(gone) == len(ids) else [all(gone)] * len(ids))

    def __deepcopy__(self, memo: dict[int, Any]) -> DisconnectCriterion:
        return self  # no copy is made, because each copy must read the flags of the same jobs


@final
class DecodingWorker:
    """Holds the queue of waiting jobs, and runs the threads that decode them, the oldest jobs first.

    Args:
        metrics: Counts the decoded work.
        decoders: Number of threads; each decodes one batch at a time.
    """

    def __init__(self, metrics: Metrics, decoders: int = 1) -> None:
        self._metrics, self._changed = metrics, threading.Condition()
        self._waiting: deque[Job] = deque()
        self._decoding: list[Job] = []
        self._last = 1  # size of the last batch: number of waiting jobs with equal keys when it was taken
        self._pace = 0.0  # exponential moving average of the decoding seconds per job
        self._closed = False
        names = [f"mmdec-serve-{number}" for number in range(decoders)]
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Add a job to the queue. Its text and result arrive through the job's event queue."""
        with self._changed:
            if self._closed:
                raise RuntimeError("the worker is closed")
            self._waiting.append(job)
            self._changed.notify_all()

    def drop(self, job: Job) -> None:
        """Cancel a job whose client has disconnected: remove it from the queue, or if it is being decoded, let its row
        end early."""
        with self._changed:
            job.disconnected = True
            if job in self._waiting:
                self._waiting.remove(job)
                self._metrics.add("stopped_total", task=job.engine.task)

    def waiting(self) -> tuple[int, int]:
        """Return the number of jobs in the queue, and the number of jobs that are being decoded."""
        with self._changed:
            return len(self._waiting), len(self._decoding)

    def delay(self) -> float:
        """Estimate in how many seconds a job that is submitted now would be finished."""
        return sum(self.waiting()) * self._pace / len(self._threads)

    def close(self) -> None:
        """Decode all jobs in the queue, then end the threads and wait for them."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while jobs := self._next():
            began = time.monotonic()
            try:
                results = jobs[0].engine.decode(jobs)
            except DecodingStopped:
                results = [DecodingStopped()] * len(jobs)
            except Exception as error:
                results = [error] * len(jobs)
            seconds = time.monotonic() - began
            self._pace += 0.2 * (seconds / len(jobs) - self._pace)
            self._metrics.observe("batch_rows", len(jobs), task=jobs[0].engine.task)
            for job, result in zip(jobs, results, strict=True):
                if job.disconnected:
                    self._metrics.add("stopped_total", task=job.engine.task)
                elif result is not None and not isinstance(result, Exception):
                    self._metrics.count_result(job.engine.task, result, job.seconds)
                job.put_event("error" if isinstance(result, Exception) else "result", result)
            with self._changed:
                self._decoding = [job for job in self._decoding if job not in jobs]

    def _next(self) -> Sequence[Job]:
        """Wait for jobs, and take the next batch: the oldest job, and jobs that can be decoded with it.

        Returns:
            The batch; empty if the worker is closed and the queue is empty.
        """
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return ()
                if batch := self._batch(self._waiting[0]):
                    return batch

    def _batch(self, first: Job) -> Sequence[Job]:
        """Take a batch from the queue: the job `first` and jobs with the same key, at most this thread's share of them.

        Returns:
            The batch; empty if other threads have taken these jobs meanwhile.
        """
        # clients that were answered together often send their next requests at the same time
        if self._last > 1 and not self._closed:
            self._changed.wait_for(lambda: len(self._alike(first)) >= min(self._last, first.rows), GATHER_SECONDS)
        alike = self._alike(first)
        self._last = max(len(alike), 1)
        share = -(-(len(alike) + len(self._decoding)) // len(self._threads))
        batch = alike[: min(first.rows, share)]
        for job in batch:
            self._waiting.remove(job)
        self._decoding += batch
        return batch

    def _alike(self, first: Job) -> list[Job]:
        return [job for job in self._waiting if job.engine is first.engine and job.key == first.key]
