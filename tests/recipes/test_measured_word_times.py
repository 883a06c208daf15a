"""Tests the errors of word timestamps, on known times."""

import pytest

from recipes.measure.word_times import measure, time_errors

KNOWN = [("Yes,", 0.5, 1.0), ("the", 1.0, 1.2), ("lamp", 2.0, 2.5)]


def test_words_are_paired_by_their_text() -> None:
    errors = time_errors([(" Yes", 0.6, 1.0), (" a", 1.0, 1.2), (" lamp.", 1.9, 3.5)], KNOWN)
    assert [(error.start, error.end) for error in errors] == [pytest.approx((0.1, 0.0)), pytest.approx((-0.1, 1.0))]
    assert [(error.after_pause, error.before_pause) for error in errors] == [(True, False), (True, True)]


def test_differences_of_word_times_are_measured() -> None:
    measured = measure(time_errors([(" yes", 0.6, 1.1), (" the", 1.1, 1.6), (" lamp", 2.0, 2.5)], KNOWN))
    assert measured["starts"] == pytest.approx({"words": 3, "median": 0.1, "late": 0.1, "far": 0.0})
    assert measured["ends"] == pytest.approx({"words": 3, "median": 0.1, "late": 0.1, "far": 1 / 3})
    assert measured["ends before a pause"]["words"] == 2
    assert measure([])["starts"] == {"words": 0}
