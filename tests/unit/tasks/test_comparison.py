"""Tests the sentence that compares two times."""

from __future__ import annotations

import pytest

from mmdec.tasks.comparison import comparison_words, speedup_words


@pytest.mark.parametrize(
    ("seconds", "baseline", "words"),
    [
        (1.0, 2.9, "2.9 times faster"),
        (0.1, 1.26, "13 times faster"),
        (1.3, 1.0, "1.3 times slower"),
        (1.0, 1.04, "as fast"),
        (1.04, 1.0, "as fast"),
        (0.0, 1.0, "as fast"),
        (1.0, 0.0, "as fast"),
    ],
)
def test_the_speedup_is_the_ratio_of_seconds(seconds: float, baseline: float, words: str) -> None:
    assert speedup_words(seconds, baseline) == words


def test_a_verdict_names_equality_and_speed() -> None:
    assert comparison_words(1.0, 2.9, True) == "2.9 times faster, same text"
    assert comparison_words(1.0, 2.9, False, "phones") == "2.9 times faster, not the same phones"
