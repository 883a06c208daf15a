"""`mmdec.transcribe` in several threads with one model."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from transformers.utils import logging as hf_logging

from mmdec.generation.model_lock import model_lock
from mmdec.whisper.checkpoint import LoadedWhisper
from tests.conftest import RATE, buzz
from tests.unit.whisper.short_transcripts import transcribe


def until(happened: Callable[[], bool]) -> None:
    """Wait for another thread. What is asserted is that it happened, not when."""
    for _ in range(20_000):
        if happened():
            return
        time.sleep(0.001)
    raise AssertionError("it never happened")


def test_word_timestamps_leave_other_threads_alone(whisper: LoadedWhisper) -> None:
    """They read the maps of a decoder of their own, so a call for words runs beside one that is in the model."""
    alone = [transcribe(model=whisper, language="en", timestamps=kind) for kind in ("word", None)]
    together = list[Any]()

    def hold(done: float, whole: float) -> None:
        if not together:
            thread = threading.Thread(target=words)
            thread.start()
            thread.join(20)

    def words() -> None:
        together.append(transcribe(model=whisper, language="en", timestamps="word"))
        assert whisper.model.config._attn_implementation == "sdpa"

    together.append(transcribe(model=whisper, language="en", progress=hold))
    assert [transcript.segments for transcript in together] == [transcript.segments for transcript in alone]
    assert [transcript.tokens for transcript in together] == [transcript.tokens for transcript in alone]


def test_replacing_forward_waits_for_other_readers(loose: LoadedWhisper) -> None:
    """Readers use the model's own attention, which is changed here; a mask made for one kind is wrong for the other."""
    layer: Any = loose.model.model.decoder.layers[0].fc1
    layer.forward = layer.forward
    whisper = loose
    begun, go, order = threading.Event(), threading.Event(), list[str]()

    def hold(done: float, whole: float) -> None:
        begun.set()
        assert go.wait(20)

    def call(name: str, **options: Any) -> None:
        transcribe(model=whisper, language="en", **options)
        order.append(name)

    plain = threading.Thread(target=call, args=("plain",), kwargs={"progress": hold})
    timed = threading.Thread(target=call, args=("words",), kwargs={"timestamps": "word"})
    plain.start()
    assert begun.wait(20)
    timed.start()
    until(lambda: model_lock(whisper.model).waiting == 1)  # it has come to the entry point
    assert timed.is_alive()
    assert order == []
    assert whisper.model.config._attn_implementation == "sdpa"
    go.set()
    plain.join(20)
    timed.join(20)
    assert sorted(order) == ["plain", "words"]
    assert whisper.model.config._attn_implementation == "sdpa"


def test_transformers_own_arguments_raise_no_warning(whisper: LoadedWhisper) -> None:
    """Recordings over a window, in two threads at once: no warning of deprecated arguments, no trace on the model."""
    heard = list[str]()

    class LogCounter(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logger, counter = logging.getLogger("transformers.generation.utils"), LogCounter()
    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_warning()  # whatever ran before
    logger.addHandler(counter)
    try:
        for call in (transcribe, whisper.model.generate):  # the second shows that there is something to hear
            type(logger).warning_once.cache_clear()  # type: ignore[attr-defined] # transformers', else once a process
            if call is transcribe:
                threads = [
                    threading.Thread(target=call, args=(buzz(2.5),), kwargs={"model": whisper}) for _ in range(2)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(60)
                assert heard == []
                assert "_prepare_generation_config" not in vars(whisper.model)
            else:
                features = whisper.processor(buzz(0.5), sampling_rate=RATE, return_tensors="pt").input_features
                call(features, max_new_tokens=2, language="en")
    finally:
        logger.removeHandler(counter)
        hf_logging.set_verbosity(level)
    assert any("suppress_tokens" in line for line in heard)
