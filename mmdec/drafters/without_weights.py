"""What drafters without weights share: the prompt's text, rates of right guesses, and which chains are worthwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mmdec.core.tree import int_list
from mmdec.types import Context, Plan

COUNT_DECAY = 0.97  # each new guess multiplies the weight of all earlier ones by this factor
PRIOR_TRIALS = 4.0  # an assumed rate has the weight of this many guesses


@dataclass
class HitRate:
    """How often guesses of one kind were right. Newer guesses weigh more."""

    hits: float = 0.0
    trials: float = 0.0
    decay: float = COUNT_DECAY  # each new guess multiplies the weight of all earlier ones by this factor

    @classmethod
    def assumed(cls, rate: float) -> HitRate:
        """Return a rate from 0 to 1 that is assumed before any guess is counted."""
        return cls(PRIOR_TRIALS * rate, PRIOR_TRIALS)

    @property
    def value(self) -> float:
        return self.hits / self.trials

    def count(self, is_hit: bool) -> None:
        self.hits = self.decay * self.hits + is_hit
        self.trials = self.decay * self.trials + 1


def masked_rows(tokens: Tensor, mask: Tensor) -> list[list[int]]:
    """Return for each row the tokens where `mask` is True.

    Args:
        tokens: (B, P) int64.
        mask: (B, P) bool.
    """
    return [int_list(row[is_text]) for row, is_text in zip(tokens, mask, strict=True)]


def prompts_with_sources(context: Context, mask: Tensor) -> list[list[int]]:
    """Return the text from which each row may copy: its prompt without padding.

    For an encoder-decoder model of text it is prompt, encoder input, prompt, so that the first draft copies the
    beginning of the encoder input.

    Args:
        context: The target's.
        mask: (B, P) bool, which tokens of the prompts are read.
    """
    prompts = masked_rows(context.tokens, mask)
    if context.source is None:
        return prompts
    return [[*prompt, *source, *prompt] for prompt, source in zip(prompts, context.source, strict=True)]


def worthwhile_prefix(chain: Sequence[int], probabilities: Sequence[float], plan: Plan) -> list[int]:
    """Return how much of a chain to draft: up to the first token less likely than `plan.threshold`.

    Return [] if fewer than `plan.min_expected_accepted` tokens are expected to be accepted.

    Args:
        chain: Token ids.
        probabilities: For each token, the probability that it and all tokens before it are right.
    """
    likely = [probability for probability in probabilities[: len(chain)] if probability >= plan.threshold]
    return list(chain[: len(likely)]) if sum(likely) >= plan.min_expected_accepted else []
