"""Tests the guard: it cuts invalid parts off a draft, and does not call a drafter again that has failed."""

from __future__ import annotations

from random import Random

import pytest
import torch

from mmdec.core.drafter_runner import DrafterRunner
from mmdec.core.timing import CPU, RoundTimer
from mmdec.core.tree import depths, root_only, trees_from_lists
from mmdec.types import Context, Draft, Plan, Scores, Verdict
from tests.support.toy_target import Memory, Scripted

ROOTS = torch.tensor([1, 2])
CONTEXT = Context(ROOTS[:, None], torch.ones(2, 1, dtype=torch.bool), torch.zeros(1, 2, 1), torch.ones(2))
ROOM = [99, 99]


class Ready(Scripted):
    """Proposes one draft, made beforehand."""

    def __init__(self, draft: Draft) -> None:
        super().__init__(lambda *_: ([], []))
        self.draft, self.asked = draft, 0

    def propose(self, state: Memory, roots: torch.Tensor, plan: Plan) -> Draft:
        self.asked += 1
        return self.draft


def guard(draft: Draft, vocab: int = 10) -> DrafterRunner:
    return DrafterRunner(Ready(draft), CONTEXT, vocab, RoundTimer(CPU))


def drafts(probs: bool = False) -> Draft:
    q = torch.rand(2, 6, 10, generator=torch.Generator().manual_seed(0)) if probs else None
    return trees_from_lists(ROOTS, [([3, 4, 5, 6, 7], [0, 0, 1, 2, 3]), ([8, 9], [0, 1])], q)


def test_a_sound_draft_passes_unchanged() -> None:
    draft = drafts()
    assert guard(draft).propose(ROOTS, Plan(5, 3), ROOM) is draft


@pytest.mark.parametrize(
    ("plan", "room", "tokens", "parents", "size"),
    [
        (Plan(5, 2), ROOM, [[1, 3, 4, 5, 6], [2, 8, 9, 0, 0]], [[-1, 0, 0, 1, 2], [-1, 0, 1, 0, 0]], [5, 3]),
        (Plan(3, 3), ROOM, [[1, 3, 4, 5], [2, 8, 9, 0]], [[-1, 0, 0, 1], [-1, 0, 1, 0]], [4, 3]),
        (Plan(5, 3), [4, 2], [[1, 3, 4, 5, 6, 7], [2, 8, 0, 0, 0, 0]], [[-1, 0, 0, 1, 2, 3], [-1] + [0] * 5], [6, 2]),
        (Plan(5, 3), [1, 3], [[1, 0, 0], [2, 8, 9]], [[-1, 0, 0], [-1, 0, 1]], [1, 3]),
        (Plan(5, 3), [1, 1], [[1], [2]], [[-1], [-1]], [1, 1]),
    ],
)
def test_oversized_and_broken_drafts_are_cut(
    plan: Plan, room: list[int], tokens: list[list[int]], parents: list[list[int]], size: list[int]
) -> None:
    got = guard(drafts()).propose(ROOTS, plan, room)
    assert got.size.tolist() == size
    for row, count in enumerate(size):
        assert got.tokens[row, :count].tolist() == tokens[row][:count]
    assert got.parents.tolist() == parents


def test_cutting_a_node_removes_its_descendants_and_moves_probabilities() -> None:
    parents = [[0, 1, 2, 0, 4, 5, 0], [0]]  # 1-2-3, 4-5-6, 7: at depth 2 nodes 3 and 6 fall
    q = torch.rand(2, 8, 10, generator=torch.Generator().manual_seed(0))
    draft = trees_from_lists(ROOTS, [(list(range(1, 8)), parents[0]), ([9], parents[1])], q)
    got = guard(draft).propose(ROOTS, Plan(9, 2), ROOM)
    assert got.tokens[0].tolist() == [1, 1, 2, 4, 5, 7]
    assert got.parents[0].tolist() == [-1, 0, 1, 0, 3, 0]
    assert got.probs is not None
    assert torch.equal(got.probs[0], q[0, [0, 1, 2, 4, 5, 7]])
    assert torch.equal(got.probs[1, :2], q[1, :2])


def test_random_trees_stay_trees() -> None:
    random = Random(0)
    for _ in range(200):
        trees = []
        for _ in range(2):
            count = random.randrange(12)
            trees.append(
                ([random.randrange(10) for _ in range(count)], [random.randrange(i + 1) for i in range(count)])
            )
        draft = trees_from_lists(ROOTS, trees)
        plan, room = Plan(random.randint(1, 9), random.randint(1, 4)), [random.randint(1, 5) for _ in ROOTS]
        got = guard(draft).propose(ROOTS, plan, room)
        assert int(got.size.max()) == got.tokens.shape[1] <= 1 + plan.nodes
        for row, size in enumerate(got.size.tolist()):
            assert max(depths(got.parents[row, :size].tolist())) <= min(plan.depth, room[row] - 1)
            paths = _paths(draft, row)
            assert all(path in paths for path in _paths(got, row))


def _paths(draft: Draft, row: int) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for node in range(int(draft.size[row])):
        above = paths[int(draft.parents[row, node])] if node else ()
        paths.append((*above, int(draft.tokens[row, node])))
    return paths


def test_nothing_is_asked_without_a_budget_or_a_drafter() -> None:
    ready = Ready(drafts())
    held = DrafterRunner(ready, CONTEXT, 10, RoundTimer(CPU))
    assert held.propose(ROOTS, Plan(0, 0), ROOM).tokens.tolist() == [[1], [2]]
    assert ready.asked == 0
    none = DrafterRunner(None, CONTEXT, 10, RoundTimer(CPU))
    none.select(torch.tensor([0]))
    assert none.propose(ROOTS, Plan(5, 5), ROOM).tokens.tolist() == [[1], [2]]


def test_a_failed_drafter_is_not_called_again() -> None:
    held = guard(drafts(), vocab=9)  # token 9 is outside
    with pytest.warns(RuntimeWarning, match="'scripted' failed.*token outside the vocabulary of 9") as caught:
        got = held.propose(ROOTS, Plan(5, 3), ROOM)
    assert [warning.filename for warning in caught] == [__file__]
    assert got.tokens.tolist() == [[1], [2]]
    assert held._drafter is held._state is None
    empty = torch.zeros(2, 1, dtype=torch.long)
    verdict = Verdict(empty, ROOTS, empty[:, 0].bool(), empty, empty[:, 0] + 1)
    held.update(root_only(ROOTS), Scores(torch.zeros(2, 1, 9)), verdict)  # a warning would be an error here
    held.select(torch.tensor([1]))
    assert held.propose(ROOTS, Plan(5, 3), ROOM).size.tolist() == [1, 1]


def test_interrupts_are_not_swallowed() -> None:
    class Interrupted(Ready):
        def propose(self, state: Memory, roots: torch.Tensor, plan: Plan) -> Draft:
            raise KeyboardInterrupt

    held = DrafterRunner(Interrupted(drafts()), CONTEXT, 10, RoundTimer(CPU))
    with pytest.raises(KeyboardInterrupt):
        held.propose(ROOTS, Plan(5, 3), ROOM)
