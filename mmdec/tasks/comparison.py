"""Compares two ways of decoding the same input in words: the speedup, and whether the outputs are equal."""

from __future__ import annotations

SAME_SPEED_TOLERANCE = 0.05  # times that differ by less than 5 % are called "as fast"


def speedup_words(seconds: float, baseline: float) -> str:
    """Compare a time with a baseline's in words: "2.9 times faster", "1.3 times slower" or "as fast"."""
    if not seconds > 0.0 or not baseline > 0.0:
        return "as fast"
    ratio = baseline / seconds
    if 1 / (1 + SAME_SPEED_TOLERANCE) < ratio < 1 + SAME_SPEED_TOLERANCE:
        return "as fast"
    times, word = (ratio, "faster") if ratio > 1 else (1 / ratio, "slower")
    return f"{times:.1f} times {word}" if times < 10 else f"{times:.0f} times {word}"


def comparison_words(seconds: float, baseline: float, same: bool, output: str = "text") -> str:
    """Compare the two ways of decoding in words, such as "2.9 times faster, same text".

    Args:
        seconds: Time with drafts.
        baseline: Time without drafts.
        same: Whether both outputs are equal.
        output: The word for the output.
    """
    return f"{speedup_words(seconds, baseline)}, {'same' if same else 'not the same'} {output}"
