"""Tests in which order the scheduler runs encoders' windows and drafts, and in which thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch

from mmdec.core.scheduler import Scheduler, SchedulerLimits, decode_together
from mmdec.core.steps import Compute, Prefill, Score, Steps
from mmdec.kernels.threads import own_threads
from mmdec.types import Needs

CPU = torch.device("cpu")
PATIENCE = 60.0  # seconds after which a window that should run beside another one fails


class Target:
    """Its passes are recorded."""

    def __init__(self) -> None:
        self.passes = list[str]()

    def prefill(self, inputs: Any, needs: Needs) -> None:
        self.passes.append(inputs)

    def score(self, session: Any, draft: Any) -> None:
        self.passes.append(session)


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler()
    yield scheduler
    scheduler.close()


def recording(target: Target, name: str, window: Any, drafts: int = 1) -> Steps[Any]:
    """A decoding of one window. Its result is what `window` returns."""
    result = yield Compute(CPU, window, runs_on_side_thread=True)
    for _ in range(drafts):
        yield draft(target, name)
    assert result is not None
    return result.value


def draft(target: Target, name: str) -> Score:
    return Score(cast(Any, target), CPU, name, cast(Any, None))


def chat(target: Target, drafts: int) -> Steps[None]:
    for _ in range(drafts):
        yield draft(target, "chat")


def test_windows_go_before_drafts_so_that_more_rows_share_a_pass(scheduler: Scheduler) -> None:
    target = Target()
    for name in "abc":
        scheduler.add(recording(target, name, partial(target.passes.append, f"window {name}"), drafts=2))
    with own_threads(1):
        scheduler.run()
    assert target.passes == ["window a", "window b", "window c", *"abcabc"]


def test_a_chats_drafts_do_not_wait_for_a_recordings_windows(scheduler: Scheduler) -> None:
    target = Target()
    scheduler.add(chat(target, 3), priority=1)
    for name in "ab":
        scheduler.add(recording(target, name, partial(target.passes.append, f"window {name}")), priority=2)
    with own_threads(1):
        scheduler.run()
    assert target.passes == ["window a", "chat", "window b", "chat", "chat", "a", "b"]


def test_two_windows_run_at_the_same_time_with_half_of_the_threads_each(scheduler: Scheduler) -> None:
    both = threading.Barrier(2)

    def window() -> tuple[int, int]:
        both.wait(PATIENCE)  # fails unless the other window runs meanwhile
        return torch.get_num_threads(), threading.get_ident()

    tasks = [scheduler.add(recording(Target(), name, window)) for name in "ab"]
    with own_threads(2):
        scheduler.run()
        assert torch.get_num_threads() == 2
    assert [task.error for task in tasks] == [None, None]
    assert [task.result[0] for task in tasks] == [1, 1]
    assert tasks[0].result[1] != threading.get_ident() == tasks[1].result[1]


def test_a_window_runs_beside_drafts(scheduler: Scheduler) -> None:
    target, scored = Target(), threading.Event()

    def slow_window() -> bool:
        return scored.wait(PATIENCE)  # fails unless drafts are scored meanwhile

    class Scored(Target):
        def score(self, session: Any, draft: Any) -> None:
            scored.set()

    scheduler.add(chat(Scored(), 1))
    task = scheduler.add(recording(target, "a", slow_window))
    with own_threads(2):
        scheduler.run()
    assert task.result is True


def test_a_lone_window_has_all_threads(scheduler: Scheduler) -> None:
    task = scheduler.add(recording(Target(), "a", lambda: (torch.get_num_threads(), threading.get_ident())))
    with own_threads(2):
        scheduler.run()
    assert task.result == (2, threading.get_ident())


def test_a_window_that_fails_on_the_side_thread_ends_its_own_decoding(scheduler: Scheduler) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    tasks = [scheduler.add(recording(Target(), name, window)) for name, window in (("a", fail), ("b", lambda: 1))]
    with own_threads(2):
        scheduler.run()
    assert isinstance(tasks[0].error, ZeroDivisionError)
    assert tasks[1].result == 1


def test_a_cancelled_decoding_ends_after_its_window(scheduler: Scheduler) -> None:
    """Else its model could be changed while the side thread reads it."""
    ended = threading.Event()

    def window() -> None:
        threading.Event().wait(0.2)
        ended.set()

    task = scheduler.add(recording(Target(), "a", window))
    scheduler.add(chat(Target(), 9))
    with own_threads(2):
        scheduler.step()
        scheduler.cancel(task)
    assert ended.is_set()


def prompt(target: Target, name: str, tokens: int | None) -> Steps[None]:
    yield Prefill(cast(Any, target), CPU, cast(Any, name), Needs(), tokens)


def test_a_step_reads_as_many_prompts_as_the_limit_allows() -> None:
    target, scheduler = Target(), Scheduler(SchedulerLimits(max_prompt_tokens_per_step=256))
    for name, tokens in (("a", 100), ("b", 100), ("c", 100), ("picture", None), ("long", 900), ("d", 1)):
        scheduler.add(prompt(target, name, tokens))
    passes_of_steps = list[list[str]]()
    while scheduler.waiting or scheduler.running:
        target.passes.clear()
        scheduler.step()
        passes_of_steps.append([*target.passes])
    scheduler.close()
    assert passes_of_steps == [["a", "b"], ["c"], ["picture"], ["long"], ["d"]]


def test_decodings_are_prepared_without_gradients() -> None:
    weight = torch.ones(1, requires_grad=True)
    target = Target()
    decodings = ((name, recording(target, name, partial(str, weight * 2)), 1) for name in "ab" if (weight * 2).numpy())
    assert [name for name, _ in decode_together(decodings, max_rows=1)] == ["a", "b"]
