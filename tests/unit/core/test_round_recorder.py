"""Tests what is recorded of each round: its share of a pass, what the budget is told, and the report of the prompt."""

from __future__ import annotations

import pytest
import torch

from mmdec.core.budget import RoundCosts
from mmdec.core.round_recorder import RoundRecorder
from mmdec.core.sampling import Sequences, Stop
from mmdec.core.steps import PassResult
from mmdec.core.timing import CPU
from mmdec.core.tree import chain_drafts, root_only
from mmdec.core.verify import MatchRule, verify
from mmdec.types import Draft, Plan, Round, Scores


class Listening:
    """A budget that notes what it is asked and told."""

    def __init__(self) -> None:
        self.batches, self.told = list[int](), list[RoundCosts]()

    def plan(self, batch: int) -> Plan:
        self.batches.append(batch)
        return Plan(2, 2)

    def observe(self, costs: RoundCosts) -> None:
        self.told.append(costs)


def finish(recorder: RoundRecorder, sequences: Sequences, draft: Draft, best: list[int]) -> Round:
    scores = Scores(torch.nn.functional.one_hot(torch.tensor([best]), 9).float())
    return recorder.finish(draft, scores, verify(draft, scores, MatchRule(), sequences))


def test_a_decoding_that_shares_a_pass_has_its_rows_share_of_the_seconds() -> None:
    sequences, budget = Sequences(torch.tensor([[1]]), Stop(max_length=9)), Listening()
    recorder = RoundRecorder(CPU, sequences, budget, report="the prompt's")
    recorder.add_pass(PassResult(None, 2.0, 2.0))
    first = finish(recorder, sequences, root_only(torch.tensor([1])), [3])
    assert (first.index, first.tokens, first.target_seconds, first.report) == (0, [[3]], 2.0, "the prompt's")
    assert budget.told == []  # the prompt's pass says nothing of drafts

    assert recorder.plan() == Plan(2, 2)
    with recorder.timer.stage("drafter"):
        pass
    recorder.add_pass(PassResult(None, 2.0, 2.0, rows=4))
    second = finish(recorder, sequences, chain_drafts(torch.tensor([3]), [[4, 5]]), [4, 6, 0])
    assert (second.index, second.tokens, second.drafted, second.accepted) == (1, [[4, 6]], [2], [1])
    assert (second.target_seconds, second.report) == (0.5, None)
    (told,) = budget.told
    assert (told.batch, told.draft_sizes, told.depth, told.accepted) == (4, [3], 2, [1])
    assert told.target_seconds == 2.0
    assert told.draft_seconds == pytest.approx(4 * second.drafter_seconds)  # four decodings draft one after another
    recorder.plan()
    assert budget.batches == [1, 4]  # the rows of others count as long as they share passes
