"""A target in 40 lines: a model that looks at the last two tokens. See docs/add_a_target.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmdec.core.tree import root_only
from mmdec.types import Context, Draft, Needs, PrefillOutput, Scores, Verdict


@dataclass
class Session:
    """One run: for each row the token before the root, and the draft that was scored last."""

    before: Tensor  # (B,) int64
    draft: Draft


class PairTarget:
    name, hidden_size, device = "pair-counts", 1, torch.device("cpu")

    def __init__(self, text: list[int], vocab_size: int) -> None:
        """Counts which token followed which two."""
        self.vocab_size = vocab_size
        self.counts = torch.full((vocab_size, vocab_size, vocab_size), 0.01)
        for first, second, third in zip(text, text[1:], text[2:], strict=False):
            self.counts[first, second, third] += 1

    def prefill(self, inputs: Mapping[str, Any], needs: Needs) -> PrefillOutput[Session]:
        tokens, mask = inputs["input_ids"], inputs["attention_mask"].bool()  # (B, P), padded on the left
        positions = (mask.long().cumsum(1) - 1).clamp_min(0)
        draft = root_only(tokens[:, -1])
        session = Session(tokens[:, -2], draft)
        context = Context(tokens, mask, positions[None], mask.sum(1))
        return PrefillOutput(session, context, draft, self.score(session, draft))

    def score(self, session: Session, draft: Draft) -> Scores:
        """Each node by its own token and its parent's; the root's parent is the token before it."""
        session.draft = draft
        above = draft.tokens.gather(1, draft.parents.clamp_min(0))
        above = torch.where(draft.parents < 0, session.before[:, None], above)
        return Scores(self.counts[above, draft.tokens].log())  # (B, N, V)

    def commit(self, session: Session, verdict: Verdict) -> None:
        """The last accepted node, or the root, is now the token before the next root."""
        last = (verdict.path >= 0).sum(1, keepdim=True) - 1
        node = verdict.path.gather(1, last)
        session.before = session.draft.tokens.gather(1, node)[:, 0]

    def select(self, session: Session, live: Tensor) -> None:
        session.before = session.before[live]
