"""Tests the lock of a model: which calls may use a model at the same time, and that it is freed however a call ends."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mmdec
from mmdec.errors import InputError
from mmdec.generation.model_lock import ModelLock, model_lock, read_while, reading
from mmdec.whisper.checkpoint import LoadedWhisper
from tests.conftest import RATE, buzz
from tests.support.tiny_text import llama
from tests.support.tiny_whisper import network, processor

IDS = torch.tensor([[3, 4, 5, 6] * 3])
OPTIONS: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False}
SOON = 20  # seconds that a test waits at most


def started(call: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def free(model: torch.nn.Module) -> bool:
    """Whether another thread may change the model now."""
    changed = threading.Event()

    def change() -> None:
        with model_lock(model).write():
            changed.set()

    thread = started(change)
    waited = not changed.wait(0.1)
    if waited:  # the thread still waits; it ends when the test releases the lock
        return False
    thread.join(SOON)
    return True


def test_a_waiting_writer_goes_before_later_readers() -> None:
    lock, order = ModelLock(0), list[str]()
    inside, leave = threading.Event(), threading.Event()

    def write() -> None:
        with lock.write():
            inside.set()
            assert leave.wait(SOON)
            order.append("write")

    def read() -> None:
        with lock.read():
            order.append("read")

    with lock.read(), lock.read():
        first = started(write)
        while not lock.waiting:
            time.sleep(0.001)
        later = started(read)
        assert not inside.wait(0.05)
    assert inside.wait(SOON)
    assert order == []
    leave.set()
    first.join(SOON)
    later.join(SOON)
    assert order == ["write", "read"]


def test_a_thread_does_not_wait_for_itself() -> None:
    model = torch.nn.Linear(1, 1)
    lock = model_lock(model)
    with lock.write(), lock.read(), lock.write():
        pass
    with lock.read():
        waiting = started(lambda: free(model))
        while not lock.waiting:
            time.sleep(0.001)
        with lock.read():  # although somebody waits to write
            pass
        with (
            pytest.raises(InputError, match="`model` must not be changed while the same thread decodes with it"),
            lock.write(),
        ):
            pass
    waiting.join(SOON)
    assert free(model)


def test_models_are_locked_in_one_order() -> None:
    """Two calls that need the same models, one of them to write, never wait for each other."""
    one, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)

    def call(models: Any, writing: Any) -> None:
        for _ in range(200):
            with reading(*models, writing=writing):
                pass

    calls = [((one, other), ()), ((other, one), ()), ((one,), [other]), ((other,), [one]), ((one, one), [one])]
    threads = [started(lambda given=given: call(*given)) for given in calls]
    for thread in threads:
        thread.join(SOON)
        assert not thread.is_alive()


def test_each_model_has_its_own_lock() -> None:
    one, other = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    assert model_lock(one) is model_lock(one) is not model_lock(other)
    with model_lock(one).read():
        assert free(other)
        assert not free(one)


@pytest.mark.parametrize("leave", ["end", "close", "drop", "drop elsewhere", "drop a cycle", "error"])
def test_a_stream_reads_its_model_until_it_is_left(leave: str) -> None:
    model = llama()
    plain = [round_.tokens for round_ in mmdec.stream(model, IDS, **OPTIONS)]
    rounds: Any = mmdec.stream(model, IDS, **OPTIONS)
    assert free(model)  # nothing has been asked for
    result = [next(rounds).tokens]
    assert not free(model)
    if leave == "end":
        result += [round_.tokens for round_ in rounds]
        assert [token for tokens in result for token in tokens[0]] == [token for tokens in plain for token in tokens[0]]
    elif leave == "close":
        rounds.close()
    elif leave == "drop":
        del rounds
    elif leave == "drop elsewhere":
        held = [rounds]
        del rounds
        started(held.clear).join(SOON)
    elif leave == "drop a cycle":
        cycle: list[Any] = [rounds]
        cycle.append(cycle)
        del rounds, cycle
        started(gc.collect).join(SOON)
    else:
        with pytest.raises(KeyError):
            rounds.throw(KeyError("mine"))
    assert free(model)


def test_another_thread_may_continue_a_stream() -> None:
    """A writer waits; the thread that has the stream now must get at the model, or both would wait for ever."""
    model = llama()
    rounds, done = mmdec.stream(model, IDS, **OPTIONS), threading.Event()
    next(rounds)

    def go_on() -> None:
        next(rounds)
        waiting = started(lambda: free(model))
        while not model_lock(model).waiting:
            time.sleep(0.001)
        mmdec.generate(model, IDS, **OPTIONS)
        for _ in rounds:
            pass
        waiting.join(SOON)
        done.set()

    started(go_on).join(SOON)
    assert done.is_set()
    assert free(model)


def test_a_failed_generator_releases_its_lock() -> None:
    model = torch.nn.Linear(1, 1)

    def items() -> Iterator[int]:
        yield 1
        raise KeyError("mine")

    result = read_while([model], items())
    assert next(result) == 1
    assert not free(model)
    with pytest.raises(KeyError):
        next(result)
    assert free(model)


@pytest.mark.parametrize("entry_point", ["generate", "custom_generate", "transcribe", "translate_speech"])
def test_every_call_reads_its_model_and_its_drafters(entry_point: str, tiny_model: Path) -> None:
    """No model is changed between two rounds of any call."""
    seen: list[list[bool]] = []

    class Watching(torch.nn.Module):
        """A network that looks whether others might change these now."""

        def __call__(self, *_: Any) -> None:
            if not seen:
                seen.append([free(model) for model in models])

    models: list[Any]
    if entry_point == "transcribe":
        whole = processor()
        whisper = LoadedWhisper(network(whole.tokenizer), whole)  # type: ignore[attr-defined]
        models = [whisper.model]
        handle = whisper.model.model.decoder.register_forward_hook(Watching())
        mmdec.transcribe(buzz(0.5), sample_rate=RATE, model=whisper, drafter="lookup", max_new_tokens=4)
    elif entry_point == "translate_speech":
        translator = mmdec.load(tiny_model, "cpu")
        models = [translator.model, translator.vocoder]
        handle = translator.model.encoder.register_forward_hook(Watching())
        mmdec.translate_speech(buzz(0.5), sample_rate=RATE, model=translator, strategy="verified")
    else:
        model, small = llama(), llama(1)
        models = [model, small]
        handle = model.register_forward_hook(Watching())
        if entry_point == "generate":
            mmdec.generate(model, IDS, small, **OPTIONS)
        else:
            plug = mmdec.speculate(small, on_round=lambda _: Watching()())
            handle.remove()
            model.generate(IDS, custom_generate=plug, **OPTIONS)
    handle.remove()
    assert seen == [[False] * len(models)]
    assert all(map(free, models))


@pytest.mark.parametrize("replaced", [False, True])
def test_word_timestamps_leave_a_plain_call_of_generate_alone(replaced: bool) -> None:
    """`model.generate(custom_generate=...)` decodes while `transcribe` reads maps of the same model's attention.

    It reads them from a twin of the decoder, and waits for nobody. If a `forward` was replaced, which a twin would not
    run, it changes the model's own attention, and waits until nobody decodes.
    """
    whole = processor()
    whisper = LoadedWhisper(network(whole.tokenizer), whole)  # type: ignore[attr-defined]
    if replaced:
        layer = whisper.model.model.decoder.layers[0]
        layer.forward = layer.forward
    features = whole.feature_extractor(buzz(0.5), sampling_rate=RATE, return_tensors="pt")  # type: ignore[attr-defined]
    begun, go, seen, timed = threading.Event(), threading.Event(), list[str](), list[Any]()

    def hold(_: Any) -> None:
        begun.set()
        assert go.wait(SOON)
        seen.append(whisper.model.config._attn_implementation)

    def plain() -> None:
        plug = mmdec.speculate("lookup", on_round=hold)
        whisper.model.generate(features.input_features, custom_generate=plug, max_new_tokens=4, max_length=None)

    def words() -> None:
        given: dict[str, Any] = {"drafter": None, "timestamps": "word", "max_new_tokens": 4}
        timed.append(mmdec.transcribe(buzz(0.5), sample_rate=RATE, model=whisper, **given))

    first = started(plain)
    try:
        assert begun.wait(SOON)
        second = started(words)
        second.join(0.3 if replaced else SOON)
        assert second.is_alive() == replaced
        assert len(timed) == (not replaced)
        assert whisper.model.config._attn_implementation == "sdpa"
    finally:
        go.set()  # also where a check fails: a thread that waits on would fail in a later test
    first.join(SOON)
    second.join(SOON)
    assert len(timed) == 1
    assert set(seen) == {"sdpa"}
    assert whisper.model.config._attn_implementation == "sdpa"
