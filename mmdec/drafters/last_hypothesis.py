"""Drafts from the text that an earlier decoding of nearly the same sound gave, for sound that is still arriving.

A window of live sound is decoded again whenever some sound was added to it. Most of its text stays as it was, so the
last text is drafted as one long chain, and a pass of the target confirms it. Where the new text parts from the old one,
the place to go on from is found by the last tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from mmdec.decode.tree import trees_from_lists
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict

LONGEST = 4  # tokens that are compared at most to find the place in the hypothesis
UNSURE = 6  # nodes of a draft after a token that the hypothesis does not hold


@dataclass
class _Row:
    """One row's place in the hypothesis."""

    at: int = 0  # index of the hypothesis' token that is expected next
    sure: bool = True  # whether the last token was the hypothesis' own at that place
    text: list[int] = field(default_factory=list[int])  # the last tokens


@final
class LastHypothesis:
    """Drafts a chain of the tokens that follow in an earlier text. It has no weights, and takes microseconds.

    One object serves the decodings of one window: `tokens` is the text that they are expected to have.
    """

    needs = Needs()
    name = "last-hypothesis"

    def __init__(self, tokens: Sequence[int]) -> None:
        """tokens: the earlier text, without prompt and end token."""
        self._tokens = list(tokens)

    def check(self, target: Target) -> None:
        """Accept every target."""

    def start(self, context: Context) -> list[_Row]:
        """Place each row before the hypothesis' first token."""
        return [_Row() for _ in context.tokens]

    def propose(self, memory: list[_Row], roots: Tensor, plan: Plan) -> Draft:
        """Draft the rest of the hypothesis, as a chain; only a few tokens where the place in it is a guess."""
        most = min(plan.nodes, plan.depth)
        chains = [self._tokens[row.at : row.at + (most if row.sure else min(most, UNSURE))] for row in memory]
        return trees_from_lists(roots, [(chain, range(len(chain))) for chain in chains])

    def update(self, memory: list[_Row], draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Follow the round's tokens in the hypothesis."""
        for row, tokens, length in zip(memory, verdict.tokens.tolist(), verdict.lengths.tolist(), strict=True):
            for token in tokens[:length]:
                self._follow(row, token)

    def select(self, memory: list[_Row], live: Tensor) -> None:
        """Keep only the rows whose indices are in `live` (K,) int64, in that order."""
        memory[:] = [memory[index] for index in live.tolist()]

    def _follow(self, row: _Row, token: int) -> None:
        row.text = [*row.text[1 - LONGEST :], token]
        if row.at < len(self._tokens) and self._tokens[row.at] == token:
            row.at, row.sure = row.at + 1, True
            return
        after = self._place(row)
        row.sure = after is not None
        row.at = row.at + 1 if after is None else after  # otherwise: as if one token was replaced by another

    def _place(self, row: _Row) -> int | None:
        """The index after the hypothesis' tokens that equal most of the last tokens; of several, the nearest. None if
        it does not hold the last token."""
        best: tuple[int, int, int] | None = None  # (tokens that are equal, -distance, index)
        for index, token in enumerate(self._tokens):
            if token != row.text[-1]:
                continue
            equal = 1
            while equal < len(row.text) and equal <= index and self._tokens[index - equal] == row.text[-1 - equal]:
                equal += 1
            found = (equal, -abs(index + 1 - row.at), index + 1)
            best = found if best is None else max(best, found)
        return None if best is None else best[2]
