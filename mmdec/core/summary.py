"""Formats a result as the three lines that `print` shows: output, rounds, seconds. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping

RAISE_LENGTH = "; set `max_new_tokens`"  # the end of a note on a text that was cut: what the caller can do


def format_result(output: str, rounds: str, seconds: Mapping[str, float]) -> str:
    """Format a result as three lines, the third one with the stages' seconds.

    Args:
        output: The first line: the text, or its length.
        rounds: The second line, as `rounds_line` returns it.
        seconds: Stage -> seconds; "total", if present, also includes time outside the stages.
    """
    stages = ", ".join(f"{name} {value:.3f}" for name, value in seconds.items() if name != "total")
    total = seconds.get("total", sum(seconds.values()))
    return f"{' '.join(output.split()) or '(no text)'}\n{rounds}\n{total:.3f} s: {stages}"


def rounds_line(rounds: int, tokens_per_round: float, lossless: bool) -> str:
    """Return a result's second line: rounds, tokens per round, and "LOSSY" if decoding was not lossless."""
    return f"{pluralise(rounds, 'round')}, {tokens_per_round:.2f} tokens per round{'' if lossless else ', LOSSY'}"


def cut_note(tokens: int, raisable: bool = True) -> str:
    """Return the note on a text that was cut after this number of tokens; "" for 0: it was not cut.

    Args:
        raisable: Whether the model could write more.
    """
    remedy = RAISE_LENGTH if raisable else ", the model's maximum"
    return f"cut at {pluralise(tokens, 'token')}{remedy}" if tokens else ""


def pluralise(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: "1 row", "2 rows".

    Args:
        plural: The noun's plural; None: the noun with "s".
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
