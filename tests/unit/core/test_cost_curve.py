"""Tests the cost curve: it is monotone, needs enough timings, and extrapolates carefully."""

from __future__ import annotations

import pytest

from mmdec.core.statistics import MAX_BUCKET_TIMINGS, CostCurve


def curve_of(*timings: tuple[int, float], slope: float = 1.0, origin: bool = False, enough: int = 1) -> CostCurve:
    """Fit a curve to counts and their seconds."""
    curve = CostCurve(slope, origin, enough)
    for count, seconds in timings:
        curve.add(count, seconds)
    return curve


def test_curve_is_monotone_and_needs_more_than_one_timing() -> None:
    curve = CostCurve(0.5, False, 3)
    for seconds in (1.0, 9.0, 1.1, 1.0):
        curve.add(1, seconds)
    curve.add(4, 7.0)
    assert curve.at(4) == 1.0  # timed once: not believed
    assert curve.pessimistic_estimate(4) == 7.0
    curve.add(4, 2.0)
    curve.add(4, 2.0)
    assert curve.at(4) == 2.0
    assert curve.at(2) == pytest.approx(1 + 1 / 3)
    assert curve.at(7) == pytest.approx(2.5)  # half the last slope
    for _ in range(3):
        curve.add(8, 1.5)
    assert [curve.at(count) for count in (4, 8)] == [1.5, 1.5]  # more columns cannot take less


def test_nothing_is_known_at_first() -> None:
    curve = curve_of()
    assert (curve.at(5), curve.pessimistic_estimate(5), curve.samples(5), curve.timed, curve.max_timed) == (
        0.0,
        0.0,
        0,
        0,
        0,
    )


def test_between_the_points_and_beyond_them_the_curve_is_straight() -> None:
    timings = (1, 1.0), (4, 4.0)
    assert [curve_of(*timings).at(count) for count in (0, 1, 2, 3, 8)] == pytest.approx([1, 1, 2, 3, 8])
    assert curve_of(*timings, slope=0.5).at(8) == pytest.approx(6)
    assert curve_of((4, 4.0), origin=True).at(2) == pytest.approx(2)  # nothing takes no time


def test_one_slow_timing_in_four_does_not_change_the_cost() -> None:
    assert curve_of((1, 1.0), (1, 1.0), (1, 1.0), (1, 40.0)).at(1) == 1.0


def test_old_timings_are_forgotten() -> None:
    curve = curve_of(*[(1, 1.0)] * MAX_BUCKET_TIMINGS, *[(1, 3.0)] * MAX_BUCKET_TIMINGS)
    assert curve.at(1) == 3.0
    assert curve.samples(1) == MAX_BUCKET_TIMINGS
    assert curve.timed == 2 * MAX_BUCKET_TIMINGS


@pytest.mark.parametrize(
    ("count", "seconds"),
    [(4, 8.0), (16, 16.0), (1, 1.0)],  # its own; four times the largest timed, by the root; its own
)
def test_untimed_sizes_cost_more_by_the_root_of_their_ratio(count: int, seconds: float) -> None:
    curve = curve_of((1, 1.0), (1, 1.0), (4, 8.0), enough=2)
    assert curve.at(count) == 1.0  # one timing of four is not believed
    assert curve.pessimistic_estimate(count) == pytest.approx(seconds)


def test_a_slow_first_pass_is_capped_by_as_many_plain_ones() -> None:
    curve = curve_of((4, 100.0))
    assert curve.capped_estimate(4, 1.0) == 4.0
    assert curve.capped_estimate(4, 50.0) == 100.0
