"""Rows of reports keep their direction: above 1 the subject is faster, whichever side the benchmark calls a."""

from __future__ import annotations

import pytest

from mmdec.evaluation.bench.pairing import comparison, comparisons, middle, turned
from tests.support.bench_findings import compared, paired


def test_runs_give_a_row_for_each_clock() -> None:
    rows = comparisons(compared(2.64, 2.18, 4.19), "medusa", "greedy", "40+ words", "length", size=40.0, unit="words")
    assert [row.timed for row in rows] == ["decoder", "wall clock"]
    assert [row.times for row in rows] == [2.64, 2.18]
    row = rows[0]
    assert (row.size, row.unit, row.kind, row.inputs, row.pairs) == (40.0, "words", "length", 4, 8)
    assert (row.subject_ms, row.baseline_ms, row.tokens_per_round) == (250.0, 660.0, 4.19)
    assert comparisons({"n": 0}, "eagle", "plain", "all", "all") == []  # nothing was timed


def test_pairs_are_turned() -> None:
    wrong = comparison(turned(paired(1.1)), "always wrong", "plain generate", "2M", "all", "wall clock")
    assert wrong.times == pytest.approx(1 / 1.1)
    assert wrong.low == pytest.approx(1 / (1.25 * 1.1))
    assert wrong.high == pytest.approx(1 / (0.9 * 1.1))
    assert (wrong.subject_ms, wrong.baseline_ms, wrong.pairs) == (11.0, 10.0, 5)


@pytest.mark.parametrize(
    ("group", "size"),
    [("11-20 words", 15.5), ("1-8 tokens", 4.5), ("40+ words", 40.0), ("all", None), ("task 7", None)],
)
def test_a_group_of_lengths_has_a_middle(group: str, size: float | None) -> None:
    assert middle(group) == size
