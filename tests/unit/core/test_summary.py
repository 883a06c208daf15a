"""Tests a result's `str`, which has three lines, and its `repr`, which shows the fields."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import mmdec
from mmdec.core.summary import format_result
from mmdec.types import Round

ROUNDS = [
    Round(0, [0, 1], [[5], [6]], [0, 0], [0, 0], [False, False], 0.5, 0.0, 0.25),
    Round(1, [0, 1], [[7, 8, 9], [4, 2]], [2, 2], [2, 1], [True, True], 1.0, 0.125, 0.125),
]
STEPS = ("target 1.500, drafter 0.125, core 0.375", "target 0.000, drafter 0.000, core 0.000")
COST: dict[str, Any] = {"tokens": [1, 2], "rounds": 3, "tokens_per_round": 2.5}
STAGES = {"decoder": 0.25, "drafter": 0.125}


@pytest.mark.parametrize(
    ("result", "lines"),
    [
        (
            mmdec.Generation(torch.zeros(2, 9, dtype=torch.long), ROUNDS, True),
            [
                "2 rows, 7 new tokens",
                "2 rounds, 2.50 tokens per round",
                f"2.000 s: {STEPS[0]}",
            ],
        ),
        (
            mmdec.Generation(torch.zeros(1, 9, dtype=torch.long), [Round(0, [0], [[5]], [0], [0], [True])], False),
            [
                "1 row, 1 new token",
                "1 round, 1.00 tokens per round, LOSSY",
                f"0.000 s: {STEPS[1]}",
            ],
        ),
        (
            mmdec.Transcript("Good\nmorning.", "en", [], timings={**STAGES, "total": 0.5}, **COST),
            ["Good morning.", "3 rounds, 2.50 tokens per round", "0.500 s: decoder 0.250, drafter 0.125"],
        ),
        (
            mmdec.Description("", timings={**STAGES, "total": 0.5}, lossless=False, **COST),
            ["(no text)", "3 rounds, 2.50 tokens per round, LOSSY", "0.500 s: decoder 0.250, drafter 0.125"],
        ),
        (
            mmdec.Translation("Hello.", np.zeros(9, np.float32), 16_000, ["HH", "L"], STAGES),
            ["Hello.", "1 pass, 2.00 units a pass", "0.375 s: decoder 0.250, drafter 0.125"],
        ),
    ],
)
def test_a_summary_is_printed(result: Any, lines: list[str]) -> None:
    assert str(result).splitlines() == lines
    assert repr(result).startswith(f"{type(result).__name__}(")


def test_the_summary_of_a_translation_without_passes_shows_zeros() -> None:
    silent = mmdec.Translation("", np.zeros(9, np.float32), 16_000, [], {}, passes=0)
    assert str(silent) == format_result("", "0 passes, 0.00 units a pass", {})
