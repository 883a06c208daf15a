"""Drafts with FLASH's head: one pass gives k slots, the hidden states of the next k tokens (arXiv 2505.12728; see
`mmdec.nn.flash`).

The order of operations is that of `tree_growing.py`: slot 0 of an accepted column is stored as a column of the cache. A
draft is one pass over the root's slots; each further level costs one call of the refiner and one of the LM head. The
paper's draft is a chain; beyond k tokens another pass runs over the head's own predictions. An option (not in the
paper) makes a tree from the slots: the best tokens of each slot are added below the best paths, scored and chosen as in
EAGLE-2, at most k deep.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast, final

import numpy as np
import torch
from torch import Tensor, nn

from mmdec.decode.tree import single
from mmdec.drafters.draft_memory import LastColumn, Memory, Waiting
from mmdec.drafters.levels import Levels, stepwise
from mmdec.drafters.tree_growing import WIDTH, TreeGrowing
from mmdec.nn.draft_step import SlotStep, Vector, quiet
from mmdec.nn.flash import FlashConfig, FlashNetwork
from mmdec.types import Context, Draft, Plan, Scores, Target, Verdict


@final
class Flash:
    """Drafts with FLASH's head, the target's embedding and its LM head. Holds weights only."""

    def __init__(
        self,
        network: FlashNetwork,
        embedding: nn.Module,
        output: nn.Linear,
        width: int = WIDTH,
        tree: bool | None = None,
    ) -> None:
        """network: FLASH's head. embedding, output: the target's embedding and LM head. width: maximum nodes
        of a level that are expanded.
        tree: whether to make a tree of the slots; None: the network's configuration decides.
        Raises: InputError if `output` does not fit the network, or `width` is below 1.
        """
        self._columns = TreeGrowing(network, embedding, output, width)
        self.network: FlashNetwork = network
        self.embedding, self.width, self.needs = embedding, width, self._columns.needs
        self.tree = cast(FlashConfig, network.config).tree if tree is None else tree

    @property
    def name(self) -> str:
        """Return a name made of the system, the width, a digest of the network's weights, and "chain" or "tree"."""
        return f"{self._columns.name}-{'tree' if self.tree else 'chain'}"

    def check(self, target: Target) -> None:
        """Raises InputError if the network belongs to another model, device or precision."""
        self._columns.check(target)

    def start(self, context: Context) -> Memory:
        """Make the memory of a run, without any pass. The memory of a chat's previous turn is continued if it fits."""
        return self._columns.start(context)

    def update(self, memory: Memory, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Queue the tokens and features of the accepted path, which the next draft processes first."""
        self._columns.update(memory, draft, scores, verdict)

    def select(self, memory: Memory, live: Tensor) -> None:
        """Keep only the rows whose indices are in `live` (K,) int64, in that order."""
        self._columns.select(memory, live)

    def propose(self, memory: Memory, roots: Tensor, plan: Plan) -> Draft:
        """Draft a chain of up to `plan.depth` tokens, or a tree with at most one level per slot."""
        depth = min(plan.depth, plan.nodes)
        if depth < 1:
            return single(roots)
        chain = not self.tree or plan.nodes <= plan.depth
        if chain:
            plan = replace(plan, nodes=depth, depth=depth)
        else:
            plan = replace(plan, depth=min(plan.depth, self.network.slots))
        if chain and plan.temperature is None and len(roots) == 1:
            waiting = self._columns.catch_up(memory)
            if not memory.asked:
                memory.asked = True
                memory.step = SlotStep.of(self.network, memory.packed, self.embedding, self._columns.output)
            step = memory.step
            if isinstance(step, SlotStep) and step.reads(waiting.features):
                with quiet():
                    blocks = Blocks(step, memory, waiting, depth)
                    return stepwise(step, roots, blocks.first, depth, plan.threshold, blocks.follow)
            last = self._columns.last_column(memory, waiting)
        else:
            last = self._columns.take_in(memory)
        slots = Slots(self, memory, last, plan.depth)
        if plan.temperature is not None:
            return slots.drawn(roots, slots.first, plan)
        if chain:
            return slots.chain(roots, slots.first, depth, plan.threshold)
        return slots.tree(roots, slots.first, plan)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the target's LM head to hidden states (..., H). Returns logits (..., V)."""
        return self._columns.logits(hidden)


class Slots(Levels):
    """Grows one draft from slots: each level is predicted from the next slot, refined by the path's tokens above it."""

    def __init__(self, drafter: Flash, memory: Memory, last: LastColumn, depth: int) -> None:
        """last: the root's column. depth: slots beyond this depth are not computed."""
        super().__init__(drafter, memory)
        self.head, self.depth, self.device = drafter.network, depth, last.states.device
        # (B, n, H): for each node of the last level, the sum of its path's embeddings
        self.preceding: Tensor | None = None
        self.path: list[tuple[Tensor, Tensor]] = []  # tokens (B, 1) and features (B, 1, H) since the block's first node
        self.done = 0  # number of slots of earlier blocks
        self.slots = self._pass(last.states, last.queries, last.features)  # (B, k', H) of k' unrefined slots

    @property
    def first(self) -> Tensor:
        """Return the feature (B, 1, H) from which the first level is predicted."""
        return self.slots[:, :1]

    def expand(self, tokens: Tensor, features: Tensor, above: Tensor | None) -> Tensor:
        """Compute the next slot for nodes with tokens (B, n) and their parents' features (B, n, H).

        A chain that has used all slots continues with the next block's slots. above: (B, n) the parents' indices in the
        last level.
        Returns: hidden (B, n, H).
        """
        self.level += 1
        index = self.level - self.done
        if tokens.shape[1] == 1:
            self.path.append((tokens, features))
        if index == self.head.slots:
            return self._next_block()
        preceding = self.drafter.embedding(tokens)
        if self.preceding is not None:
            before = self.preceding
            if above is not None:
                before = before.gather(1, above[..., None].expand(-1, -1, before.shape[2]))
            preceding = preceding + before
        self.preceding = preceding
        return self.head.refined(self.slots[:, index : index + 1].expand_as(preceding), preceding, index)

    def _next_block(self) -> Tensor:
        """Process the block's predictions as columns, then compute the last one's slots. Returns slot 0 (B, 1, H)."""
        tokens, features = (torch.cat(parts, 1) for parts in zip(*self.path, strict=True))  # (B, k), (B, k, H)
        states = self.head.fuse(self.drafter.embedding(tokens), features)
        queries, keys, values = self.head.project(states, self._positions(states.shape[1]), self.memory.packed)
        self.memory.cache.draft(keys, values, self.offset)
        self.offset, self.done = self.offset + states.shape[1], self.level
        self.preceding, self.path = None, []
        self.slots = self._pass(states[:, -1:], queries[:, :, -1:], features[:, -1:])
        return self.first

    def _pass(self, states: Tensor, queries: Tensor, features: Tensor) -> Tensor:
        """Compute the slots of a column whose keys and values are cached.

        states: (B, 1, H). queries: (B, heads, 1, d). features: (B, 1, H). Returns: (B, k', H), as many as the depth
            needs.
        """
        cache, config = self.memory.cache, self.head.config
        count = min(self.head.slots, self.depth - self.done)
        spread = self.head.slot_states(states)[:, 0, :count]  # (B, k', H)
        keys = values = states.new_empty(len(states), config.num_key_value_heads, 0, config.head_dim)
        if count > 1:
            others, keys, values = self.head.project(spread[:, 1:], self._positions(count - 1), self.memory.packed)
            queries = torch.cat([queries, others], 2)
        keys, values = cache.draft(keys, values, self.offset)
        # All slots see the columns, their own included; slot i also sees slots 1 .. i.
        slot_mask = torch.full((count, count - 1), -math.inf, dtype=states.dtype, device=states.device).triu()
        slot_mask = torch.cat([slot_mask.new_zeros(count, self.offset), slot_mask], 1)
        mask = cache.mask(slot_mask.expand(len(states), -1, -1))
        hidden = self.head.attend(spread, queries, keys, values, mask, self.memory.packed)
        return self.head.finish(hidden, features[:, 0])

    def _positions(self, count: int) -> Tensor:
        """Return positions (B, count) that follow the block's column."""
        starts = torch.tensor(self.memory.positions, device=self.device)[:, None]
        return starts + self.done + torch.arange(count, device=self.device)


class Blocks:
    """Does the same as `Slots` for a chain of one row, token by token, which takes less time."""

    def __init__(self, step: SlotStep, memory: Memory, waiting: Waiting, depth: int) -> None:
        """waiting: accepted columns to process first. depth: slots beyond this depth are not computed."""
        self.step, self.memory, self.depth = step, memory, depth
        self.done, self.offset = 0, 0  # number of slots and of columns of earlier blocks
        count = waiting.counts[0]
        self.slots = self._pass(waiting.tokens[0, :count].tolist(), waiting.features.detach().numpy()[0, :count])
        memory.cache.keep(count)
        memory.positions = [memory.positions[0] + count]
        self.offset = 0

    @property
    def first(self) -> Vector:
        """Return the feature (H,) from which the first token is predicted."""
        return self.slots[0]

    def follow(self, token: int, feature: Vector) -> Vector:
        """Return the next slot (H,), given a token and its parent's feature (H,); refined by the tokens of its path."""
        self.path.append((token, feature))
        index = len(self.path)
        if index == self.step.slots:
            tokens, features = zip(*self.path, strict=True)
            self.done += index
            self.slots = self._pass(tokens, np.stack(features))
            return self.first
        own = self.step.embedding[token]
        self.preceding = own if index == 1 else self.preceding + own
        return self.step.refined(self.slots[index], self.preceding, index)

    def _pass(self, tokens: Sequence[int], features: Vector) -> Vector:
        """Process columns with tokens (n,) and features (n, H). Returns the last column's slots (k', H)."""
        count = min(self.step.slots, self.depth - self.done)
        keys, values = self.memory.cache.room(self.offset + len(tokens) + count - 1, self.step.column)
        position = self.memory.positions[0] + self.offset
        self.offset += len(tokens)
        self.path: list[tuple[int, Vector]] = []  # tokens and features (H,) since the block's first node
        self.preceding = features[-1]  # a placeholder (H,): `follow` sets the sum of the path's embeddings
        return self.step.block(tokens, features, position, count, keys, values)
