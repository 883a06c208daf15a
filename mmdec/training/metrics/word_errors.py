"""Word and character error rates of transcripts, with intervals. jiwer aligns them (extra `mmdec[eval]`).

A corpus's rate is a ratio of sums: errors over reference words. Its 95 % interval is the percentile bootstrap over
utterances (Bisani and Ney, ICASSP 2004), since words of one utterance are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmdec.training.metrics.text import extra

DRAWS = 2000
SEED = 0


@dataclass(frozen=True)
class Edits:
    """The edits that turn a reference into a hypothesis."""

    substitutions: int
    deletions: int  # missing words or characters of the reference
    insertions: int
    length: int  # number of words or characters in the reference

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions


def word_edits(reference: str, hypothesis: str) -> Edits:
    """The fewest word edits from a reference to a hypothesis; split at white space, not normalised."""
    return _edits("process_words", " ".join(reference.split()), " ".join(hypothesis.split()), str.split)


def character_edits(reference: str, hypothesis: str) -> Edits:
    """The smallest character edits that turn a reference into a hypothesis, spaces between words included."""
    return _edits("process_characters", " ".join(reference.split()), " ".join(hypothesis.split()), list)


def rate(edits: Sequence[Edits]) -> dict[str, float | int | None]:
    """The error rate over utterances, a JSON object: value, low, high, substitutions, deletions, insertions, length.
    value, low and high are None if all references are empty."""
    value, low, high = ratio([edit.errors for edit in edits], [edit.length for edit in edits])
    return {
        "value": _none_if_nan(value),
        "low": _none_if_nan(low),
        "high": _none_if_nan(high),
        "substitutions": sum(edit.substitutions for edit in edits),
        "deletions": sum(edit.deletions for edit in edits),
        "insertions": sum(edit.insertions for edit in edits),
        "length": sum(edit.length for edit in edits),
    }


def ratio(tops: Sequence[float], bottoms: Sequence[float]) -> tuple[float, float, float]:
    """The ratio of two sums, and its 95 % bootstrap interval over pairs; NaN if `bottoms` sum to 0."""
    top, bottom = np.asarray(tops, np.float64), np.asarray(bottoms, np.float64)
    if bottom.sum() <= 0:
        return math.nan, math.nan, math.nan
    value = float(top.sum() / bottom.sum())
    draws = np.random.default_rng(SEED).multinomial(len(top), np.full(len(top), 1 / len(top)), DRAWS)
    below = draws @ bottom
    low, high = np.quantile((draws @ top)[below > 0] / below[below > 0], (0.025, 0.975))
    return value, float(low), float(high)


def _edits(process: str, reference: str, hypothesis: str, parts: Any) -> Edits:
    if not reference:  # jiwer refuses it
        return Edits(0, 0, len(parts(hypothesis)), 0)
    alignment = getattr(extra("jiwer"), process)(reference, hypothesis)
    return Edits(alignment.substitutions, alignment.deletions, alignment.insertions, len(parts(reference)))


def _none_if_nan(value: float) -> float | None:
    return None if math.isnan(value) else value
