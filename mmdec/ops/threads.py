"""Sets the number of torch's CPU threads for one Python thread, and leaves it unchanged for all others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

_setting = threading.Lock()  # held between reading the number for later threads and restoring it


def set_own_threads(count: int) -> None:
    """Set the number of torch's CPU threads for this Python thread. torch would use it for Python threads that start
    later, too, so the number for those is restored. count: at least 1."""
    if count == torch.get_num_threads():
        return
    with _setting, ThreadPoolExecutor(1) as other:
        later = other.submit(torch.get_num_threads).result()  # the number that a new thread starts with
        torch.set_num_threads(count)
        other.submit(torch.set_num_threads, later).result()


@contextmanager
def own_threads(count: int) -> Iterator[None]:
    """Set the number of torch's CPU threads for this Python thread within the block. count: from 1."""
    before = torch.get_num_threads()
    set_own_threads(count)
    try:
        yield
    finally:
        set_own_threads(before)
