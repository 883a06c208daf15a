"""Runs a request's work in its own thread, which reports progress.

The thread ends when the visitor has stopped the request or left the page. Gradio closes a handler's generator when a
visitor presses Stop or leaves the page. The work notices this at its next report; decoding reports after each round.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from mmdec.demo.html import error_sentence, status
from mmdec.kernels.threads import set_decoding_threads

WORK_THREAD = "mmdec-demo-work"  # name of the thread of each request
MAX_DECODERS = 2  # requests that decode at the same time; the others wait in the page's queue
CLOSE_CHECK_SECONDS = 0.2  # seconds after which a generator checks whether it was closed
UPDATE_CHECK_SECONDS = 0.005  # seconds between two checks whether the page has received an update

Result = TypeVar("Result")
Update = Mapping[str, Any]  # name of an output of the page -> its new value
_slots = threading.BoundedSemaphore(MAX_DECODERS)  # a stopped request keeps its slot until its current round has ended


class WorkStopped(Exception):
    """Raised in the work when its visitor has stopped the request, or has gone."""


class Report(Protocol):
    """The callback by which work reports to the page. Without values, it only checks whether the work was stopped."""

    def __call__(self, *, first: bool = False, **values: Any) -> None:
        """Report new values of the page's outputs, by name.

        Args:
            first: Wait until the page has received the values, before the work goes on.

        Raises:
            WorkStopped: If the work was stopped.
        """
        ...


def updates(work: Callable[[Report], None]) -> Generator[Update, None, None]:
    """Run `work` in a thread, and yield the updates that it reports. Closing this generator stops the work.

    If nothing is reported for `CLOSE_CHECK_SECONDS` seconds, an empty update is yielded. An exception in the work
    becomes a message in the output "status".
    """
    update_queue: queue.Queue[Update | None] = queue.Queue()
    stop = threading.Event()

    def report(*, first: bool = False, **values: Any) -> None:
        if stop.is_set():
            raise WorkStopped
        if values:
            update_queue.put(values)
        while first and update_queue.unfinished_tasks and not stop.wait(UPDATE_CHECK_SECONDS):
            pass

    thread = threading.Thread(target=_run, name=WORK_THREAD, args=(work, report, update_queue), daemon=True)
    thread.start()
    try:
        while True:
            try:
                update = update_queue.get(timeout=CLOSE_CHECK_SECONDS)
            except queue.Empty:
                yield {}
                continue
            if update is None:
                return
            yield update
            update_queue.task_done()
    finally:
        stop.set()


def _run(work: Callable[[Report], None], report: Report, update_queue: queue.Queue[Update | None]) -> None:
    try:
        with _slots:
            report()
            set_decoding_threads()
            work(report)
    except WorkStopped:
        pass
    except Exception as error:
        update_queue.put({"status": status(error_sentence(error), "error")})
    finally:
        update_queue.put(None)


def run_decoding(work: Callable[..., Result], *arguments: Any) -> Result:
    """Call `work` in a thread of its own that has the CPU threads for decoding, and return its result."""
    with ThreadPoolExecutor(1, initializer=set_decoding_threads) as thread:
        return thread.submit(work, *arguments).result()
