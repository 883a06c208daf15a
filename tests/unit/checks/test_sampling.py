"""Tests the sample of a list: evenly spaced, in order."""

from __future__ import annotations

from mmdec.checks.sampling import evenly_spaced


def test_a_sample_is_evenly_spaced_and_in_order() -> None:
    assert evenly_spaced(range(10), 4) == [0, 2, 5, 7]
    assert evenly_spaced(range(10), 0) == []


def test_evenly_spaced_gives_all_rows_if_there_are_too_few() -> None:
    assert evenly_spaced(range(3), None) == evenly_spaced(range(3), 3) == evenly_spaced(range(3), 9) == [0, 1, 2]
