"""Tests the direction of ratios in reports: above 1 the subject is faster, for both orders of the methods."""

from __future__ import annotations

import pytest

from mmdec.bench.pairing import Group, MethodTimings, length_groups, task_groups
from tests.support.bench_reports import compared, measurement


def test_runs_give_a_row_for_each_clock() -> None:
    rows = compared("medusa", "greedy", "40+ words", "length", 2.64, 2.18, 4.19, size=40.0, unit="words")
    assert [row.timed for row in rows] == ["CPU time", "wall clock"]
    assert [row.times for row in rows] == pytest.approx([2.64, 2.18])
    row = rows[0]
    assert (row.size, row.unit, row.kind, row.inputs, row.pairs) == (40.0, "words", "length", 4, 8)
    assert (row.subject_ms, row.baseline_ms, row.tokens_per_round) == pytest.approx((250.0, 660.0, 4.19))


def test_inputs_where_the_baseline_differs_are_left_out() -> None:
    ours, theirs = [measurement(1.0, 1.0, 3, 6)], [measurement(2.0, 4.0)]
    wrong = [measurement(9.0, 9.0)]
    result = MethodTimings({"a": [ours, ours], "b": [theirs, wrong]}, {"b": [True, False]})
    assert [(row.timed, row.times, row.inputs) for row in result.rows("a", "b", Group("all", "all", [0, 1]))] == [
        ("CPU time", 2.0, 1),
        ("wall clock", 4.0, 1),
    ]
    assert result.rows("a", "b", Group("second", "all", [1])) == []


def test_inputs_are_grouped_by_length_and_by_task() -> None:
    groups = length_groups([1, 8, 11, 90, 9], ((1, 8), (9, 39), (40, 100)), "tokens")
    assert [(group.name, group.size, group.indices) for group in groups] == [
        ("1-8 tokens", 4.5, [0, 1]),
        ("9-39 tokens", 24.0, [2, 4]),
        ("40+ tokens", 40.0, [3]),
    ]
    groups = task_groups(["b", "a", "b"])
    assert [(group.name, group.kind, [*group.indices]) for group in groups] == [
        ("all", "all", [0, 1, 2]),
        ("task a", "task", [1]),
        ("task b", "task", [0, 2]),
    ]
