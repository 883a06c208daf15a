"""Progress on stderr: what is loaded, and how much is done."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from mmdec.checks.files import printable

if TYPE_CHECKING:
    from rich.progress import Progress

LOADING_DELAY = 0.5  # seconds of loading before "loading ..." is printed
PROGRESS_INTERVAL = 30.0  # seconds between two lines of progress; shorter work prints none
_owns_process: ContextVar[bool] = ContextVar("_owns_process", default=False)


@contextmanager
def own_process() -> Iterator[None]:
    """Say that the process is mmdec's own in the block, and ends after it.

    So models stay until then, and are left out of garbage collection.
    """
    mark = _owns_process.set(True)
    try:
        yield
    finally:
        _owns_process.reset(mark)
        gc.unfreeze()  # libraries such as triton report objects that are still there at the very end


@contextmanager
def show_loading(model: str, quiet: bool = False) -> Iterator[None]:
    """Print "loading ..." on a terminal if the block takes more than half a second (importing torch, reading weights).

    Nothing is printed if stderr is not a terminal. In a process of mmdec's own, the garbage collector pauses meanwhile,
    and later collections leave out what the block made.

    Args:
        quiet: Print nothing at all.
    """
    with ExitStack() as stack:
        if not quiet and sys.stderr.isatty():
            line = f"loading {printable(model)} ..."
            waiting = threading.Timer(LOADING_DELAY, lambda: print(line, file=sys.stderr, flush=True))
            waiting.daemon = True
            waiting.start()
            stack.callback(waiting.cancel)
        if _owns_process.get():
            gc.disable()
            stack.callback(gc.enable)
        yield
        if _owns_process.get():
            gc.freeze()


@contextmanager
def progress_bar(count: bool) -> Iterator[Progress]:
    """Make a progress bar on stderr, or lines if stderr is not a terminal.

    Args:
        count: Show "n of m".
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    class ProgressLines(Progress):
        """Prints the progress as lines instead of a bar, at most one in `PROGRESS_INTERVAL` seconds."""

        printed = time.monotonic()  # when the last line was printed

        def update(self, task_id: TaskID, *arguments: Any, **options: Any) -> None:
            super().update(task_id, *arguments, **options)
            self.print_line(task_id)

        def advance(self, task_id: TaskID, advance: float = 1) -> None:
            super().advance(task_id, advance)
            self.print_line(task_id)

        def print_line(self, task_id: TaskID) -> None:
            now, task = time.monotonic(), self._tasks[task_id]
            if now - self.printed < PROGRESS_INTERVAL:
                return
            self.printed = now
            done = f"{task.completed:.0f}"
            if task.total:
                done = f"{done} of {task.total:.0f}" if count else f"{100 * task.completed / task.total:.0f} %"
            print(f"{task.description}: {done}", file=sys.stderr, flush=True)

    console = Console(stderr=True)
    counter = [MofNCompleteColumn()] if count else []
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *counter, TimeRemainingColumn())
    kind = Progress if console.is_terminal else ProgressLines
    with kind(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        yield progress
