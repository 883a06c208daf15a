"""Tests Token Recycling: its tree, its matrix, and the matrix's updates from scored nodes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmdec.core.tree import root_only, trees_from_lists
from mmdec.drafters.recycling import RecyclingDrafter, tree_template
from mmdec.errors import InputError
from mmdec.types import Context, Draft, Plan, Scores, Verdict
from tests.support.trees import is_chain


class Size:
    """A target of which nothing but the vocabulary matters."""

    name = "size"
    hidden_size = 1
    device = torch.device("cpu")

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size


def context(tokens: list[list[int]], mask: list[list[bool]] | None = None) -> Context:
    ids = torch.tensor(tokens)
    is_token = torch.ones_like(ids, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return Context(ids, is_token, is_token.cumsum(1)[None], is_token.sum(1))


def ranked(*orders: list[int], vocab: int = 20) -> Tensor:
    """Return (1, N, V) logits whose best tokens are these."""
    logits = torch.full((1, len(orders), vocab), -9.0)
    for node, order in enumerate(orders):
        logits[0, node, order] = -torch.arange(len(order), dtype=torch.float)
    return logits


def verdict(path: list[int], tokens: list[int]) -> Verdict:
    return Verdict(
        torch.tensor([path]),
        torch.tensor(tokens[-1:]),
        torch.tensor([False]),
        torch.tensor([tokens]),
        torch.tensor([len(tokens)]),
    )


def check_form(draft: Draft, plan: Plan) -> None:
    for tokens, parents, size in zip(draft.tokens.tolist(), draft.parents.tolist(), draft.size.tolist(), strict=True):
        assert parents[0] == -1
        level = [0]
        for node in range(1, size):
            assert 0 <= parents[node] < node
            level.append(level[parents[node]] + 1)
        edges = list(zip(parents[1:size], tokens[1:size], strict=True))
        assert len(set(edges)) == len(edges) <= plan.nodes
        assert max(level) <= plan.depth


def test_template_has_the_papers_levels() -> None:
    template = tree_template(80, 7)
    levels = [sum(len(path) == depth for path in template) for depth in range(1, 8)]
    assert levels == [8, 21, 25, 18, 6, 1, 1]  # the paper: 8, 21, 25, 15, 8, 3


@given(st.integers(0, 100), st.integers(0, 8))
def test_each_beginning_of_a_template_is_a_tree(nodes: int, depth: int) -> None:
    template = tree_template(nodes, depth)
    seen = {()}
    for path in template:
        assert path[:-1] in seen
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in seen  # the better sibling comes first
        seen.add(path)
    assert len(seen) == len(template) + 1  # none twice
    assert len(template) == (nodes if depth > 2 else min(nodes, [0, 8, 72][depth]))
    assert max(map(len, template), default=0) <= depth


def test_the_best_path_comes_first() -> None:
    drafter = RecyclingDrafter()
    state = drafter.start(context([[1, 2, 4, 1, 2, 3, 1]]))
    draft = drafter.propose(state, torch.tensor([1]), Plan(9, 3))
    assert draft.tokens[0, :4].tolist() == [1, 2, 3, 1]
    assert draft.parents[0, :4].tolist() == [-1, 0, 1, 2]
    assert int(draft.size) > 4


def test_a_repeated_passage_comes_before_the_best_successors() -> None:
    drafter = RecyclingDrafter()
    state = drafter.start(context([[8, 1, 2, 5, 6, 3, 2, 7, 8, 1, 2]]))  # 2 -> 7 came last, but 8, 1, 2 -> 5
    root = torch.tensor([2])
    assert drafter.propose(state, root, Plan(3, 3)).tokens.tolist() == [[2, 5, 6, 3]]
    tree = drafter.propose(state, root, Plan(4, 2))
    assert tree.tokens.tolist() == [[2, 5, 6, 7, 8]]
    assert tree.parents.tolist() == [[-1, 0, 1, 0, 3]]
    assert int(drafter.propose(state, root, Plan(3, 3, threshold=0.9)).size) == 1  # nothing is so sure


def test_a_chain_of_successors_ends_where_it_is_unlikely() -> None:
    drafter = RecyclingDrafter()
    state = drafter.start(context([[4, 5] * 6 + [7, 7]]))  # 7, 7 is new
    sizes = [
        int(drafter.propose(state, torch.tensor([7]), Plan(7, 7, threshold=part)).size) for part in (0.9, 0.5, 0.0)
    ]
    assert sizes[0] == 1 < sizes[1] < sizes[2] == 8


def test_a_chain_ends_at_a_successor_that_was_hardly_preferred() -> None:
    drafter = RecyclingDrafter()
    state = drafter.start(context([[1]]))
    logits = ranked([6, 2], [7, 2])
    logits[0, 0, 6], logits[0, 1, 7] = 6.0, -0.5  # 7 and 6 nats; 0.5
    drafter.update(state, trees_from_lists(torch.tensor([5]), [([6], [0])]), Scores(logits), verdict([0, 1], [6, 7]))
    chains = [drafter.propose(state, torch.tensor([5]), Plan(7, 7, threshold=part)).tokens for part in (0.3, 0.05)]
    assert [chain.tolist() for chain in chains] == [[[5, 6]], [[5, 6, 7]]]


def test_prompt_teaches_neighbours_but_padding_does_not() -> None:
    drafter = RecyclingDrafter()
    state = drafter.start(context([[7, 1, 2, 1, 3], [9, 9, 9, 9, 4]], [[True] * 5, [False] * 4 + [True]]))
    draft = drafter.propose(state, torch.tensor([1, 9]), Plan(4, 2))
    assert draft.size.tolist() == [4, 1]  # 1 -> 3, 2; 2 -> 1
    assert draft.tokens[0, 1:4].tolist() == [3, 2, 1]
    assert draft.parents[0, 1:4].tolist() == [0, 0, 2]


def test_accepted_nodes_prevail_over_rejected_ones() -> None:
    drafter = RecyclingDrafter()
    state = drafter.start(context([[5]]))
    # root 5 with children 6 (rejected) and 7 (accepted), 7's child is again 6 (accepted)
    draft = trees_from_lists(torch.tensor([5]), [([6, 7, 6], [0, 0, 2])])
    drafter.update(state, draft, Scores(ranked([7, 6], [1, 2], [6, 5], [3, 4])), verdict([0, 2, 3], [7, 6, 3]))
    drafted = drafter.propose(state, torch.tensor([6]), Plan(1, 1))
    assert drafted.tokens.tolist() == [[6, 3]]
    chain = drafter.propose(state, torch.tensor([5]), Plan(3, 3))
    assert is_chain(chain)
    assert chain.tokens.tolist() == [[5, 7, 6, 3]]


def test_successors_are_learned_at_rejected_nodes() -> None:
    drafter = RecyclingDrafter()
    state = drafter.start(context([[5]]))
    draft = trees_from_lists(torch.tensor([3]), [([8], [0])])
    drafter.update(state, draft, Scores(ranked([2], [11, 12])), verdict([0], [2]))
    assert drafter.propose(state, torch.tensor([8]), Plan(1, 1)).tokens.tolist() == [[8, 11]]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 30), st.integers(0, 6), st.integers(2, 12), st.integers(1, 4), st.integers(0, 999))
def test_drafts_are_trees_within_the_plan(nodes: int, depth: int, vocab: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    drafter, plan = RecyclingDrafter(), Plan(nodes, depth)
    state = drafter.start(context(torch.randint(vocab, (rows, 5), generator=generator).tolist()))
    roots = torch.randint(vocab, (rows,), generator=generator)
    for _ in range(4):
        draft = drafter.propose(state, roots, plan)
        check_form(draft, plan)
        assert int(draft.tokens.max()) < vocab
        logits = torch.randn(rows, draft.tokens.shape[1], vocab, generator=generator)
        zeros = torch.zeros(rows, dtype=torch.long)
        verdict = Verdict(zeros[:, None], roots, zeros.bool(), roots[:, None], zeros + 1)
        drafter.update(state, draft, Scores(logits), verdict)
        roots = torch.randint(vocab, (rows,), generator=generator)


def test_each_run_begins_with_a_copy_of_the_initial_successors() -> None:
    warm = torch.full((20, 8), -1)
    warm[3, :2] = torch.tensor([4, 5])
    drafter = RecyclingDrafter(warm)
    warm[3, 0] = 9
    memory, other = drafter.start(context([[1]])), drafter.start(context([[1]]))
    roots = torch.tensor([3])
    assert drafter.propose(memory, roots, Plan(2, 1)).tokens.tolist() == [[3, 4, 5]]
    drafter.update(memory, root_only(roots), Scores(ranked([6, 7])), verdict([0], [6]))
    assert drafter.propose(memory, roots, Plan(2, 1)).tokens.tolist() == [[3, 6, 7]]
    assert drafter.propose(other, roots, Plan(2, 1)).tokens.tolist() == [[3, 4, 5]]  # another run's is its own


def test_initial_successors_must_fit_the_target() -> None:
    drafter = RecyclingDrafter(torch.full((20, 8), -1))
    drafter.check(Size(20))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="each of the target's 21 tokens"):
        drafter.check(Size(21))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="matrix of token ids"):
        RecyclingDrafter(torch.zeros(20, 8))
    with pytest.raises(InputError, match="matrix of token ids"):
        RecyclingDrafter(torch.zeros(20, 4, dtype=torch.long))
