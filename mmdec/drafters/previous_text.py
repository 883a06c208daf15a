"""Drafts a window of live sound from its own earlier texts, of which the new one repeats most tokens.

`mmdec.drafters.hypothesis` drafts texts of other origin, by words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import Tensor

from mmdec.core.tree import merge_chains, trees_from_lists
from mmdec.drafters.text_cursor import TextCursor
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict

MAX_OLDER_TOKENS = 4  # maximum tokens of a branch that is copied from an older text


@final
class PreviousTextDrafter:
    """A drafter that copies from earlier texts of the same audio window. It takes microseconds.

    The previous text is drafted as one long chain, which one pass of the target can confirm. If the new text differs,
    the drafter searches the previous text for the newest tokens, and continues from there. Short branches are added for
    older texts, to which the new text often returns, and for the expected end. Make one object for each window.

    Args:
        tokens: Token ids of the window's previous text, without prompt and end token.
        older: Earlier texts of the window.
        ending: Tokens expected at the end of the text; they are drafted in every round as a branch.
    """

    needs = Needs()
    name = "previous-text"

    def __init__(self, tokens: Sequence[int], older: Sequence[Sequence[int]] = (), ending: Sequence[int] = ()) -> None:
        self._texts = [list(text) for text in (tokens, *older)]
        self._ending = list(ending)

    def check(self, target: Target) -> None:  # it fits every target
        pass

    def start(self, context: Context) -> list[list[TextCursor]]:
        return [[TextCursor(text) for text in self._texts] for _ in context.tokens]

    def propose(self, state: list[list[TextCursor]], roots: Tensor, plan: Plan) -> Draft:
        """Draft the rest of the previous text, and short branches of the older texts and of the expected end."""
        trees = list[tuple[list[int], list[int]]]()
        for last, *older in state:
            branches = [text.rest(min(MAX_OLDER_TOKENS, plan.depth)) for text in older if text.is_match]
            trees.append(merge_chains([last.rest(plan.depth), *branches, self._ending[: plan.depth]], plan.nodes))
        return trees_from_lists(roots, trees)

    def update(self, state: list[list[TextCursor]], draft: Draft, scores: Scores, verdict: Verdict) -> None:
        for row, tokens in zip(state, verdict.new_tokens, strict=True):
            for token in tokens:
                for text in row:
                    text.add(token)

    def select(self, state: list[list[TextCursor]], live: Tensor) -> None:
        state[:] = [state[index] for index in live.tolist()]
