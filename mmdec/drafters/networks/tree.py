"""Grows a draft with a draft network, level by level of the tree.

`Levels` runs the network once for each level. `BlockLevels` reads hidden states that one pass has computed for all
levels. In the cache, the draft's positions come after those of the accepted tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, final

import numpy as np
import torch
from torch import Tensor, nn

from mmdec.core.tree import (
    chain_drafts,
    int_list,
    int_rows,
    level_parents,
    sort_depth_first,
    top_indices,
    trees_from_lists,
)
from mmdec.core.tree_shape import likeliest_paths
from mmdec.drafters.growing_tree import SampledTrees
from mmdec.drafters.networks.cpu_step import CpuStep, SingleTokenStep, Vector, ignore_overflow
from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.drafters.networks.kv_cache import DraftState
from mmdec.drafters.networks.layers import positions_from
from mmdec.drafters.networks.vocabulary import DraftVocabulary
from mmdec.types import Draft, Plan

LARGE_VOCABULARY = 4096  # from this vocabulary size on, `top_indices` finds the best tokens faster than `torch.topk`


class Grower(Protocol):
    """What `Levels` needs of a drafter: its draft network, embedding and LM head, and `width`.

    `width` is the maximum number of nodes in a tree level that get children.
    """

    width: int

    @property
    def network(self) -> DraftNetwork: ...
    @property
    def embedding(self) -> nn.Module: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class Levels:
    """Grows one draft after the accepted tokens: a chain, a tree, or a sampled tree.

    FLASH's subclass overrides `expand`. It holds the number of levels so far and the attention mask of the newest
    level.
    """

    def __init__(self, drafter: Grower, state: DraftState) -> None:
        self.drafter, self.state = drafter, state
        self.level = 0  # number of levels so far
        self.offset = 0  # number of nodes of these levels, which is their number of positions in the cache
        # (B, n, positions), additive mask that says which of the draft's positions the n nodes of the newest level see
        self.visible: Tensor | None = None

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The tokens that can be drafted."""
        return self.drafter.network.draft_vocabulary

    @property
    def max_children(self) -> int:
        """The number of a node's children that can have a probability above 0."""
        return self.vocabulary.size

    def expand(self, tokens: Tensor, features: Tensor, above: Tensor | None) -> Tensor:
        """Run the network over one level of n nodes.

        Args:
            tokens: (B, n), the nodes' tokens.
            features: (B, n, H), hidden states of their parents.
            above: (B, n), indices of the parents in the level above; None for children of the root.

        Returns:
            The nodes' hidden states (B, n, H).
        """
        cache, state = self.state.cache, self.state
        network = self.drafter.network.condition_on(state.condition)
        rows, size = tokens.shape
        states = network.fuse_drafted(self.drafter.embedding(tokens), features)
        starts = state.positions
        positions: Tensor | int = starts[0] + self.level
        if rows > 1:
            positions = positions_from([start + self.level for start in starts], 1, tokens.device).expand(-1, size)
        mask = None
        if size > 1 or self.visible is not None or cache.is_ragged:
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
            layer = network.layer(index)
            queries, keys, values = layer.project(states, positions, state.packed)
            keys, values = cache.draft(keys, values, self.offset, index)
            states = layer.attend(states, queries, keys, values, mask, state.packed)
        self.level, self.offset = self.level + 1, self.offset + size
        return network.output_norm(states)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits (B, n, V) of the children of the newest level's nodes, from their hidden states."""
        return self.drafter.logits(hidden)

    def acceptance_probability(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """Estimate how probable it is that each node's likeliest child is accepted if the node is.

        Args:
            logits: (B, n, V), of the children of n nodes.
            hidden: (B, n, H), the nodes' hidden states.

        Returns:
            (B, n).
        """
        return self.drafter.network.acceptance_probability(logits, hidden)

    def chain(self, roots: Tensor, hidden: Tensor, depth: int, threshold: float = 0.0) -> Draft:
        """Draft a chain of the likeliest tokens in each batch row.

        All rows get chains of the same length, because the target processes the same number of tokens in every row.

        Args:
            roots: (B,), each row's last token.
            hidden: (B, 1, H), the network's hidden state at this token.
            depth: Maximum tokens.
            threshold: The chain ends after the first token whose estimated probability to be accepted together with all
                tokens before it, averaged over the rows, is below this; 0: it never ends early.
        """
        step = self.state.step
        if isinstance(step, SingleTokenStep) and len(roots) == 1 and step.can_read(hidden):
            with ignore_overflow():
                return draft_chain(step, roots, hidden[0, 0].numpy(), depth, threshold, self.advance)
        tokens: list[Tensor] = []
        probabilities = torch.ones(len(roots), 1, device=roots.device)
        above = torch.zeros_like(roots)[:, None]
        while True:
            logits = self.logits(hidden)
            tokens.append(self.vocabulary.token_ids(logits.argmax(-1)))
            if threshold:
                probabilities = probabilities * self.acceptance_probability(logits, hidden)
            if len(tokens) == depth or (threshold and float(probabilities.mean()) < threshold):
                break
            hidden = self.expand(tokens[-1], hidden, above)
        drafted = torch.cat([roots[:, None], *tokens], 1)
        parents = torch.arange(-1, len(tokens), device=roots.device).expand_as(drafted)
        return Draft(drafted, parents.contiguous(), torch.full_like(roots, len(tokens) + 1))

    def advance(self, token: int, feature: Vector) -> Vector:
        """Run the network over one token of a chain, for a single row.

        Args:
            feature: (H,), hidden state of the token before.

        Returns:
            The token's hidden state (H,).
        """
        step = self.state.step
        assert isinstance(step, SingleTokenStep)
        self.level += 1
        keys, values = self.state.cache.reserve(self.level)
        return step(token, feature, self.state.positions[0] + self.level - 1, keys, values)

    def tree(self, roots: Tensor, hidden: Tensor, plan: Plan) -> Draft:
        """Draft an EAGLE-2 tree in each batch row.

        Expand the likeliest nodes of each level, then take the likeliest nodes of all levels.

        Args:
            roots: (B,), each row's last token.
            hidden: (B, 1, H), the network's hidden state at this token.
        """
        rows = len(hidden)
        width = min(self.drafter.width, plan.nodes, self.max_children)
        values, tokens = self._best(hidden, width)
        scores, tokens = values[:, 0], tokens[:, 0]  # (B, K): the first level; all its nodes get children
        candidates = [(scores, tokens)]
        orders: list[Tensor] = []  # (B, K) for each level from the second on: which K of its K * K nodes get children
        features, above = hidden.expand(-1, width, -1), None
        for level in range(1, plan.depth):
            hidden = self.expand(tokens, features, above)
            values, tokens = self._best(hidden, width)
            scores, tokens = (scores[..., None] + values).flatten(1), tokens.flatten(1)  # shape (B, K * K)
            candidates.append((scores, tokens))
            if level + 1 < plan.depth:
                orders.append(scores.sort(dim=1, descending=True, stable=True).indices[:, :width])
                scores, tokens, above = scores.gather(1, orders[-1]), tokens.gather(1, orders[-1]), orders[-1] // width
                features = hidden.gather(1, above[..., None].expand(-1, -1, hidden.shape[2]))
        scores, tokens = (torch.cat(parts, 1) for parts in zip(*candidates, strict=True))
        best = scores.sort(dim=1, descending=True, stable=True).indices[:, : plan.nodes]
        expanded = torch.stack(orders, 1).tolist() if orders else [[]] * rows
        lists = zip(best.tolist(), tokens.gather(1, best).tolist(), expanded, strict=True)
        return trees_from_lists(
            roots,
            [
                sort_depth_first(row, ids, level_parents(row, expanded_nodes, width))
                for row, ids, expanded_nodes in lists
            ],
        )

    def _best(self, hidden: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and token ids (B, n, width) of the likeliest children of n nodes.

        Args:
            hidden: (B, n, H), the nodes' hidden states.
        """
        values, drafted = _best(self.logits(hidden), width)
        return values, self.vocabulary.token_ids(drafted)

    def sampled_tree(self, roots: Tensor, hidden: Tensor, plan: Plan) -> Draft:
        """Draft a tree in each batch row by sampling children without replacement.

        The draft's `probs` are the distributions that the children were sampled from.

        Args:
            roots: (B,), each row's last token.
            hidden: (B, 1, H), the network's hidden state at this token.
        """
        depth = min(plan.depth, plan.nodes)
        drawn = SampledTrees(roots, plan, depth, self.vocabulary.target_size)
        above = [{0: 0} for _ in drawn.trees]  # for each row: node -> its index among the newest level's nodes
        for level in range(depth):
            if level:
                size = max(map(len, drawn.frontier))
                rows = list(zip(drawn.trees, drawn.frontier, above, strict=True))
                blank = [[0] * (size - len(nodes)) for nodes in drawn.frontier]
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
                above = [{node: column for column, node in enumerate(nodes)} for nodes in drawn.frontier]
            if not any(drawn.grow(self.vocabulary.target_logits(self.logits(hidden)))):
                break
        return drawn.draft()


@final
class BlockLevels(Levels):
    """Grows one draft from hidden states that one pass has computed for all depths (P-EAGLE, DFlash).

    It holds these states. The distribution at a depth does not depend on the tokens above it.

    Args:
        hidden: (B, K, H), one state for each depth.
    """

    def __init__(self, drafter: Grower, state: DraftState, hidden: Tensor) -> None:
        super().__init__(drafter, state)
        self.hidden = hidden

    def expand(self, tokens: Tensor, features: Tensor, above: Tensor | None) -> Tensor:
        """Return the next level's hidden states (B, n, H), which are the same for all n nodes.

        Args:
            tokens: (B, n); only its shape is read.
        """
        self.level += 1
        return self.hidden[:, self.level : self.level + 1].expand(-1, tokens.shape[1], -1)

    def chain(self, roots: Tensor, hidden: Tensor, depth: int, threshold: float = 0.0) -> Draft:
        """Draft a chain of the likeliest tokens in each batch row, with one call of the LM head for all depths.

        Arguments are those of `Levels.chain`; `hidden` is not read.
        """
        hidden = self.hidden[:, :depth]
        logits = self.logits(hidden)
        tokens = self.vocabulary.token_ids(logits.argmax(-1))
        if threshold:
            below = self.acceptance_probability(logits, hidden).cumprod(1).mean(0) < threshold
            tokens = tokens[:, : int_list(below.nonzero()[:1, 0] + 1)[0] if bool(below.any()) else depth]
        return chain_drafts(roots, int_rows(tokens))

    def tree(self, roots: Tensor, hidden: Tensor, plan: Plan) -> Draft:
        """Draft the `plan.nodes` nodes whose paths have the highest products of probabilities (DDTree).

        Each depth offers its `width` likeliest tokens.

        Args:
            hidden: Not read.
        """
        width = min(self.drafter.width, plan.nodes, self.vocabulary.size)
        values, tokens = self._best(self.hidden[:, : plan.depth], width)
        rows = zip(values.double().exp().tolist(), tokens.tolist(), strict=True)
        return trees_from_lists(roots, [_tree_of_ranks(probabilities, ids, plan.nodes) for probabilities, ids in rows])


def _tree_of_ranks(
    probabilities: Sequence[Sequence[float]], ids: Sequence[Sequence[int]], nodes: int
) -> tuple[list[int], list[int]]:
    """Return tokens and parents' indices of the `nodes` likeliest nodes of one batch row; parent 0 is the root.

    Args:
        probabilities: [depth][rank], probability of the k-th best token (rank k).
        ids: [depth][rank], id of that token.
    """
    paths = sorted(likeliest_paths(probabilities, nodes))
    index = {(): 0} | {path: node for node, path in enumerate(paths, 1)}
    return [ids[len(path) - 1][path[-1]] for path in paths], [index[path[:-1]] for path in paths]


def draft_chain(
    step: CpuStep,
    roots: Tensor,
    feature: Vector,
    depth: int,
    threshold: float,
    advance: Callable[[int, Vector], Vector],
) -> Draft:
    """Draft a chain of the likeliest tokens for a single row, token by token, on NumPy arrays.

    Args:
        step: Faster code for the LM head.
        roots: (1,), the last token.
        feature: (H,), hidden state at this token.
        depth: Maximum tokens.
        threshold: The chain ends after the first token whose probability to be accepted together with all tokens before
            it is below this.
        advance: Called with a token and the hidden state before it; returns the hidden state (H,) at the token.
    """
    probability, tokens = 1.0, list[int]()
    while True:
        logits = step.logits(feature)
        best = int(logits.argmax())
        tokens.append(step.token(best))
        if threshold:
            probability /= float(np.exp(logits - logits[best]).sum())
        if len(tokens) == depth or probability < threshold:
            drafted = torch.tensor([[int(roots), *tokens]])
            return Draft(drafted, torch.arange(-1, len(tokens))[None], torch.tensor([len(tokens) + 1]))
        feature = advance(tokens[-1], feature)


def _best(logits: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and ids (B, n, width) of the likeliest tokens, likeliest first.

    Args:
        logits: (B, n, V).
    """
    logprobs = logits.log_softmax(-1).clamp_(max=0.0)  # rounding could make a child likelier than its parent
    if logits.shape[-1] < LARGE_VOCABULARY:
        best = logprobs.topk(width)
        return best.values, best.indices
    tokens = top_indices(logprobs, width)
    return logprobs.gather(-1, tokens), tokens
