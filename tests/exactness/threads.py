"""Runs functions in several threads at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

Work = Callable[[], Any]


def at_once(works: list[Work]) -> list[Any]:
    """Run all functions at the same time, each in a thread. Returns their results; None for one that failed."""
    result: dict[int, Any] = {}
    together = threading.Barrier(len(works))

    def call(index: int, work: Work) -> None:
        together.wait(60)
        result[index] = work()

    threads = [threading.Thread(target=call, args=item, daemon=True) for item in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [result.get(index) for index in range(len(works))]
