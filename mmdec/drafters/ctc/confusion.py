"""A confusion network (Mangu et al. 2000): what a CTC head may have heard, place by place.

A bin is a run of frames with the same most probable piece. Its choices are the pieces that are likely there. Bins of
blanks have choices only where another piece is likely.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import final

import numpy as np

from mmdec.drafters.ctc.tokens import BLANK

MAX_CHOICES = 5  # choices of a bin, the head's best included
MAX_HIDDEN = 2  # pieces that may have been said within one run of blanks
MIN_CHOICE = 0.03  # a choice's least probability, the highest of its bin's frames


@dataclass(frozen=True)
class Bin:
    """What may have been said in a few frames."""

    first: int  # the first frame
    last: int  # the last frame
    piece: int  # the head's most probable piece; the blank where a piece may be hidden among blanks
    choices: tuple[tuple[int, float], ...]  # pieces, the head's best first, with their probabilities; the blank: none


@final
class ConfusionNetwork:
    """The bins of an audio window.

    Args:
        logprobs: (F, V), for each of F frames the CTC head's log-probability of each of V pieces.
    """

    def __init__(self, logprobs: np.ndarray) -> None:
        path = logprobs.argmax(1)
        starts = np.flatnonzero(np.diff(path, prepend=-1))
        self.bins: list[Bin] = []
        if len(starts):
            # (runs, V), the highest probability of each piece in each run of frames, and the lowest of the blank
            highest = np.exp(np.maximum.reduceat(logprobs, starts))
            blanks = np.exp(np.minimum.reduceat(logprobs[:, BLANK], starts)).tolist()
            runs = [*starts.tolist(), len(path)]
            pieces = [-1, *path[starts].tolist(), -1]
            for run, likely in enumerate(highest >= MIN_CHOICE):
                rivals = {piece: float(highest[run, piece]) for piece in np.flatnonzero(likely).tolist()}
                self._add(logprobs, runs[run], runs[run + 1], pieces[run : run + 3], rivals, blanks[run])
        self._lasts = [bin_.last for bin_ in self.bins]

    def _add(
        self, logprobs: np.ndarray, first: int, end: int, near: list[int], rivals: dict[int, float], blank: float
    ) -> None:
        """Add the bins of one run of frames.

        Args:
            first, end: The frames from `first` to `end` - 1.
            near: The most probable piece of the run before, of this run and of the next one.
            rivals: Likely pieces with their probabilities.
            blank: The blank's lowest probability.
        """
        piece = near[1]
        if piece != BLANK:
            choices = {**rivals, BLANK: blank} if blank >= MIN_CHOICE else rivals
            choices = sorted(choices.items(), key=lambda choice: (choice[0] != piece, -choice[1]))
            total = max(sum(probability for _, probability in choices), 1.0)
            ranked = tuple((rival, probability / total) for rival, probability in choices[:MAX_CHOICES])
            self.bins.append(Bin(first, end - 1, piece, ranked))
            return
        hidden = sorted((probability, rival) for rival, probability in rivals.items() if rival not in near)
        frames = [
            (first + int(logprobs[first:end, rival].argmax()), rival, probability)
            for probability, rival in hidden[-MAX_HIDDEN:]
        ]
        self.bins += [
            Bin(at, at, BLANK, ((BLANK, 1 - probability), (rival, probability)))
            for at, rival, probability in sorted(frames)
        ]

    def after(self, frame: int, last: int) -> int:
        """Return the index of the first bin that a text which ends before `frame` leaves.

        Args:
            last: The text's last piece.
        """
        at = bisect_left(self._lasts, frame)
        while at < len(self.bins) and self.bins[at].first < frame and self.bins[at].piece == last:
            at += 1
        return at
