"""Processes that end with the one that started them, and a folder that one process at a time may work in.

A parent that is killed without a word takes nobody with it: its children go on, for nobody. On Linux the kernel is
asked to end them (PR_SET_PDEATHSIG); besides, on every system, they look every second who their parent is.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout

from mmdec.checks.errors import InputError
from mmdec.checks.files import write_whole

WATCHED = "MMDEC_PARENT"  # the pid that a started process shall end with
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
EVERY = 1.0  # seconds between two looks
TERMINATED = 143  # the exit code of a process that SIGTERM ended: 128 + 15, as shells count


def end_with_parent(parent: int | None = None) -> None:
    """Let this process be killed when its parent is gone: called by the child, first of all.

    parent: its pid as the parent told it, for it may be gone already; None takes the present one.
    """
    expected = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != expected:
        _end()
    threading.Thread(target=_watch, args=(expected,), daemon=True, name="end with parent").start()


def started_here() -> dict[str, str]:
    """For the environment of a process that is to end with this one: it calls `end_as_told`."""
    return {WATCHED: str(os.getpid())}


def end_as_told() -> None:
    """`end_with_parent` where the environment names this process's parent; its own children end with it in turn."""
    parent = os.environ.get(WATCHED)
    if parent is None:
        return
    os.environ[WATCHED] = str(os.getpid())  # for those that it starts
    end_with_parent(int(parent))


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(EVERY)
    _end()


def _end() -> None:
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


@contextmanager
def only_one(folder: Path, what: str) -> Iterator[None]:
    """Hold `folder` for this process, which loses it when it ends, however that is.

    The lock is the system's, on `folder`/.lock; the file itself says nothing and stays, as does .owner, which names the
    holder. Raises InputError where another process, or another call in this one, holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock, owner = FileLock(folder / ".lock"), folder / ".owner"
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        known = owner.read_text(encoding="utf-8") if owner.is_file() else "another process"
        raise InputError(
            f"`{what}` must be alone in '{folder}', but {known} works there. Wait for it, or stop it."
        ) from error
    try:
        write_whole(owner, f"{what} (process {os.getpid()})".encode())
        yield
    finally:
        lock.release()


@contextmanager
def sigterm_exits() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit with `TERMINATED`, once: blocks are left in order. Only the main thread of a
    process can be told; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would break off what ends in order
        raise SystemExit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
