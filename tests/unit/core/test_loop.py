"""Tests the decoding loop on a toy target: its rounds and their records, rows that end, and early exits."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from mmdec.core.budget import FixedBudget, RoundCosts
from mmdec.core.loop import decode
from mmdec.core.round_recorder import chosen_logprobs
from mmdec.core.sampling import Sequences, Stop
from mmdec.core.verify import MatchRule
from mmdec.types import Plan, Verdict
from tests.support.toy_target import RandomBudget, Scripted, Toy, padded, rejected_drafts, run, target_drafts

PROMPTS = [[1, 2, 3], [4]]
NEVER: frozenset[int] = frozenset()


def stop(tokens: int, eos: frozenset[int] = NEVER) -> Stop:
    return Stop(3 + tokens, eos)


def test_rounds_add_up_to_the_text() -> None:
    target = Toy(8)
    text, rounds = run(target, PROMPTS, stop(12), MatchRule(), Scripted(target_drafts(target)))
    plain, passes = run(target, PROMPTS, stop(12), MatchRule())
    assert text.tokens == plain.tokens
    assert len(passes) == 12
    assert [round_.index for round_ in rounds] == [0, 1, 2, 3]  # 1 token, then 5, 5 and the last
    assert [round_.accepted for round_ in rounds] == [[0, 0], [4, 4], [4, 4], [0, 0]]
    tokens = [[token for round_ in rounds for token in round_.tokens[row]] for row in (0, 1)]
    assert tokens == text.tokens


@pytest.mark.parametrize(("drafts", "taken"), [(target_drafts, 3), (rejected_drafts, 0)])
def test_a_round_says_what_was_drafted_and_taken(drafts: Callable[[Toy], Any], taken: int) -> None:
    target = Toy(8)
    rounds = run(target, [[1, 2, 3]], stop(9), MatchRule(), Scripted(drafts(target)), FixedBudget(3))[1]
    assert rounds[0].drafted == [0]  # the prompt's pass
    assert (rounds[1].drafted, rounds[1].accepted) == ([3], [taken])
    assert len(rounds[1].tokens[0]) == taken + 1  # and the bonus, or the correction


def test_a_row_that_ends_leaves_the_batch() -> None:
    target = Toy(8)
    texts = run(target, PROMPTS, stop(20), MatchRule())[0].tokens
    last = next(token for token in texts[0] if token not in texts[1][: texts[0].index(token) + 1])
    first, second = (1 + [*text, last].index(last) for text in texts)
    rounds = run(target, PROMPTS, stop(20, frozenset({last})), MatchRule())[1]
    second = min(second, 20)
    assert first < second
    assert [round_.rows for round_ in rounds] == [[0, 1]] * first + [[1]] * (second - first)
    assert rounds[first - 1].done == [True, False]


class Noted:
    """A budget that notes what it is asked and told."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.told: list[tuple[list[int], int, list[int]]] = []

    def plan(self, batch: int) -> Plan:
        self.asked.append(batch)
        return Plan(2, 2)

    def observe(self, costs: RoundCosts) -> None:
        self.told.append((list(costs.draft_sizes), costs.depth, list(costs.accepted)))


def test_the_budget_is_told_of_every_round_but_the_prompts() -> None:
    target, budget = Toy(8), Noted()
    rounds = run(target, PROMPTS, stop(7), MatchRule(), Scripted(rejected_drafts(target)), budget)[1]
    assert len(rounds) == 7
    assert budget.asked == [2] * 6
    assert budget.told[0] == ([3, 3], 2, [0, 0])
    assert len(budget.told) == 6


def test_the_iterator_can_be_closed() -> None:
    target, inputs = Toy(8), padded(PROMPTS)
    text = Sequences(inputs["input_ids"], stop(20))
    rounds = decode(target, inputs, text, MatchRule(), Scripted(target_drafts(target)), RandomBudget(Random(0)))
    next(rounds)
    rounds.close()  # type: ignore[attr-defined] # a generator
    assert next(rounds, None) is None
    assert [len(row) for row in text.tokens] == [1, 1]  # of the prompt's pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chosen_logprobs_are_those_of_each_rows_tokens(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (8 * torch.randn(2, 4, 7)).to(dtype)
    path = torch.tensor([[0, 1, 3], [0, 2, -1]])
    tokens = torch.tensor([[5, 6, 1], [2, 4, -1]])
    verdict = Verdict(path, torch.tensor([1, 4]), torch.tensor([False, False]), tokens, torch.tensor([3, 2]))
    logprobs = chosen_logprobs(logits, verdict)
    for row, length in enumerate((3, 2)):
        for step in range(length):
            expected = logits[row, path[row, step]].float().log_softmax(-1)[tokens[row, step]]
            assert float(logprobs[row, step]) == pytest.approx(float(expected), abs=1e-5)
    single = chosen_logprobs(
        logits[:1], Verdict(path[:1], tokens[:1, -1], verdict.done[:1], tokens[:1], verdict.lengths[:1])
    )
    assert torch.allclose(single, logprobs[:1])
