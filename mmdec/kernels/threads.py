"""Sets torch's number of CPU threads for one Python thread, without changing it for other Python threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

_setting = threading.Lock()  # held while the number for new Python threads is read, changed and restored


def set_own_threads(count: int) -> None:
    """Set torch's number of CPU threads for this Python thread only.

    torch would also use the number in Python threads that start later, so the number for these threads is set back.

    Args:
        count: At least 1.
    """
    if count == torch.get_num_threads():
        return
    with _setting, ThreadPoolExecutor(1) as other:
        # the number of threads with which a new Python thread begins
        later = other.submit(torch.get_num_threads).result()
        torch.set_num_threads(count)
        other.submit(torch.set_num_threads, later).result()


@contextmanager
def one_pool() -> Iterator[int]:
    """Context manager for a program that decodes in one thread: set torch's number of CPU threads to 1 for all others.

    Each Python thread that uses several CPU threads has a pool of them. If all pools together have more threads than
    there are CPUs, OpenMP lets them sleep between two operations, and a pass takes up to 1.7 times as long.

    Yields:
        The number before, for the thread that decodes.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


@contextmanager
def own_threads(count: int) -> Iterator[None]:
    """Context manager: set torch's number of CPU threads for this Python thread inside the block.

    Args:
        count: At least 1.
    """
    before = torch.get_num_threads()
    set_own_threads(count)
    try:
        yield
    finally:
        set_own_threads(before)
