"""Tests Whisper decoding of several jobs in batches: torch's threads, the order of jobs, and errors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from mmdec.kernels.threads import set_own_threads
from mmdec.whisper.batcher import PassBatcher


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def elsewhere(function: Callable[[], Any]) -> Any:
    """Call a function in a new thread, and return its result."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(function).result()


def reached(event: threading.Event) -> None:
    assert event.wait(20)


def test_threads_started_meanwhile_keep_their_own_number() -> None:
    torch.set_num_threads(5)
    set_own_threads(3)
    together, seen = PassBatcher(1), dict[str, int]()

    def job() -> None:
        seen["job"] = torch.get_num_threads()
        seen["apart"] = together.run_alone(torch.get_num_threads, apart=True)
        seen["pass"] = together.run_in_shared_pass(lambda parts: [torch.get_num_threads() for _ in parts], None)
        seen["begun meanwhile"] = elsewhere(torch.get_num_threads)

    assert [number for number, _ in together.run([job])] == [0]
    assert seen == {"job": 1, "apart": 1, "pass": 2, "begun meanwhile": 5}
    assert torch.get_num_threads() == 3
    assert elsewhere(torch.get_num_threads) == 5


def test_a_finished_encoding_continues_before_a_new_one_starts() -> None:
    """The other thread does the first and the third, the caller's takes the second: then the first goes on, and only
    then the fourth is taken. Which thread computes one changes no number of threads."""
    torch.set_num_threads(3)
    together, order, threads = PassBatcher(3), list[str](), list[int]()
    begun = [threading.Event() for _ in range(4)]
    told = threading.Event()

    def apart(number: int) -> None:
        threads.append(torch.get_num_threads())
        begun[number].set()
        if number == 0:
            reached(begun[1])
        elif number == 1:
            reached(begun[2])
        elif number == 2:
            reached(told)
        else:
            order.append("the fourth is computed")
            told.set()

    def job(number: int) -> None:
        if number == 1:
            reached(begun[0])
        together.run_alone(lambda: apart(number), apart=True)
        if number == 0:
            order.append("the first goes on")
            told.set()

    ended = {number for number, _ in together.run([lambda number=number: job(number) for number in range(4)])}
    assert ended == {0, 1, 2, 3}
    assert order == ["the first goes on", "the fourth is computed"]
    assert threads == [1, 1, 1, 1]


def test_an_error_drops_pending_work() -> None:
    torch.set_num_threads(2)
    together, computed = PassBatcher(2), list[str]()
    begun, dropped = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        reached(dropped)
        computed.append("first")

    def queued() -> None:
        reached(begun)
        try:
            together.run_alone(lambda: computed.append("queued"), apart=True)
        finally:
            dropped.set()

    def fails() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(together.run([lambda: together.run_alone(first, apart=True), queued, fails]))
    assert computed == ["first"]
