"""torch's CPU threads for the time of one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mmdec.checks.arguments import check_threads


@contextmanager
def with_threads(threads: int | None) -> Iterator[None]:
    """Set torch's CPU threads within the block; None leaves them unchanged. Raises InputError."""
    count = check_threads(threads)
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
