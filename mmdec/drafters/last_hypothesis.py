"""Drafts from the text of an earlier decoding of nearly the same sound, for live sound.

A window of live sound is decoded again whenever some sound was added to it. Most of its text stays as it was, so the
last text is drafted as one long chain, and a pass of the target confirms it. Where the new text differs from the last
one, the drafter looks for the newest tokens in the last text and continues from there. A text often returns to an older
version, and it ends where the sound ends: so short branches of older texts and of the expected end are drafted, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from mmdec.decode.tree import joined, trees_from_lists
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict

LONGEST = 4  # to find a row's place in an earlier text, at most so many last tokens are compared
UNSURE = 6  # maximum nodes of a draft while the place is a guess: the row's last token is not in the earlier text
OLDER = 4  # maximum nodes of the branch that continues an older text


@dataclass
class _Place:
    """The place in an earlier text at which a row continues."""

    at: int = 0  # index in the earlier text of the token that is expected next
    sure: bool = True  # whether the token before `at` is the row's last token; else the place is a guess


@dataclass
class _Row:
    """One row's place in each earlier text, and its last tokens."""

    places: list[_Place]
    text: list[int] = field(default_factory=list[int])


@final
class LastHypothesis:
    """Drafts the tokens that follow in earlier texts of the same window. It has no weights, and takes microseconds.

    One object serves the decodings of one window: `tokens` is the text that they are expected to have.
    """

    needs = Needs()
    name = "last-hypothesis"

    def __init__(self, tokens: Sequence[int], older: Sequence[Sequence[int]] = (), ending: Sequence[int] = ()) -> None:
        """tokens: the last text, without prompt and end token. older: texts before it. ending: tokens that may end the
        text at any place."""
        self._texts = [list(text) for text in (tokens, *older)]
        self._ending = list(ending)

    def check(self, target: Target) -> None:
        """Accept every target."""

    def start(self, context: Context) -> list[_Row]:
        """Place each row before the first token of each text."""
        return [_Row([_Place() for _ in self._texts]) for _ in context.tokens]

    def propose(self, memory: list[_Row], roots: Tensor, plan: Plan) -> Draft:
        """Draft the rest of the last text (a few tokens if its place is a guess), and branches of the others."""
        trees = list[tuple[list[int], list[int]]]()
        for row in memory:
            sizes = [plan.depth if row.places[0].sure else UNSURE, *[OLDER * place.sure for place in row.places[1:]]]
            found = zip(self._texts, row.places, sizes, strict=True)
            tails = [text[place.at : place.at + min(size, plan.depth)] for text, place, size in found]
            trees.append(joined([*tails, self._ending[: plan.depth]], plan.nodes))
        return trees_from_lists(roots, trees)

    def update(self, memory: list[_Row], draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Advance each row's places in the earlier texts by the round's tokens."""
        for row, tokens, length in zip(memory, verdict.tokens.tolist(), verdict.lengths.tolist(), strict=True):
            for token in tokens[:length]:
                row.text = [*row.text[1 - LONGEST :], token]
                row.places = [_followed(*pair, row.text) for pair in zip(self._texts, row.places, strict=True)]

    def select(self, memory: list[_Row], live: Tensor) -> None:
        """Keep only the rows whose indices are in `live` (K,) int64, in that order."""
        memory[:] = [memory[index] for index in live.tolist()]


def _followed(tokens: Sequence[int], place: _Place, text: Sequence[int]) -> _Place:
    """Return the place in an earlier text, `tokens`, after one more token of the row, the last of `text`."""
    if place.at < len(tokens) and tokens[place.at] == text[-1]:
        return _Place(place.at + 1)
    best: tuple[int, int, int] | None = None  # (number of equal tokens, -distance, index)
    for index, token in enumerate(tokens):
        if token != text[-1]:
            continue
        equal = 1
        while equal < len(text) and equal <= index and tokens[index - equal] == text[-1 - equal]:
            equal += 1
        found = (equal, -abs(index + 1 - place.at), index + 1)
        best = found if best is None else max(best, found)
    # if the token is not in the earlier text: assume that it replaced one token there
    return _Place(place.at + 1, False) if best is None else _Place(best[2])
