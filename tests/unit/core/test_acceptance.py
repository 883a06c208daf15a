"""Tests the estimates of acceptance, for chains, chains that end early, and trees."""

from __future__ import annotations

import pytest

from mmdec.core.statistics import DEFAULT_ACCEPTANCE, MAX_CHAIN_NODES, ROUND_DECAY, Acceptance, expected_in_tree
from mmdec.types import Plan


def test_acceptance_counts_what_was_offered() -> None:
    known = Acceptance()
    for _ in range(60):
        known.learn(Plan(5, 5), [3, 1], 2, [2, 0])  # a draft of two nodes in one row, none in the other
    first, second, third = known.chain()[:3]
    assert first == pytest.approx(0.5, abs=0.02)
    assert second > 0.9
    assert third == second  # never offered


def test_measured_acceptance_replaces_the_drafters_own_probabilities() -> None:
    hopeful, plain = Acceptance([0.9, 0.8, 0.7]), Acceptance()
    assert hopeful.chain()[:4] == pytest.approx([0.9, 0.8, 0.7, 0.0])
    assert plain.chain()[0] == pytest.approx(0.6)
    for _ in range(60):
        hopeful.learn(Plan(3, 3), [4], 3, [0])
    assert hopeful.chain()[0] < 0.1


def test_what_chains_that_end_early_draft_and_give_is_counted() -> None:
    learned = Acceptance()
    for _ in range(400):
        learned.learn(Plan(3, 3, threshold=0.2), [4], 3, [2], True)
        learned.learn(Plan(3, 3, threshold=0.2), [2], 1, [0], True)
        learned.learn(Plan(3, 3, threshold=0.2), [1], 0, [0], True)  # nothing proposed
    drafted, accepted = learned.ending_chains(learned.chain())
    assert drafted[:3] == pytest.approx([1.0, 1.5, 2.0], abs=0.05)  # of rounds with a draft
    assert accepted[:3] == pytest.approx([1 / 3, 2 / 3, 2 / 3], abs=0.05)
    for _ in range(400):
        learned.learn(Plan(1, 1), [2], 1, [0], True)  # a plan without a threshold teaches, too
    assert learned.ending_chains(learned.chain())[1][0] < 0.05


def test_an_unknown_drafter_has_one_acceptance_for_every_node() -> None:
    assert Acceptance().chain() == pytest.approx([DEFAULT_ACCEPTANCE] * MAX_CHAIN_NODES)
    assert len(Acceptance([0.5] * 100).prior) == MAX_CHAIN_NODES


def test_old_rounds_decay() -> None:
    known = Acceptance()
    known.learn(Plan(1, 1), [2], 1, [1])
    known.learn(Plan(1, 1), [2], 1, [0])
    assert known.nodes[0].accepted == pytest.approx(ROUND_DECAY)
    assert known.nodes[0].tried == pytest.approx(ROUND_DECAY + 1)


@pytest.mark.parametrize(("nodes", "depth", "expected"), [(2, 2, 0.5 + 0.25), (4, 1, 0.75), (8, 2, 0.75 + 0.75**2)])
def test_a_tree_misses_as_often_as_one_node_over_the_root_of_its_width(nodes: int, depth: int, expected: float) -> None:
    assert expected_in_tree(nodes, depth, [0.5] * 9) == pytest.approx(expected)


def test_acceptance_of_a_tree_is_measured_or_estimated_from_other_trees() -> None:
    known = Acceptance([0.5] * 4)
    probabilities = known.chain()
    before = known.tree(8, 2, probabilities), known.tree(4, 1, probabilities)
    assert before == pytest.approx((expected_in_tree(8, 2, probabilities), expected_in_tree(4, 1, probabilities)))
    for _ in range(100):
        known.learn(Plan(8, 2), [9], 2, [0])
    assert known.tree(8, 2, probabilities) < 0.1  # its own
    assert known.tree(4, 1, probabilities) < before[1] / 2  # another, whose guess is no longer believed


def test_a_drafter_that_makes_no_trees_is_noticed_until_it_makes_one() -> None:
    known = Acceptance()
    for _ in range(3):
        known.learn(Plan(8, 2), [3], 2, [0])  # a chain, where a tree was asked
    assert known.makes_only_chains
    known.learn(Plan(8, 2), [9], 2, [0])
    assert not known.makes_only_chains
    assert known.since_chain == 1
