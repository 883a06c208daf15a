"""Tests that a command gives its list to one call, and reports each result as soon as the call has it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmdec import BatchError, InputError
from mmdec.cli.outcomes import decode_all
from mmdec.jobs.many import divide_by_bytes

OnResult = Callable[[int, Any], None]


def result(name: str, confidence: float | None = 0.9) -> SimpleNamespace:
    return SimpleNamespace(name=name, confidence=confidence)


class Reports(dict[int, Any]):
    """What was reported of each input."""

    def __call__(self, index: int, outcome: Any) -> None:
        assert index not in self
        self[index] = outcome if isinstance(outcome, str) else outcome.name


def test_refused_inputs_are_reported_with_their_reasons() -> None:
    reports, calls = Reports(), list[list[str]]()

    def call(inputs: list[str], on_result: OnResult) -> None:
        calls.append(inputs)
        on_result(0, result("A"))
        assert reports == {0: "A"}  # at once
        on_result(2, result("C", confidence=0.1))
        on_result(3, result("D", confidence=None))
        raise BatchError([None] * 4, {1: InputError("too short"), 2: InputError("unsure")})

    decode_all(["a", "b", "c", "d"], call, reports, min_confidence=0.5)
    assert calls == [["a", "b", "c", "d"]]
    assert reports == {0: "A", 1: "too short", 2: "unsure", 3: "D"}


def test_after_a_failure_the_rest_is_decoded_one_by_one() -> None:
    reports, calls = Reports(), list[list[str]]()

    def call(inputs: list[str], on_result: OnResult) -> list[SimpleNamespace]:
        calls.append(inputs)
        if len(inputs) > 1:
            on_result(0, result("A"))
        if "b" in inputs:
            raise RuntimeError("b breaks it")
        return [result(name.upper()) for name in inputs]

    decode_all(["a", "b", "c"], call, reports)
    assert calls == [["a", "b", "c"], ["b"], ["c"]]
    assert reports[0] == "A"
    assert "b breaks it" in reports[1]
    assert reports[2] == "C"


def test_a_failed_calls_memory_is_free_before_the_rest_is_decoded() -> None:
    held = list[weakref.ref[Reports]]()

    def call(inputs: list[str], on_result: OnResult) -> list[SimpleNamespace]:
        if len(inputs) > 1:
            cache = Reports()
            held.append(weakref.ref(cache))
            raise MemoryError(f"no room beside {len(cache)}")
        assert held[0]() is None
        return [result(inputs[0].upper())]

    reports = Reports()
    decode_all(["a", "b"], call, reports)
    assert reports == {0: "A", 1: "B"}


def test_a_wrong_argument_ends_the_command() -> None:
    def call(inputs: list[str], on_result: OnResult) -> None:
        raise InputError("no such option")

    with pytest.raises(InputError, match="no such option"):
        decode_all(["a", "b"], call, Reports())


def test_output_that_cannot_be_written_is_no_inputs_fault() -> None:
    calls = list[list[str]]()

    def report(index: int, outcome: Any) -> None:
        raise BrokenPipeError

    def call(inputs: list[str], on_result: OnResult) -> None:
        calls.append(inputs)
        on_result(0, result("A"))

    with pytest.raises(BrokenPipeError):
        decode_all(["a", "b"], call, report)
    assert calls == [["a", "b"]]


def test_recordings_that_do_not_fit_into_memory_are_several_calls(tmp_path: Path) -> None:
    paths = [tmp_path / f"{index}.wav" for index in range(8)]
    for path, size in zip(paths, (90, 90, 90, 5, 5, 5, 5, 5), strict=True):
        path.write_bytes(bytes(size))
    batches = list(divide_by_bytes(paths, lambda path: path, 100, min_inputs=2))
    assert [len(batch) for batch in batches] == [2, 3, 3]
    assert [path for batch in batches for path in batch] == paths
    assert list(divide_by_bytes([], lambda path: path, 100)) == []
