"""Progress on stderr: what is loaded, then a bar, in a terminal; else a line now and then, for logs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mmdec.checks.files import printable

if TYPE_CHECKING:
    from rich.progress import Progress

AFTER = 0.5  # seconds of loading that say nothing
EVERY = 30.0  # seconds between two lines; what is done sooner says nothing


@contextmanager
def loading(model: str, quiet: bool = False, timer: Callable[..., Any] = threading.Timer) -> Iterator[None]:
    """Say on a terminal what takes the first seconds, where it takes more than half of one: torch's import, and the
    model's weights. Logs say nothing.

    model: its name or path. quiet: say nothing on a terminal, either. timer: of (seconds, function), to be started.
    """
    if quiet or not sys.stderr.isatty():
        yield
        return
    line = f"loading {printable(model)} ..."
    waiting = timer(AFTER, lambda: print(line, file=sys.stderr, flush=True))
    waiting.daemon = True
    waiting.start()
    try:
        yield
    finally:
        waiting.cancel()


class Lines:
    """Says where the work is, at most once in `EVERY` seconds. count: as n of m, not in percent."""

    def __init__(self, count: bool, now: Callable[[], float] = time.monotonic) -> None:
        self._count, self._now, self._last = count, now, now()

    def tell(self, task: Any) -> None:
        """task: of rich, with description, completed and total."""
        now = self._now()
        if now - self._last < EVERY:
            return
        self._last = now
        done = f"{task.completed:.0f}"
        if task.total:
            done = f"{done} of {task.total:.0f}" if self._count else f"{100 * task.completed / task.total:.0f} %"
        print(f"{task.description}: {done}", file=sys.stderr, flush=True)


@contextmanager
def progress_bar(count: bool, now: Callable[[], float] = time.monotonic) -> Iterator[Progress]:
    """A bar on stderr, or lines where stderr is no terminal. count: show how many of how many are done.

    now: the clock of the lines, in seconds.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    class Told(Progress):
        """Tells `lines` of every step."""

        def update(self, task_id: TaskID, *arguments: Any, **options: Any) -> None:
            super().update(task_id, *arguments, **options)
            lines.tell(self._tasks[task_id])

        def advance(self, task_id: TaskID, advance: float = 1) -> None:
            super().advance(task_id, advance)
            lines.tell(self._tasks[task_id])

    lines, console = Lines(count, now), Console(stderr=True)
    counter = [MofNCompleteColumn()] if count else []
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *counter, TimeRemainingColumn())
    kind = Progress if console.is_terminal else Told
    with kind(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield progress
