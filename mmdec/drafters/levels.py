"""Grows a draft network's draft, whose columns come after the accepted ones.

`Levels` runs the network once for each level. `BlockLevels` gets the states of all levels from one pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, cast, final

import numpy as np
import torch
from torch import Tensor, nn

from mmdec.decode.tree import (
    chains,
    in_order,
    int_list,
    int_rows,
    level_parents,
    likeliest_paths,
    top_indices,
    trees_from_lists,
)
from mmdec.drafters.draft_memory import Memory
from mmdec.drafters.small_model import Tree, draw_children, drawn_from
from mmdec.nn.draft_network import DraftNetwork
from mmdec.nn.draft_step import ColumnStep, TokenStep, Vector, quiet
from mmdec.types import Draft, Plan

LARGE = 4096  # vocabulary size from which the best tokens are searched in chunks


class Grower(Protocol):
    """The drafter for which `Levels` grows a draft: its network, its LM head, and how wide a level is."""

    width: int

    @property
    def network(self) -> DraftNetwork: ...
    @property
    def embedding(self) -> nn.Module: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class Levels:
    """Grows one draft after the accepted columns of a run. FLASH overrides `expand`."""

    def __init__(self, drafter: Grower, memory: Memory) -> None:
        self.drafter, self.memory = drafter, memory
        self.level = 0  # number of levels expanded so far
        self.offset = 0  # number of columns of these levels in the draft's cache
        self.visible: Tensor | None = None  # (B, n, columns) additive mask: which columns the last level's nodes see

    def expand(self, tokens: Tensor, features: Tensor, above: Tensor | None) -> Tensor:
        """Run the network over one level.

        tokens: (B, n). features: (B, n, H), hidden states of their parents. above: (B, n) the parents' indices in the
            last level; None for children of the root.
        Returns: the nodes' hidden states (B, n, H).
        """
        network, cache, memory = self.drafter.network, self.memory.cache, self.memory
        rows, size = tokens.shape
        states = network.follow(self.drafter.embedding(tokens), features, memory.carry)
        starts = memory.positions
        positions: Tensor | int = starts[0] + self.level
        if rows > 1:
            positions = positions_from([start + self.level for start in starts], 1, tokens.device).expand(-1, size)
        mask = None
        if size > 1 or self.visible is not None or cache.uneven:
            diagonal = torch.full((size, size), -math.inf, dtype=states.dtype, device=states.device).fill_diagonal_(0)
            before = self.visible
            if before is None:
                before = cache.mask(states.new_zeros(rows, 1, self.offset))[:, 0]
                before = before.expand(-1, size, -1)
            else:
                assert above is not None
                before = before.gather(1, above[..., None].expand(-1, -1, before.shape[2]))
            self.visible = torch.cat([before, diagonal.expand(rows, -1, -1)], -1)
            mask = self.visible[:, None]
        for index in range(network.depth):
            queries, keys, values = network.project(states, positions, memory.packed, index)
            keys, values = cache.draft(keys, values, self.offset, index)
            states = network.attend(states, queries, keys, values, mask, memory.packed, index)
        self.level, self.offset = self.level + 1, self.offset + size
        return states

    def chain(self, roots: Tensor, hidden: Tensor, depth: int, threshold: float = 0.0) -> Draft:
        """Draft a chain of likeliest tokens, until `threshold` (`Plan.threshold`) or `depth` ends it.

        roots: (B,) tokens. hidden: (B, 1, H), the root's hidden state. depth: maximum tokens. All rows get chains of
            the same length, because the target runs the same number of columns for every row.
        """
        step = self.memory.step
        if isinstance(step, ColumnStep) and len(roots) == 1 and step.reads(hidden):
            with quiet():
                return stepwise(step, roots, hidden[0, 0].numpy(), depth, threshold, self.follow)
        tokens: list[Tensor] = []
        chances = torch.ones(len(roots), 1, device=roots.device)
        above = torch.zeros_like(roots)[:, None]
        while True:
            logits = self.drafter.logits(hidden)
            tokens.append(self.drafter.network.token_ids(logits.argmax(-1)))
            if threshold:
                chances = chances * logits.float().softmax(-1).amax(-1)
            if len(tokens) == depth or (threshold and float(chances.mean()) < threshold):
                break
            hidden = self.expand(tokens[-1], hidden, above)
        drafted = torch.cat([roots[:, None], *tokens], 1)
        parents = torch.arange(-1, len(tokens), device=roots.device).expand_as(drafted)
        return Draft(drafted, parents.contiguous(), torch.full_like(roots, len(tokens) + 1))

    def follow(self, token: int, feature: Vector) -> Vector:
        """Run the network over one token of a chain. feature: (H,), its parent's hidden state. Returns its own (H,)."""
        step = self.memory.step
        assert isinstance(step, ColumnStep)
        self.level += 1
        keys, values = self.memory.cache.room(self.level)
        return step(token, feature, self.memory.positions[0] + self.level - 1, keys, values)

    def tree(self, roots: Tensor, hidden: Tensor, plan: Plan) -> Draft:
        """Grow an EAGLE-2 tree from hidden (B, 1, H) of the root. Nodes are numbered from 1 as they are made."""
        rows, _, size = hidden.shape
        width = min(self.drafter.width, plan.nodes, self.drafter.network.vocabulary)
        values, tokens = self._best(hidden, width)
        scores, tokens = values[:, 0], tokens[:, 0]  # (B, K), of the first level, whose nodes are all expanded
        candidates = [(scores, tokens)]
        orders: list[Tensor] = []  # for each level after the first, which of its K * K nodes are expanded
        features, above = hidden.expand(-1, width, -1), None
        for level in range(1, plan.depth):
            hidden = self.expand(tokens, features, above)
            values, tokens = self._best(hidden, width)
            scores, tokens = (scores[..., None] + values).flatten(1), tokens.flatten(1)  # (B, K * K)
            candidates.append((scores, tokens))
            if level + 1 < plan.depth:
                orders.append(scores.sort(dim=1, descending=True, stable=True).indices[:, :width])
                scores, tokens, above = scores.gather(1, orders[-1]), tokens.gather(1, orders[-1]), orders[-1] // width
                features = hidden.gather(1, above[..., None].expand(-1, -1, size))
        scores, tokens = (torch.cat(parts, 1) for parts in zip(*candidates, strict=True))
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, : plan.nodes]
        expanded = torch.stack(orders, 1).tolist() if orders else [[]] * rows
        lists = zip(best.tolist(), tokens.gather(1, best).tolist(), expanded, strict=True)
        return trees_from_lists(roots, [in_order(row, ids, level_parents(row, who, width)) for row, ids, who in lists])

    def _best(self, hidden: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and tokens (B, n, width) of the likeliest children of hidden (B, n, H)."""
        values, drafted = _best(self.drafter.logits(hidden), width)
        return values, self.drafter.network.token_ids(drafted)

    def drawn(self, roots: Tensor, hidden: Tensor, plan: Plan) -> Draft:
        """Draft a tree of children sampled without replacement, with their distributions as `probs`. hidden: (B, 1, H),
        the root's."""
        depth, vocab_size = min(plan.depth, plan.nodes), self.drafter.network.config.vocab_size
        trees = [Tree([root], values=[1.0]) for root in roots.tolist()]
        frontier = [[0] for _ in trees]
        above = [{0: 0} for _ in trees]  # node -> its index in the last level
        distributions: list[Tensor] = []  # for each level (B, n, V): the distributions of its nodes' children
        indices: list[dict[int, int]] = [{} for _ in trees]  # node -> its index over all levels
        offset = 0
        for level in range(depth):
            if level:
                size = max(map(len, frontier))
                rows = list(zip(trees, frontier, above, strict=True))
                blank = [[0] * (size - len(nodes)) for nodes in frontier]
                tokens = [
                    [tree.tokens[n] for n in nodes] + gap for (tree, nodes, _), gap in zip(rows, blank, strict=True)
                ]
                parents = [
                    [index_of[tree.parents[n]] for n in nodes] + gap
                    for (tree, nodes, index_of), gap in zip(rows, blank, strict=True)
                ]
                index = torch.tensor(parents, device=roots.device)
                features = hidden.gather(1, index[..., None].expand(-1, -1, hidden.shape[2]))
                hidden = self.expand(torch.tensor(tokens, device=roots.device), features, index if level > 1 else None)
                above = [{node: column for column, node in enumerate(nodes)} for nodes in frontier]
            probs = (self.drafter.logits(hidden).float() / cast(float, plan.temperature)).softmax(-1)
            distributions.append(self.drafter.network.spread(probs))
            for index_of, nodes in zip(indices, frontier, strict=True):
                index_of.update((node, offset + column) for column, node in enumerate(nodes))
            offset += hidden.shape[1]
            counts = [-(-(plan.nodes + 1 - len(tree.tokens)) // (depth - level)) for tree in trees]
            frontier = draw_children(trees, frontier, distributions[-1], counts, plan.generator)
            if not any(frontier):
                break
        best = [tree.best(plan.nodes) for tree in trees]
        probs = drawn_from(torch.cat(distributions, 1), indices, best, vocab_size)
        return trees_from_lists(roots, [tree.part(nodes) for tree, nodes in zip(trees, best, strict=True)], probs)


@final
class BlockLevels(Levels):
    """Grows one draft from states that one pass has computed for all depths (P-EAGLE, DFlash). A depth's distribution
    does not depend on the tokens above it."""

    def __init__(self, drafter: Grower, memory: Memory, hidden: Tensor) -> None:
        """hidden: (B, K, H), one state for each depth."""
        super().__init__(drafter, memory)
        self.hidden = hidden

    def expand(self, tokens: Tensor, features: Tensor, above: Tensor | None) -> Tensor:
        """Return the next level's hidden state (B, n, H), the same for all its nodes with `tokens` (B, n)."""
        self.level += 1
        return self.hidden[:, self.level : self.level + 1].expand(-1, tokens.shape[1], -1)

    def chain(self, roots: Tensor, hidden: Tensor, depth: int, threshold: float = 0.0) -> Draft:
        """Draft a chain as `Levels.chain` does, with one call of the LM head for all levels. hidden: not read."""
        logits = self.drafter.logits(self.hidden[:, :depth])
        tokens = self.drafter.network.token_ids(logits.argmax(-1))
        if threshold:
            below = logits.float().softmax(-1).amax(-1).cumprod(1).mean(0) < threshold
            tokens = tokens[:, : int_list(below.nonzero()[:1, 0] + 1)[0] if bool(below.any()) else depth]
        return chains(roots, int_rows(tokens))

    def tree(self, roots: Tensor, hidden: Tensor, plan: Plan) -> Draft:
        """Draft the `plan.nodes` nodes whose paths have the highest products of chances (DDTree), from at most `width`
        tokens of each depth. hidden: not read."""
        width = min(self.drafter.width, plan.nodes, self.drafter.network.vocabulary)
        values, tokens = self._best(self.hidden[:, : plan.depth], width)
        rows = zip(values.double().exp().tolist(), tokens.tolist(), strict=True)
        return trees_from_lists(roots, [_tree_of_ranks(chances, ids, plan.nodes) for chances, ids in rows])


def _tree_of_ranks(
    chances: Sequence[Sequence[float]], ids: Sequence[Sequence[int]], nodes: int
) -> tuple[list[int], list[int]]:
    """Return the tokens and parents of one row's likeliest paths. chances, ids: chance and token of
    each [depth][rank].
    """
    paths = sorted(likeliest_paths(chances, nodes))
    index = {(): 0} | {path: node for node, path in enumerate(paths, 1)}
    return [ids[len(path) - 1][path[-1]] for path in paths], [index[path[:-1]] for path in paths]


def stepwise(
    step: TokenStep,
    roots: Tensor,
    feature: Vector,
    depth: int,
    threshold: float,
    follow: Callable[[int, Vector], Vector],
) -> Draft:
    """Draft a chain for one row as `Levels.chain` does, token by token.

    feature: (H,) the root's feature. follow: (token, its parent's feature) -> the token's own feature.
    """
    chance, tokens = 1.0, list[int]()
    while True:
        logits = step.logits(feature)
        best = int(logits.argmax())
        tokens.append(step.token(best))
        if threshold:
            chance /= float(np.exp(logits - logits[best]).sum())
        if len(tokens) == depth or chance < threshold:
            drafted = torch.tensor([[int(roots), *tokens]])
            return Draft(drafted, torch.arange(-1, len(tokens))[None], torch.tensor([len(tokens) + 1]))
        feature = follow(tokens[-1], feature)


def _best(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and ids (B, n, width) of the likeliest tokens by logits (B, n, V), likeliest first."""
    chances = logits.log_softmax(-1).clamp_(max=0.0)  # rounding must not make a child likelier than its parent
    if logits.shape[-1] < LARGE:
        best = chances.topk(width)
        return best.values, best.indices
    tokens = top_indices(chances, width)
    return chances.gather(-1, tokens), tokens


def positions_from(starts: Sequence[int], size: int, device: torch.device) -> Tensor:
    """Return positions (B, size): each row counts up from its start."""
    if len(starts) == 1:
        return torch.arange(starts[0], starts[0] + size, device=device)[None]
    return torch.tensor(starts, device=device)[:, None] + torch.arange(size, device=device)
