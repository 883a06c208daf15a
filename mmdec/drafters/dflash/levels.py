"""Grows a draft from a block whose tokens depend on each other by a sequential head (`heads.py`)."""

from __future__ import annotations

from typing import final

from torch import Tensor

from mmdec.drafters.dflash.heads import ConfidenceHead, SequentialHead
from mmdec.drafters.networks.kv_cache import DraftState
from mmdec.drafters.networks.tree import Grower, Levels


@final
class SequentialLevels(Levels):
    """Grows one draft: the network has run once for all depths, and only the head runs level by level.

    What `Levels` calls a node's hidden state is the head's state of this node.

    Args:
        head: The network's head.
        confidence: Estimates acceptance for chains that end early; None: the probability of the drafted token does.
        hidden: (B, K, H), the block's normed states, one for each depth.
        base: (B, K, V), the logits of these states.
    """

    def __init__(
        self,
        drafter: Grower,
        state: DraftState,
        head: SequentialHead,
        confidence: ConfidenceHead | None,
        hidden: Tensor,
        base: Tensor,
    ) -> None:
        super().__init__(drafter, state)
        self.head, self.confidence, self.hidden, self.base = head, confidence, hidden, base

    def expand(self, tokens: Tensor, features: Tensor, above: Tensor | None) -> Tensor:
        """Return the head's states (B, n, S) of n nodes.

        Args:
            tokens: (B, n), the nodes' tokens.
            features: (B, n, S), the head's states of their parents.
            above: Not read.
        """
        states = self.head.step(features, tokens, self.hidden[:, self.level, None], self.drafter.embedding)
        self.level += 1
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head.logits(self.base[:, self.level, None], self.hidden[:, self.level, None], hidden, self.level)

    @property
    def max_children(self) -> int:
        return super().max_children if self.head.candidates is None else self.head.candidates

    def acceptance_probability(self, logits: Tensor, hidden: Tensor) -> Tensor:
        if self.confidence is None:
            return super().acceptance_probability(logits, hidden)
        return self.confidence(self.hidden[:, self.level, None], hidden).sigmoid()
