"""Processors, criteria and functions as callers write them: six that read each row by itself, six that do not.

Each is made anew for a run, as it may keep a state.
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
    """Each row has a rule of its own."""

    def __call__(self, ids: Any, scores: Any) -> Any:
        out = scores.clone()
        for row, text in enumerate(ids):
            out[row, int(text[-1] + row) % 5 + 3 :: 5] = -torch.inf
        return out


class Biases(LogitsProcessor):
    """Holds a number for each row and token."""

    def __init__(self, rows: int) -> None:
        self.bias = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows))

    def __call__(self, ids: Any, scores: Any) -> Any:
        return scores + self.bias


class Counting:
    """Another token is favoured at every call. It is no class of transformers."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores.index_add(1, torch.tensor([self.calls % VOCABULARY]), torch.full((len(ids), 1), 2.0))


def allowed() -> Callable[[int, Tensor], list[int]]:
    """A function of a row and its text, which remembers what it was asked about that row."""
    seen: dict[int, int] = {}

    def tokens(row: int, text: Tensor) -> list[int]:
        assert len(text) > seen.get(row, 0)
        seen[row] = len(text)
        return [2, *(token for token in range(3, VOCABULARY) if (token + row + len(text)) % 3)]

    return tokens


class Occurrences(StoppingCriteria):
    """Ends a row after so many even tokens; each row has a count and a limit of its own."""

    def __init__(self, rows: int) -> None:
        self.seen = [0] * rows

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        for row, text in enumerate(input_ids):
            self.seen[row] += int(text[-1]) % 2 == 0
        return torch.tensor([count >= 4 + 3 * row for row, count in enumerate(self.seen)])


class Endings(StoppingCriteria):
    """Ends each row at tokens of its own; keeps nothing."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return input_ids[:, -1] % 5 == torch.arange(len(input_ids)) % 5


class Unsure(StoppingCriteria):
    """Ends a row at a token that was not probable, or at three in a row that were; reads all scores so far."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        best = torch.stack([step.softmax(-1).amax(-1) for step in scores], 1)
        return (best[:, -1] < 0.2) | (best[:, -9:].sum(1) > 8.5)


class Centred(LogitsProcessor):
    """Takes the mean of the batch off."""

    def __call__(self, ids: Any, scores: Any) -> Any:
        return scores - 0.7 * scores.mean(0)


def distinct(ids: Tensor, scores: Tensor) -> Tensor:
    """No row may say what another one said last."""
    out = scores.clone()
    for row in range(len(ids)):
        out[row, [int(text[-1]) for other, text in enumerate(ids) if other != row]] = -torch.inf
    return out


class Shared(RepetitionPenaltyLogitsProcessor):
    """A subclass of transformers' own, which does something else: what one row said is dear to all."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return super().__call__(input_ids.reshape(1, -1).expand(len(input_ids), -1), scores)


class Patience(StoppingCriteria):
    """Ends everything after so many calls, and says so with a bool."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.calls >= 13


class FirstRow(StoppingCriteria):
    """As model cards have it: the first row's last token ends everything."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return bool(input_ids[0][-1] % 7 == 3)


class AllRows(StoppingCriteria):
    """Ends once every row has had such a token."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        had = (input_ids[:, 14:] % 6 == 1).any(1)
        return had & had.all()


def declared(given: Any) -> Any:
    """It says that rows are independent."""
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
    """What `generate` is given; a row-wise one says so where `say` is `declared`."""
    return ROW_WISE[kind](rows, say) if kind in ROW_WISE else COUPLED[kind]()
