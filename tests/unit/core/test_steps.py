"""Tests reading a decoding round by round: passes are relayed, and only the decoding's own seconds count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmdec.core.steps import ActiveTime, Compute, PassResult, Steps
from mmdec.types import Round

CPU = torch.device("cpu")


def test_rounds_are_read_in_a_loop_and_passes_relayed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now)

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds

    def decoding() -> Steps[None]:
        for index in range(2):
            work(1.0)
            answer: Any = yield Compute(CPU, lambda: None)
            work(10.0)
            yield Round(index, [0], tokens=[[answer.value]], drafted=[0], accepted=[0], done=[index == 1])

    def reading() -> Steps[tuple[list[int], float]]:
        time, steps, tokens = ActiveTime(CPU), decoding(), list[int]()
        while (round_ := (yield from time.next_round(steps))) is not None:
            tokens += round_.tokens[0]
            work(100.0)
            yield from time.wait(round_)
        return tokens, time.seconds

    steps, answers, kinds = reading(), iter((7, 8)), list[type]()
    result: PassResult | None = None
    while True:
        try:
            step = steps.send(result)
        except StopIteration as end:
            tokens, seconds = end.value
            break
        kinds.append(type(step))
        work(1000.0)  # other decodings, and the pass
        result = PassResult(next(answers), 1000.0, 1000.0) if isinstance(step, Compute) else None
    assert kinds == [Compute, Round, Compute, Round]
    assert tokens == [7, 8]
    assert seconds == 2 * 111.0
