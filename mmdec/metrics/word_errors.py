"""Word and character errors of transcripts, with intervals. Text in, figures out; jiwer aligns (extra `mmdec[eval]`).

A corpus's rate is a ratio of sums: errors over the reference's words. Its 95 % interval is the percentile bootstrap
over utterances (Bisani and Ney, ICASSP 2004), for the words of one are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmdec.metrics.text import extra

DRAWS = 2000
SEED = 0


@dataclass(frozen=True)
class Edits:
    """What turns a reference into a hypothesis."""

    substitutions: int
    deletions: int  # of the reference
    insertions: int
    length: int  # of the reference

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions


def word_edits(reference: str, hypothesis: str) -> Edits:
    """Fewest edits between two texts, word by word as blanks part them. The texts are compared as they are."""
    return _edits("process_words", " ".join(reference.split()), " ".join(hypothesis.split()), str.split)


def character_edits(reference: str, hypothesis: str) -> Edits:
    """Fewest edits between two texts, blanks between words included."""
    return _edits("process_characters", " ".join(reference.split()), " ".join(hypothesis.split()), list)


def rate(edits: Sequence[Edits]) -> dict[str, float | int | None]:
    """A JSON object over utterances: value, low, high, substitutions, deletions, insertions, length. The rate is null
    where the references are empty."""
    value, low, high = ratio([one.errors for one in edits], [one.length for one in edits])
    return {
        "value": _known(value),
        "low": _known(low),
        "high": _known(high),
        "substitutions": sum(one.substitutions for one in edits),
        "deletions": sum(one.deletions for one in edits),
        "insertions": sum(one.insertions for one in edits),
        "length": sum(one.length for one in edits),
    }


def ratio(tops: Sequence[float], bottoms: Sequence[float]) -> tuple[float, float, float]:
    """Sum over sum, and its 95 % interval where the pairs are drawn anew. NaN where the bottoms sum up to nothing."""
    top, bottom = np.asarray(tops, np.float64), np.asarray(bottoms, np.float64)
    if bottom.sum() <= 0:
        return math.nan, math.nan, math.nan
    value = float(top.sum() / bottom.sum())
    draws = np.random.default_rng(SEED).multinomial(len(top), np.full(len(top), 1 / len(top)), DRAWS)
    below = draws @ bottom
    low, high = np.quantile((draws @ top)[below > 0] / below[below > 0], (0.025, 0.975))
    return value, float(low), float(high)


def _edits(process: str, reference: str, hypothesis: str, parts: Any) -> Edits:
    if not reference:  # jiwer has no rate for it
        return Edits(0, 0, len(parts(hypothesis)), 0)
    found = getattr(extra("jiwer"), process)(reference, hypothesis)
    return Edits(found.substitutions, found.deletions, found.insertions, len(parts(reference)))


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
