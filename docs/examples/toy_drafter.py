"""A drafter in 30 lines: it proposes what followed the last token before. See docs/add_a_drafter.md."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from mmdec.core.tree import chain_drafts
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict


class ToyDrafter:
    name = "toy"
    needs = Needs()  # logits only

    def check(self, target: Target) -> None:
        """Every target will do."""

    def start(self, context: Context) -> list[list[int]]:
        """Return the state of a run: each row's text, padding left out."""
        return [tokens[kept].tolist() for tokens, kept in zip(context.tokens, context.mask, strict=True)]

    def propose(self, state: list[list[int]], roots: Tensor, plan: Plan) -> Draft:
        """One chain below each root, at most plan.depth long."""
        tails = []
        for text in state:
            following, token, tail = dict(pairwise(text)), text[-1], list[int]()
            while token in following and len(tail) < min(plan.depth, plan.nodes):
                token = following[token]
                tail.append(token)
            tails.append(tail)
        return chain_drafts(roots, tails)

    def update(self, state: list[list[int]], draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """The round's new tokens; the last of them is the next root."""
        for text, tokens in zip(state, verdict.new_tokens, strict=True):
            text += tokens

    def select(self, state: list[list[int]], live: Tensor) -> None:
        """Rows that have ended leave the batch."""
        state[:] = [state[row] for row in live.tolist()]
