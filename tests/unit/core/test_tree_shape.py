"""Trees from independent guesses: which nodes are the likeliest, and how ranks are learned."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from math import prod
from random import Random

import pytest

from mmdec.core.tree_shape import TREE_REUSE_OBSERVATIONS, HeadAccuracy, likeliest_paths
from mmdec.errors import InputError


def test_trees_hold_the_most_probable_nodes() -> None:
    ranks = HeadAccuracy([[0.5, 0.3, 0.1], [0.6, 0.2, 0.0], [0.9, 0.1, 0.0]])
    assert ranks.tree(2, 4) == [(0, 0, 0), (1, 1, 0)]  # a plan for a chain
    # 0.5, (0,0) 0.3, (1) 0.3, (0,0,0) 0.27, (1,0) 0.18, (1,0,0) 0.162
    assert ranks.tree(6, 3) == [(0, 0, 0), (1, 1, 0), (2, 2, 0), (0, 0, 1), (4, 1, 0), (5, 2, 0)]
    assert len(ranks.tree(1000, 3)) == 3 * (1 + 2 * (1 + 2))  # nothing that cannot be


def test_acceptance_by_rank_is_learned() -> None:
    ranks = HeadAccuracy([[0.9, 0.1], [0.9, 0.1]])
    for _ in range(400):
        ranks.learn(0, 1)
        ranks.learn(1, None)
    (none, always), (never, _) = ranks.probabilities()
    assert always > 0.95
    assert none < 0.05
    assert never < 0.1
    assert ranks.tree(3, 2)[0] == (0, 0, 0)
    assert sum(level == 0 for _, level, _ in ranks.tree(3, 2)) == 2


@pytest.mark.parametrize("ranks", [[[0.9, 0.2]], [[0.9], [0.1, 0.2]], [[]], [[-0.1, 0.5]]])
def test_ranks_must_be_probabilities(ranks: list[list[float]]) -> None:
    with pytest.raises(InputError, match="`ranks`"):
        HeadAccuracy(ranks)


@pytest.mark.parametrize("seed", range(4))
def test_the_likeliest_are_those_of_a_list_of_all(seed: int) -> None:
    rng = Random(seed)
    probabilities = [sorted((rng.random() / 3 for _ in range(3)), reverse=True) for _ in range(3)]
    every = [path for depth in (1, 2, 3) for path in product(range(3), repeat=depth)]
    value = {path: prod(probabilities[level][rank] for level, rank in enumerate(path)) for path in every}
    result = likeliest_paths(probabilities, 12)
    assert [value[path] for path in result] == pytest.approx(sorted(value.values(), reverse=True)[:12])
    assert all(path[:-1] in ((), *result[:place]) for place, path in enumerate(result))  # after its parent


@pytest.mark.parametrize(("probabilities", "nodes"), [([], 5), ([[0.5]], 0), ([[0.0, 0.0]], 5)])
def test_impossible_paths_have_no_nodes(probabilities: list[list[float]], nodes: int) -> None:
    assert likeliest_paths(probabilities, nodes) == []


def test_trees_are_recomputed_after_some_observations() -> None:
    ranks = HeadAccuracy([[0.6, 0.4], [0.6, 0.4]])
    before = ranks.tree(3, 2)
    for _ in range(TREE_REUSE_OBSERVATIONS - 1):
        ranks.learn(0, 1)
    assert ranks.tree(3, 2) is before
    ranks.learn(0, 1)
    assert ranks.tree(3, 2) != before


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_a_copy_has_the_same_counts_and_learns_independently(copied: Callable[[HeadAccuracy], HeadAccuracy]) -> None:
    ranks = HeadAccuracy([[0.9, 0.1], [0.5, 0.3]])
    ranks.learn(1, 0)
    again, before = copied(ranks), ranks.probabilities()
    assert again.probabilities() == before
    assert (again.depth, again.width) == (2, 2)
    again.learn(1, 1)
    assert ranks.probabilities() == before != again.probabilities()
