"""Trees of tokens: from lists, their depths, heights and ancestors."""

from __future__ import annotations

from random import Random

import pytest
import torch

from mmdec.core import tree as trees
from mmdec.core.tree import PrefixTree, ancestors, chain_drafts, depths, height, root_only, trees_from_lists
from tests.support.trees import is_chain


def test_trees_are_built_from_lists() -> None:
    """0 -> 1 (token 2) -> 3 (token 4) -> 4 (token 5), and 0 -> 2 (token 3); the second row is a chain of one."""
    draft = trees_from_lists(torch.tensor([1, 1]), [([2, 3, 4, 5], [0, 0, 1, 3]), ([6], [0])])
    assert draft.tokens.tolist() == [[1, 2, 3, 4, 5], [1, 6, 0, 0, 0]]
    assert draft.parents.tolist() == [[-1, 0, 0, 1, 3], [-1, 0, 0, 0, 0]]
    assert draft.size.tolist() == [5, 2]
    assert depths(draft.parents[0].tolist()) == [0, 1, 1, 2, 3]
    assert height(draft) == 3
    assert not is_chain(draft)
    assert is_chain(root_only(torch.tensor([3, 4])))
    assert is_chain(chain_drafts(torch.tensor([1, 2, 3]), [[4, 5], [], [6]]))
    assert height(root_only(torch.tensor([3]))) == 0
    assert chain_drafts(torch.tensor([1, 2]), [[], []]).tokens.tolist() == [[1], [2]]


@pytest.mark.parametrize("size", [1, 2, 3, 9, 40])
def test_ancestors_equal_a_walk_along_the_parents(size: int) -> None:
    random = Random(size)
    parents = torch.tensor([[-1, *(random.randrange(node) for node in range(1, size))] for _ in range(4)])
    parents[0] = torch.arange(size) - 1  # a chain, the deepest of all
    expected = torch.zeros(4, size, size, dtype=torch.bool)
    for row in range(4):
        for node in range(size):
            above = node
            while above >= 0:
                expected[row, node, above] = True
                above = int(parents[row, above])
    assert torch.equal(ancestors(parents), expected)


def test_an_empty_draft_is_its_root() -> None:
    roots = torch.tensor([4, 5])
    draft, plain = trees_from_lists(roots, [([], []), ([], [])]), root_only(roots)
    assert [part.tolist() for part in (draft.tokens, draft.parents, draft.size)] == [[[4], [5]], [[-1], [-1]], [1, 1]]
    assert [part.tolist() for part in (plain.tokens, plain.parents, plain.size)] == [[[4], [5]], [[-1], [-1]], [1, 1]]


def test_padding_does_not_count_for_the_height() -> None:
    """The second row is short: what stands in its gap is no node."""
    draft = trees_from_lists(torch.tensor([1, 1]), [([2, 3], [0, 0]), ([], [])])
    assert height(draft) == 1


def test_probabilities_are_passed_on() -> None:
    probs = torch.rand(1, 2, 3)
    assert trees_from_lists(torch.tensor([1]), [([2], [0])], probs).probs is probs


@pytest.mark.parametrize("few", [0, trees.MAX_DIRECT_TOP_K])
@pytest.mark.parametrize("vocab", [3, 8, 100, 64 * 17, 64 * 17 + 5, 64 * 40 + 63])
def test_top_indices_equal_topk(vocab: int, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MAX_DIRECT_TOP_K", few)
    logits = torch.randn(2, 3, vocab, generator=torch.Generator().manual_seed(vocab))
    assert torch.equal(trees.top_indices(logits, 8), logits.topk(min(8, vocab)).indices)


def test_a_prefix_tree_shares_nodes_and_ends_at_its_limits() -> None:
    tree = PrefixTree(nodes=3, depth=2)
    first = tree.add(0, 7)
    assert tree.add(0, 7) == first == tree.child(0, 7) == 1
    second = tree.add(first, 7)
    assert not tree.add(second, 7)  # too deep
    assert not tree.is_full
    assert tree.add(0, 8) == 3
    assert tree.is_full
    assert not tree.add(0, 9)
    assert tree.add(0, 8) == 3  # what is there stays reachable
    assert (tree.tokens, tree.parents) == ([7, 7, 8], [0, 1, 0])
