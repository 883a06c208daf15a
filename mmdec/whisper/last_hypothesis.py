"""Drafts for live transcription: the text of the previous decoding of nearly the same audio window.

A window of live audio is decoded again whenever it has grown. Most of its text stays the same. So the previous text is
drafted as one long chain, which one pass of the target can confirm. If the new text differs from it, the drafter
searches the previous text for the newest tokens, and continues from there. Short branches are added for older texts, to
which the new text often returns, and for the expected end of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from mmdec.core.tree import merge_chains, trees_from_lists
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict

MAX_MATCH = 4  # at most this many of the newest tokens are compared to find where an earlier text continues
MAX_GUESSED_TOKENS = 6  # maximum tokens copied from the previous text from a guessed place (`_Place.is_match` is False)
MAX_OLDER_TOKENS = 4  # maximum tokens of a branch that is copied from an older text


@dataclass
class _Place:
    """The place in an earlier text from which a batch row's new text is expected to continue."""

    at: int = 0  # index in the earlier text of the token that is expected next
    # whether the row's newest token is before `at` in the earlier text; else the place is a guess
    is_match: bool = True


@dataclass
class _Row:
    """The drafter's state of one batch row: its newest tokens, and where in each earlier text it is (`places`)."""

    places: list[_Place]
    text: list[int] = field(default_factory=list[int])


@final
class LastHypothesis:
    """A drafter that copies from earlier texts of the same audio window. It has no weights and takes microseconds.

    It holds the earlier texts of one window: make one object for each window.

    Args:
        tokens: Token ids of the window's previous text, without prompt and end token.
        older: Earlier texts of the window.
        ending: Tokens expected at the end of the text; they are drafted in every round as a branch.
    """

    needs = Needs()
    name = "last-hypothesis"

    def __init__(self, tokens: Sequence[int], older: Sequence[Sequence[int]] = (), ending: Sequence[int] = ()) -> None:
        self._texts = [list(text) for text in (tokens, *older)]
        self._ending = list(ending)

    def check(self, target: Target) -> None:  # it fits every target
        pass

    def start(self, context: Context) -> list[_Row]:
        return [_Row([_Place() for _ in self._texts]) for _ in context.tokens]

    def propose(self, state: list[_Row], roots: Tensor, plan: Plan) -> Draft:
        """Draft the rest of the previous text, and short branches of the older texts and of the expected end."""
        trees = list[tuple[list[int], list[int]]]()
        for row in state:
            sizes = [
                plan.depth if row.places[0].is_match else MAX_GUESSED_TOKENS,
                *[MAX_OLDER_TOKENS * place.is_match for place in row.places[1:]],
            ]
            copies = zip(self._texts, row.places, sizes, strict=True)
            tails = [text[place.at : place.at + min(size, plan.depth)] for text, place, size in copies]
            trees.append(merge_chains([*tails, self._ending[: plan.depth]], plan.nodes))
        return trees_from_lists(roots, trees)

    def update(self, state: list[_Row], draft: Draft, scores: Scores, verdict: Verdict) -> None:
        for row, tokens, length in zip(state, verdict.tokens.tolist(), verdict.lengths.tolist(), strict=True):
            for token in tokens[:length]:
                row.text = [*row.text[1 - MAX_MATCH :], token]
                row.places = [_advance(*pair, row.text) for pair in zip(self._texts, row.places, strict=True)]

    def select(self, state: list[_Row], live: Tensor) -> None:
        state[:] = [state[index] for index in live.tolist()]


def _advance(tokens: Sequence[int], place: _Place, text: Sequence[int]) -> _Place:
    """Return the new place in an earlier text after the row got one more token.

    Args:
        tokens: The earlier text.
        place: The place before.
        text: The row's newest tokens, the new one last.
    """
    if place.at < len(tokens) and tokens[place.at] == text[-1]:
        return _Place(place.at + 1)
    best: tuple[int, int, int] | None = None  # (number of equal tokens, -distance from `place`, index after the match)
    for index, token in enumerate(tokens):
        if token != text[-1]:
            continue
        equal = 1
        while equal < len(text) and equal <= index and tokens[index - equal] == text[-1 - equal]:
            equal += 1
        match = (equal, -abs(index + 1 - place.at), index + 1)
        best = match if best is None else max(best, match)
    # without a match, guess that the new token replaced one token of the earlier text
    return _Place(place.at + 1, False) if best is None else _Place(best[2])
