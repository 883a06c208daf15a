"""Tests the order in which results of a list are reported."""

from __future__ import annotations

from typing import Any

import pytest

from mmdec.tasks.queue import ordered_reporter


@pytest.mark.parametrize("rejected", [(), (0,), (1,), (0, 1)])
def test_results_are_reported_in_order_past_rejected_inputs(rejected: tuple[int, ...]) -> None:
    results, errors, reported = dict[int, Any](), dict[int, Exception](), list[int]()
    report = ordered_reporter(range(3), results, lambda index, _: reported.append(index), errors)
    for index in (2, 0, 1):
        if index in rejected:
            errors[index] = ValueError()
        else:
            results[index] = "text"
        report()
    assert reported == [index for index in range(3) if index not in rejected]
