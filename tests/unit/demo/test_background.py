"""Tests the demo's background work: its reports are in order, its errors are sentences, and it ends when the visitor
has gone."""

from __future__ import annotations

import threading
from typing import Any

import torch

from mmdec.demo.background import MAX_DECODERS, Report, WorkStopped, run_decoding, updates
from mmdec.demo.html import UNEXPECTED
from mmdec.errors import InputError
from mmdec.kernels.threads import one_pool
from tests.support.demo_server import count_requests

LONG = 60.0  # seconds that a test waits for a thread before it fails


def messages(work: Any) -> list[dict[str, Any]]:
    """Updates that say something."""
    return [dict(update) for update in updates(work) if update]


def test_reports_come_in_order() -> None:
    def work(report: Report) -> None:
        for number in range(5):
            report(number=number)
            report()

    assert messages(work) == [{"number": number} for number in range(5)]


def test_an_error_is_the_last_report() -> None:
    def refused(report: Report) -> None:
        report(text="begun")
        raise InputError("`audio` must be <loud>. Turn it up.")

    begun, last = messages(refused)
    assert begun == {"text": "begun"}
    assert "The recording must be &lt;loud&gt;. Turn it up." in last["status"]
    assert 'role="alert"' in last["status"]

    def broken(report: Report) -> None:
        raise ZeroDivisionError

    assert UNEXPECTED in messages(broken)[-1]["status"]


def test_only_the_work_has_several_cpu_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with one_pool():
            assert torch.get_num_threads() == 1
            assert messages(lambda report: report(threads=torch.get_num_threads())) == [{"threads": 3}]
            assert run_decoding(torch.get_num_threads) == 3
            assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_closing_ends_the_work_at_its_next_report() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work(report: Report) -> None:
        try:
            while True:
                report(round=1)
                begun.set()
        except WorkStopped:
            ended.set()
            raise

    reports = updates(work)
    assert next(reports) == {"round": 1}
    assert begun.wait(LONG)
    reports.close()
    assert ended.wait(LONG)
    assert list(reports) == []


def test_the_first_report_is_shown_before_work_continues() -> None:
    went_on = threading.Event()

    def work(report: Report) -> None:
        report(first=True, sound=1)
        went_on.set()
        report(race=1)

    reports = updates(work)
    assert next(reports) == {"sound": 1}
    assert not went_on.is_set()
    assert [dict(update) for update in reports if update] == [{"race": 1}]
    assert went_on.is_set()


def test_closing_ends_work_that_waits_for_the_page() -> None:
    ended = threading.Event()

    def work(report: Report) -> None:
        try:
            report(first=True, sound=1)
            report()
        except WorkStopped:
            ended.set()
            raise

    reports = updates(work)
    assert next(reports) == {"sound": 1}
    reports.close()
    assert ended.wait(LONG)


def test_no_more_decode_at_once_than_there_are_slots() -> None:
    lock, go = threading.Lock(), threading.Event()
    at_once, most = 0, 0

    def work(report: Report) -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        if at_once == MAX_DECODERS:
            go.set()
        assert go.wait(LONG)
        with lock:
            at_once -= 1
        report(done=True)

    def visit() -> None:
        answers.append(messages(work))

    answers: list[list[dict[str, Any]]] = []
    visitors = [threading.Thread(target=visit) for _ in range(3 * MAX_DECODERS)]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join(LONG)
    assert answers == [[{"done": True}]] * len(visitors)
    assert most == MAX_DECODERS


def test_a_stopped_request_that_waits_never_begins() -> None:
    holding, release, began = threading.Semaphore(0), threading.Event(), threading.Event()

    def holds(report: Report) -> None:
        holding.release()
        assert release.wait(LONG)

    def late(report: Report) -> None:
        began.set()

    holders = [updates(holds) for _ in range(MAX_DECODERS)]
    threads = [threading.Thread(target=lambda holder=holder: list(holder)) for holder in holders]
    for thread in threads:
        thread.start()
    for _ in range(MAX_DECODERS):
        assert holding.acquire(timeout=LONG)
    waiting = updates(late)
    assert next(waiting) == {}
    waiting.close()
    release.set()
    for thread in threads:
        thread.join(LONG)
    while count_requests():  # its thread ends by itself
        threading.Event().wait(0.01)
    assert not began.is_set()
