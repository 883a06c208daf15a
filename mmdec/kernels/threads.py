"""Sets torch's number of CPU threads for one Python thread, without changing it for other Python threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

_setting = threading.Lock()  # held while the number for new Python threads is read, changed and restored
_decoding: int | None = None  # torch's number of CPU threads before `one_pool`; None: outside of its block


def set_own_threads(count: int) -> None:
    """Set torch's number of CPU threads for this Python thread only.

    torch would also use the number in Python threads that start later, so the number for these threads is set back.

    Args:
        count: At least 1.
    """
    if count == torch.get_num_threads():
        return
    with _setting, ThreadPoolExecutor(1) as executor:
        # the number of threads with which a new Python thread begins
        later = executor.submit(torch.get_num_threads).result()
        torch.set_num_threads(count)
        executor.submit(torch.set_num_threads, later).result()


@contextmanager
def one_pool() -> Iterator[None]:
    """Context manager for a program that decodes in threads of its own: set torch's number of CPU threads to 1.

    A thread that decodes calls `set_decoding_threads`; all others keep the 1. Each Python thread that uses several CPU
    threads has a pool of them. If all pools together have more threads than there are CPUs, OpenMP lets them sleep
    between two operations, and a pass takes up to 1.7 times as long.
    """
    global _decoding
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    _decoding = before
    try:
        yield
    finally:
        _decoding = None
        torch.set_num_threads(before)


def set_decoding_threads() -> None:
    """In the block of `one_pool`, set torch's number of CPU threads of this Python thread to the number before."""
    if _decoding is not None:
        set_own_threads(_decoding)


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
