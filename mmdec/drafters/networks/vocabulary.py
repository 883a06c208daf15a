"""The tokens that a draft network can propose."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


@final
@dataclass(frozen=True)
class DraftVocabulary:
    """All Vd tokens that can be drafted: the V tokens of the target, or a part of them.

    Args:
        target_size: V.
        offsets: (Vd,), for each token, its id in the target's vocabulary minus its id in the draft vocabulary; None:
            both vocabularies are the same.
    """

    target_size: int
    offsets: Tensor | None = None

    @property
    def size(self) -> int:
        return self.target_size if self.offsets is None else len(self.offsets)

    def token_ids(self, drafted: Tensor) -> Tensor:
        """Convert token ids of the draft vocabulary to those of the target's vocabulary."""
        return drafted if self.offsets is None else drafted + self.offsets[drafted]

    def all_token_ids(self, device: torch.device | str = "cpu") -> Tensor:
        """Return the ids (Vd,) of all tokens in the target's vocabulary."""
        return self.token_ids(torch.arange(self.size, device=device))

    def target_logits(self, logits: Tensor) -> Tensor:
        """Convert logits (..., Vd) to logits (..., V), which are -inf at tokens that cannot be drafted."""
        if self.offsets is None:
            return logits
        wide = logits.new_full((*logits.shape[:-1], self.target_size), -math.inf)
        wide[..., self.all_token_ids(logits.device)] = logits
        return wide
