"""Logits processors, stopping criteria and functions as users write them: six treat each row alone, six do not.

Each is made anew for a run, because it may have a state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, RepetitionPenaltyLogitsProcessor, StoppingCriteria

from tests.support.tiny_text import VOCABULARY

Options = dict[str, Any]


class Grammar(LogitsProcessor):
    """Forbids tokens by a rule that depends on the row's number."""

    def __call__(self, ids: Any, scores: Any) -> Any:
        out = scores.clone()
        for row, text in enumerate(ids):
            out[row, int(text[-1] + row) % 5 + 3 :: 5] = -torch.inf
        return out


class Biases(LogitsProcessor):
    """Adds a bias that differs for each row and token."""

    def __init__(self, rows: int) -> None:
        self.bias = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows))

    def __call__(self, ids: Any, scores: Any) -> Any:
        return scores + self.bias


class Counting:
    """Favours another token at each call. It is not a subclass of a transformers class."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores.index_add(1, torch.tensor([self.calls % VOCABULARY]), torch.full((len(ids), 1), 2.0))


def allowed() -> Callable[[int, Tensor], list[int]]:
    """Make a `prefix_allowed_tokens_fn` that depends on the row, and checks that each row's text grows."""
    seen: dict[int, int] = {}

    def tokens(row: int, text: Tensor) -> list[int]:
        assert len(text) > seen.get(row, 0)
        seen[row] = len(text)
        return [2, *(token for token in range(3, VOCABULARY) if (token + row + len(text)) % 3)]

    return tokens


class Occurrences(StoppingCriteria):
    """Ends a row after a number of even tokens; each row has its own count and limit."""

    def __init__(self, rows: int) -> None:
        self.seen = [0] * rows

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        for row, text in enumerate(input_ids):
            self.seen[row] += int(text[-1]) % 2 == 0
        return torch.tensor([count >= 4 + 3 * row for row, count in enumerate(self.seen)])


class Endings(StoppingCriteria):
    """Ends each row at tokens that depend on the row's number; it has no state."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids[:, -1] % 5 == torch.arange(len(input_ids)) % 5


class Unsure(StoppingCriteria):
    """Ends a row when its best token is improbable, or when the last nine were nearly certain; uses all scores so
    far."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        best = torch.stack([step.softmax(-1).amax(-1) for step in scores], 1)
        return (best[:, -1] < 0.2) | (best[:, -9:].sum(1) > 8.5)


class Centred(LogitsProcessor):
    """Subtracts most of the batch's mean score."""

    def __call__(self, ids: Any, scores: Any) -> Any:
        return scores - 0.7 * scores.mean(0)


def distinct(ids: Tensor, scores: Tensor) -> Tensor:
    """Forbid each row the last tokens of the other rows."""
    out = scores.clone()
    for row in range(len(ids)):
        out[row, [int(text[-1]) for other, text in enumerate(ids) if other != row]] = -torch.inf
    return out


class Shared(RepetitionPenaltyLogitsProcessor):
    """A subclass of a transformers class with another behaviour: tokens of any row are penalised in all rows."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return super().__call__(input_ids.reshape(1, -1).expand(len(input_ids), -1), scores)


class Patience(StoppingCriteria):
    """Ends all rows after 13 calls, and returns a bool instead of a tensor."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.calls >= 13


class FirstRow(StoppingCriteria):
    """Ends all rows by the first row's last token, as examples in model cards do."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return bool(input_ids[0][-1] % 7 == 3)


class AllRows(StoppingCriteria):
    """Ends all rows once each row has had one of certain tokens."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        had = (input_ids[:, 14:] % 6 == 1).any(1)
        return had & had.all()


def declared(given: Any) -> Any:
    """Mark a processor or criterion as treating rows independently."""
    given.mmdec_row_wise = True
    return given


SCORES = {"return_dict_in_generate": True, "output_scores": True}
ROW_WISE: dict[str, Callable[[int, Callable[[Any], Any]], Options]] = {
    "grammar": lambda rows, say: {"logits_processor": [say(Grammar())]},
    "biases": lambda rows, say: {"logits_processor": [say(Biases(rows))]},
    "counting": lambda rows, say: {"logits_processor": [say(Counting())], "repetition_penalty": 1.2},
    "allowed": lambda rows, say: {"prefix_allowed_tokens_fn": say(allowed())},
    "occurrences": lambda rows, say: {"stopping_criteria": [say(Occurrences(rows))]},
    "unsure": lambda rows, say: {"stopping_criteria": [say(Unsure())], **SCORES},
}
COUPLED: dict[str, Callable[[], Options]] = {
    "centred": lambda: {"logits_processor": [Centred()], "repetition_penalty": 1.1},
    "distinct": lambda: {"logits_processor": [distinct]},
    "shared": lambda: {"logits_processor": [Shared(1.3)]},
    "patience": lambda: {"stopping_criteria": [Patience()]},
    "first row": lambda: {"stopping_criteria": [FirstRow()]},
    "all rows": lambda: {"stopping_criteria": [AllRows()]},
}
KINDS = (*ROW_WISE, *COUPLED)


def options_of(kind: str, rows: int, say: Callable[[Any], Any] = lambda given: given) -> Options:
    """Make the options of `generate` for a kind. say: applied to row-wise ones, such as `declared`."""
    return ROW_WISE[kind](rows, say) if kind in ROW_WISE else COUPLED[kind]()
