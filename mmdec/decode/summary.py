"""A result in three lines, as `print` shows it: what came out, in how many rounds, in how many seconds. No torch."""

from __future__ import annotations

from collections.abc import Mapping


def three_lines(what: str, rounds: str, seconds: Mapping[str, float]) -> str:
    """what: the text, or how much there is of it. rounds: see `rounds_line`. seconds: of each stage; "total" may be
    among them, and holds the rest, too."""
    stages = ", ".join(f"{name} {value:.3f}" for name, value in seconds.items() if name != "total")
    total = seconds.get("total", sum(seconds.values()))
    return f"{' '.join(what.split()) or '(no text)'}\n{rounds}\n{total:.3f} s: {stages}"


def rounds_line(rounds: int, tokens_per_round: float, lossless: bool) -> str:
    """Of what a model decoded with drafts."""
    return f"{counted(rounds, 'round')}, {tokens_per_round:.2f} tokens a round{'' if lossless else ', LOSSY'}"


def counted(number: int, noun: str) -> str:
    """1 row, 2 rows."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
