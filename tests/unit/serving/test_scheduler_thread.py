"""A thread that decodes for all others: results, cancelled and failing requests, locks of models, and its end."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import mmdec
from mmdec.core.scheduler import SchedulerLimits
from mmdec.core.steps import Compute, Steps
from mmdec.generation.generate import GenerateCall
from mmdec.generation.speculation import DecodingOptions, Speculation
from mmdec.kernels.threads import one_pool
from mmdec.serving.scheduler_thread import DecodingStopped, Priority, SchedulerThread
from mmdec.types import Round
from tests.support.families import model_of
from tests.support.running_servers import until

PATIENCE = 60.0  # seconds after which a test fails
CPU = torch.device("cpu")


@contextmanager
def running(limits: SchedulerLimits = SchedulerLimits(), **options: Any) -> Iterator[SchedulerThread]:
    thread = SchedulerThread(limits, **options)
    try:
        yield thread
    finally:
        thread.close()


@cache
def llama() -> PreTrainedModel:
    return model_of("LlamaForCausalLM")


def prompt(seed: int) -> torch.Tensor:
    rng = random.Random(seed)
    return torch.tensor([[rng.randrange(3, 48) for _ in range(rng.randint(2, 12))]])


def steps_of(ids: torch.Tensor, new: int = 24) -> Steps[Any]:
    """Decode, and return the sequences. The call is prepared in the scheduler's thread."""
    speculation = Speculation(DecodingOptions("lookup"))
    run = GenerateCall.from_options(llama(), speculation, {"max_new_tokens": new, "do_sample": False}).prepare(ids)
    yield from run.steps
    return run.sequences.tolist()


def tokens_alone(ids: torch.Tensor, new: int = 24) -> list[list[int]]:
    return mmdec.generate(llama(), ids, drafter=None, max_new_tokens=new, do_sample=False).sequences.tolist()


def endless(begun: threading.Event | None = None) -> Steps[Any]:
    while True:
        yield Compute(CPU, lambda: None)
        if begun is not None:
            begun.set()


def test_results_and_rounds_are_those_of_the_calls() -> None:
    wanted = [tokens_alone(prompt(seed)) for seed in range(6)]
    shared = list[int]()
    with running(SchedulerLimits(max_rows=4), on_step=lambda rows: shared.append(rows["llama"])) as thread:
        decodings = [thread.submit(steps_of(prompt(seed)), [llama()], label="llama") for seed in range(6)]
        rounds = [list(decoding) for decoding in decodings]
        results = [decoding.result(PATIENCE) for decoding in decodings]
        assert thread.load() == {}
    assert results == wanted
    for seed, parts in enumerate(rounds):
        new = [token for round_ in parts for token in round_.tokens[0]]
        assert prompt(seed)[0].tolist() + new == wanted[seed][0]
    assert max(shared) == 4


def test_the_thread_starts_with_the_first_decoding() -> None:
    with running() as thread:
        assert thread._thread is None
        thread.submit(steps_of(prompt(1))).result(PATIENCE)
        assert thread._thread is not None


def test_the_thread_has_the_cpu_threads_of_the_program() -> None:
    here, seen = torch.get_num_threads(), list[int]()

    def steps() -> Steps[None]:
        yield Compute(CPU, lambda: seen.append(torch.get_num_threads()))

    torch.set_num_threads(3)
    try:
        with one_pool(), running() as thread:
            thread.submit(steps()).future.result(PATIENCE)
            assert torch.get_num_threads() == 1
        assert (seen, torch.get_num_threads()) == ([3], 3)
    finally:
        torch.set_num_threads(here)


def test_a_cancelled_decoding_frees_its_rows_before_the_next_pass() -> None:
    ended = threading.Event()
    passes = list[int]()

    def counting_steps() -> Steps[Any]:
        try:
            while True:
                passes.append(1)
                yield Compute(CPU, lambda: None)
        finally:
            ended.set()

    with running(SchedulerLimits(max_rows=1)) as thread:
        first = thread.submit(counting_steps(), label="first")
        until(lambda: passes)
        second = thread.submit(steps_of(prompt(2)), label="second")
        assert thread.load()["second"].waiting == 1
        with thread._changed:  # the thread is between two steps, or in the last one before the end
            first.cancel()
            before = len(passes)
        assert second.result(PATIENCE) == tokens_alone(prompt(2))
        assert ended.is_set()
        assert len(passes) <= before + 1
        with pytest.raises(DecodingStopped):
            first.result(PATIENCE)


def test_a_waiting_decoding_can_be_cancelled() -> None:
    with running(SchedulerLimits(max_rows=1)) as thread:
        first = thread.submit(endless())
        waiting = thread.submit(steps_of(prompt(1)))
        waiting.cancel()
        with pytest.raises(DecodingStopped):
            waiting.result(PATIENCE)
        assert not first.done


