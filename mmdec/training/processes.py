"""Child processes that end with their parent, and a lock for a folder.

Normally, the children of a killed process keep running. Here, a child checks every second whether its parent still
runs, and ends if it does not.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from mmdec.checks.files import write_atomically
from mmdec.errors import InputError

PARENT_VARIABLE = "MMDEC_PARENT"  # name of the environment variable with the process id of the parent to watch
CHECK_SECONDS = 1.0  # seconds between two checks whether the parent still runs
EXIT_CODE_TERMINATED = 143  # exit code after SIGTERM: 128 + 15, as in shells


def end_with_parent(parent: int | None = None) -> None:
    """Let this process end when its parent ends. The child process calls this before anything else.

    Args:
        parent: The parent's process id, which the parent passed to the child; None: the current parent. (If the parent
            has ended already, the current parent is another process.)
    """
    expected = os.getppid() if parent is None else parent
    threading.Thread(target=_watch, args=(expected,), daemon=True, name="end with parent").start()


def child_environment() -> dict[str, str]:
    """Return environment variables for a child process that name this process as its parent.

    A child that calls `end_with_named_parent` at its start then ends with this process.
    """
    return {PARENT_VARIABLE: str(os.getpid())}


def end_with_named_parent() -> None:
    """End this process when the process whose id is in the environment variable `MMDEC_PARENT` has ended.

    Child processes of this process will end with it in the same way.
    """
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return
    # child processes read this variable, and end when this process has ended
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    end_with_parent(int(parent))


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(CHECK_SECONDS)
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


@contextmanager
def lock_folder(folder: Path, task: str) -> Iterator[None]:
    """Lock `folder` for this process, until the `with` block or the process ends.

    The operating system locks the empty file `folder`/.lock. The file .owner next to it names the holder. Both files
    remain.

    Args:
        task: The work that locks the folder, for messages.

    Raises:
        InputError: If another process, or another call in this process, holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock, owner = FileLock(folder / ".lock"), folder / ".owner"
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        owner_name = owner.read_text(encoding="utf-8") if owner.is_file() else "another process"
        raise InputError(
            f"`{task}` must be the only process in '{folder}', but {owner_name} uses it. Wait for it, or stop it."
        ) from error
    try:
        write_atomically(owner, f"{task} (process {os.getpid()})".encode())
        yield
    finally:
        lock.release()
