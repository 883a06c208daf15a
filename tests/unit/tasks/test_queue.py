"""Tests the order in which results of a list are reported."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from mmdec.tasks.queue import collect_in_order


@pytest.mark.parametrize("rejected", [(), (0,), (1,), (0, 1)])
def test_results_are_reported_in_order_past_rejected_inputs(rejected: tuple[int, ...]) -> None:
    errors, reported = dict[int, Exception](), list[int]()
    accepted = [index for index in range(3) if index not in rejected]

    def finished() -> Generator[dict[int, str]]:
        for index in (2, 0, 1):
            if index in rejected:
                errors[index] = ValueError()
            yield {} if index in rejected else {index: "text"}

    results = collect_in_order(finished(), range(3), lambda index, _: reported.append(index), errors)
    assert reported == accepted
    assert results == dict.fromkeys(accepted, "text")
