"""Functions for tests of drafts' trees."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from mmdec.core.tree import chain_drafts
from mmdec.types import Draft, Verdict
from tests.support.tiny_text import VOCABULARY


def is_chain(draft: Draft) -> bool:
    """Return whether each node's parent is the node before it. Padding is ignored."""
    rows = zip(draft.parents.tolist(), draft.size.tolist(), strict=True)
    return all(parents[:size] == list(range(-1, size - 1)) for parents, size in rows)


def random_draft(rng: random.Random, batch: int, nodes: int) -> Draft:
    """Draw a batch of random trees with at most `nodes` nodes, of which one has exactly that many."""
    sizes = [rng.randint(1, nodes) for _ in range(batch)]
    sizes[rng.randrange(batch)] = nodes
    parents = [[-1] + [rng.randrange(node) if node < size else 0 for node in range(1, nodes)] for size in sizes]
    tokens = torch.tensor([[rng.randrange(VOCABULARY) for _ in range(nodes)] for _ in range(batch)])
    return Draft(tokens, torch.tensor(parents), torch.tensor(sizes))


def random_chains(lengths: Sequence[int]) -> Draft:
    """Draw chains of these numbers of nodes, root included."""
    torch.manual_seed(2)
    nodes = torch.randint(2, 40, (len(lengths), max(lengths)))
    return chain_drafts(nodes[:, 0], [row[1:length] for row, length in zip(nodes.tolist(), lengths, strict=True)])


def way(parents: list[int], node: int) -> list[int]:
    """Return the nodes from the root down to a node."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def verdict_of(paths: list[list[int]]) -> Verdict:
    """Make a verdict with these accepted paths. Its other fields are dummies, because a target uses only the path."""
    width, rows = max(map(len, paths)), len(paths)
    path = torch.tensor([nodes + [-1] * (width - len(nodes)) for nodes in paths])
    ones = torch.ones(rows, dtype=torch.long)
    return Verdict(path, ones, ones == 0, ones[:, None], ones)