def test_a_callback_or_decoding_that_raises_ends_alone() -> None:
    def refuse(round_: Round) -> None:
        if round_.index == 2:
            raise RuntimeError("the callback of one request")

    def fails() -> Steps[Any]:
        yield Compute(CPU, lambda: 1 / 0)

    with running() as thread:
        good = [thread.submit(steps_of(prompt(seed))) for seed in (1, 2)]
        bad = thread.submit(steps_of(prompt(3)), on_round=refuse)
        worse = thread.submit(fails())
        with pytest.raises(RuntimeError, match="the callback of one request"):
            bad.result(PATIENCE)
        with pytest.raises(ZeroDivisionError):
            worse.result(PATIENCE)
        with pytest.raises(ZeroDivisionError):
            list(worse)
        assert [decoding.result(PATIENCE) for decoding in good] == [tokens_alone(prompt(seed)) for seed in (1, 2)]


def test_what_can_never_fit_is_refused_at_once_with_both_numbers() -> None:
    with running(SchedulerLimits(max_rows=2, max_cache_tokens=100)) as thread:
        with pytest.raises(mmdec.InputError, match=r"`tokens` must be at most 100, .* but is 101"):
            thread.submit(steps_of(prompt(1)), tokens=101)
        with pytest.raises(mmdec.InputError, match="`rows` must be at most 2, but is 3"):
            thread.submit(steps_of(prompt(1)), rows=3)
        assert thread._thread is None


def test_waiting_decodings_start_by_priority() -> None:
    order, begun = list[str](), threading.Event()

    def marked(name: str) -> Steps[Any]:
        order.append(name)
        yield Compute(CPU, lambda: None)

    with running(SchedulerLimits(max_rows=1)) as thread:
        first = thread.submit(endless(begun))
        assert begun.wait(PATIENCE)
        given = (("job", Priority.JOB), ("chat", Priority.CHAT), ("later chat", Priority.CHAT))
        given += (("live", Priority.REALTIME),)
        waiting = [thread.submit(marked(name), priority=priority) for name, priority in given]
        first.cancel()
        for decoding in waiting:
            decoding.result(PATIENCE)
    assert order == ["live", "chat", "later chat", "job"]


def test_a_model_that_is_being_changed_holds_up_only_its_own_decodings() -> None:
    changed, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    def works() -> Steps[Any]:
        yield Compute(CPU, lambda: None)
        return "done"

    with running() as thread:
        with mmdec.model_lock(changed).write():
            waits, goes_on = thread.submit(works(), [changed]), thread.submit(works(), [other])
            assert goes_on.result(PATIENCE) == "done"
            assert not waits.done
        assert waits.result(PATIENCE) == "done"


def test_two_locks_taken_in_any_order_cannot_block_each_other() -> None:
    """A thread changes one model, then wants the other, which a decoding reads that would also read the first."""
    first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    begun, ends = threading.Event(), threading.Event()

    def reads() -> Steps[Any]:
        while not ends.is_set():
            yield Compute(CPU, begun.set)

    def no_pass() -> Steps[Any]:
        return "read"
        yield

    with running() as thread:
        for mine, theirs in ((first, second), (second, first)):
            begun.clear()
            ends.clear()
            reading = thread.submit(reads(), [theirs])
            assert begun.wait(PATIENCE)
            with mmdec.model_lock(mine).write():
                both = thread.submit(no_pass(), [mine, theirs])
                ends.set()
                reading.result(PATIENCE)
                with mmdec.model_lock(theirs).write():
                    assert not both.done
            assert both.result(PATIENCE) == "read"


def test_close_ends_running_and_waiting_decodings_with_an_error() -> None:
    thread, begun = SchedulerThread(SchedulerLimits(max_rows=1)), threading.Event()
    decodings = [thread.submit(endless(begun)), thread.submit(steps_of(prompt(1)))]
    assert begun.wait(PATIENCE)
    thread.close()
    for decoding in decodings:
        with pytest.raises(DecodingStopped, match="shuts down"):
            decoding.result(0)
    with pytest.raises(DecodingStopped, match="shuts down"):
        thread.submit(endless())
    thread.close()


def test_a_fault_of_the_scheduler_ends_the_decodings_not_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as thread:
        with monkeypatch.context() as patch:
            patch.setattr(thread._scheduler, "step", lambda: 1 / 0)
            decoding = thread.submit(endless())
            with pytest.raises(ZeroDivisionError):
                decoding.result(PATIENCE)
        assert thread.submit(steps_of(prompt(1))).result(PATIENCE) == tokens_alone(prompt(1))


@pytest.mark.parametrize("threads", [1, 3])
def test_torchs_threads_are_those_that_were_set(threads: int) -> None:
    def count() -> Steps[Any]:
        yield Compute(CPU, lambda: None)
        return torch.get_num_threads()

    before = torch.get_num_threads()
    with running(threads=threads) as thread:
        assert thread.submit(count()).result(PATIENCE) == threads
    assert torch.get_num_threads() == before
