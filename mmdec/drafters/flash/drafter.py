"""Drafts with FLASH's head (arXiv 2505.12728): one pass computes k "slots", hidden states for the next k tokens.

One pass computes the slots after the last token. Then each further depth needs one call of a small refiner, which adds
the tokens drafted so far to the slot, and one call of the LM head. The paper drafts chains. For more than k tokens,
another pass runs over the head's own predictions. An option that is not in the paper makes a tree of depth k at most:
the best tokens of each slot are added below the best paths, and nodes are scored and chosen as in EAGLE-2. Only
accepted tokens, processed as slot 0, stay in the head's cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import cast, final

import numpy as np
import torch
from torch import Tensor, nn

from mmdec.core.tree import root_only
from mmdec.drafters.flash.cpu_step import SlotStep
from mmdec.drafters.flash.network import FlashConfig, FlashNetwork
from mmdec.drafters.networks.cpu_step import Vector, ignore_overflow
from mmdec.drafters.networks.drafter import DEFAULT_TREE_WIDTH, NetworkDrafter
from mmdec.drafters.networks.kv_cache import DraftState, PendingTokens, RootState
from mmdec.drafters.networks.tree import Levels, draft_chain
from mmdec.types import Context, Draft, Plan, Scores, Target, Verdict


@final
class FlashDrafter:
    """A drafter that uses FLASH's head, the target's embedding and its LM head.

    It holds weights only; the state of a `generate` call is in `DraftState`.

    Args:
        network: FLASH's head.
        embedding: The target's embedding (`model.get_input_embeddings()`).
        output: The target's LM head (`model.get_output_embeddings()`).
        width: Maximum nodes of a tree level that get children.

    Raises:
        InputError: If `output` does not fit the network, or `width` is below 1.
    """

    def __init__(
        self, network: FlashNetwork, embedding: nn.Module, output: nn.Linear, width: int = DEFAULT_TREE_WIDTH
    ) -> None:
        self._base = NetworkDrafter(network, embedding, output, width)
        self.network: FlashNetwork = network
        self.embedding, self.width, self.needs = embedding, width, self._base.needs
        self.tree = cast(FlashConfig, network.config).tree  # whether to draft trees, else chains

    @property
    def name(self) -> str:
        """A name made of the network's `system`, the width, a hash of the weights, and "chain" or "tree"."""
        return f"{self._base.name}-{'tree' if self.tree else 'chain'}"

    def check(self, target: Target) -> None:
        """Raise InputError if the network was made for another model, or has another device or dtype."""
        self._base.check(target)

    def start(self, context: Context) -> DraftState:
        """Return the drafter's state for one `generate` call; no network is run yet.

        In a chat, the state of the previous turn is continued if it ends where the new tokens begin.
        """
        return self._base.start(context)

    def update(self, state: DraftState, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Store the accepted tokens and the target's features. They are processed before the next draft."""
        self._base.update(state, draft, scores, verdict)

    def select(self, state: DraftState, live: Tensor) -> None:
        self._base.select(state, live)

    def propose(self, state: DraftState, roots: Tensor, plan: Plan) -> Draft:
        """Draft after each batch row's last token.

        The draft is a chain of up to `plan.depth` tokens, or a tree of at most k levels for k slots.
        """
        depth = min(plan.depth, plan.nodes)
        if depth < 1:
            return root_only(roots)
        chain = not self.tree or plan.is_chain
        if chain:
            plan = replace(plan, nodes=depth, depth=depth)
        else:
            plan = replace(plan, depth=min(plan.depth, self.network.slots))
        if chain and plan.warp is None and len(roots) == 1:
            waiting = self._base.catch_up(state)
            if not state.step_requested:
                state.step_requested = True
                state.step = SlotStep.for_network(self.network, state.packed, self.embedding, self._base.output)
            step = state.step
            if isinstance(step, SlotStep) and step.can_read(waiting.features):
                with ignore_overflow():
                    blocks = SlotChain(step, state, waiting, depth)
                    return draft_chain(step, roots, blocks.first, depth, plan.threshold, blocks.advance)
            last = self._base.root_state(state, waiting)
        else:
            last = self._base.process_pending(state)
        slots = SlotLevels(self, state, last, plan.depth)
        if plan.warp is not None:
            return slots.sampled_tree(roots, slots.first, plan)
        if chain:
            return slots.chain(roots, slots.first, depth, plan.threshold)
        return slots.tree(roots, slots.first, plan)

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the target's LM head to hidden states (..., H).

        Returns:
            Logits (..., V).
        """
        return self._base.logits(hidden)


class SlotLevels(Levels):
    """Grows one draft from slots.

    The nodes of each level are predicted from the next slot, refined by the tokens on the path to the node. A block is
    the k slots of one pass.

    Args:
        last: The head's state at each batch row's last token.
        depth: Maximum depth of the draft.
    """

    def __init__(self, drafter: FlashDrafter, state: DraftState, last: RootState, depth: int) -> None:
        super().__init__(drafter, state)
        self.head, self.layer = drafter.network, drafter.network.layer(0)
        self.depth, self.device = depth, last.states.device
        # (B, n, H): for each node of the newest level, the sum of the embeddings on its path since the block began
        self.preceding: Tensor | None = None
        self.path: list[tuple[Tensor, Tensor]] = []  # tokens (B, 1) and features (B, 1, H) since the block began
        self.done = 0  # number of tree levels that earlier blocks predicted
        self.slots = self._pass(last.states, last.queries, last.features)  # (B, k', H), the slots before refinement

    @property
    def first(self) -> Tensor:
        """The hidden state (B, 1, H) that predicts the first tokens after the root: slot 0."""
        return self.slots[:, :1]

    def expand(self, tokens: Tensor, features: Tensor, above: Tensor | None) -> Tensor:
        """Return hidden states (B, n, H), from which the children of n nodes are predicted.

        A chain that has used all slots of a block continues with those of a new block.

        Args:
            tokens: (B, n), the nodes' tokens.
            features: (B, n, H), hidden states that predicted them.
            above: (B, n), indices of the nodes' parents in the level above; None: the parent is the root.
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
        return self.head.refine_slot(self.slots[:, index : index + 1].expand_as(preceding), preceding, index)

    def _next_block(self) -> Tensor:
        """Begin a new block: process the tokens drafted so far, and compute new slots after the last one.

        Returns:
            The first slot, a hidden state (B, 1, H).
        """
        # tokens (B, k) of this block, and the features (B, k, H) that they were predicted from
        tokens, features = (torch.cat(parts, 1) for parts in zip(*self.path, strict=True))
        states = self.head.fuse(self.drafter.embedding(tokens), features)
        queries, keys, values = self.layer.project(states, self._positions(states.shape[1]), self.state.packed)
        self.state.cache.draft(keys, values, self.offset)
        self.offset, self.done = self.offset + states.shape[1], self.level
        self.preceding, self.path = None, []
        self.slots = self._pass(states[:, -1:], queries[:, :, -1:], features[:, -1:])
        return self.first

    def _pass(self, states: Tensor, queries: Tensor, features: Tensor) -> Tensor:
        """Compute the slots after a token whose keys and values are cached.

        Args:
            states: (B, 1, H), input of the head's layer at the token.
            queries: (B, heads, 1, d), queries of the head's layer at the token.
            features: (B, 1, H), hidden state before the token.

        Returns:
            Slots (B, k', H), as many as the draft's depth needs.
        """
        cache, config = self.state.cache, self.head.config
        count = min(self.head.slots, self.depth - self.done)
        spread = self.head.slot_states(states)[:, 0, :count]  # shape (B, k', H)
        keys = values = states.new_empty(len(states), config.num_key_value_heads, 0, config.head_dim)
        if count > 1:
            others, keys, values = self.layer.project(spread[:, 1:], self._positions(count - 1), self.state.packed)
            queries = torch.cat([queries, others], 2)
        keys, values = cache.draft(keys, values, self.offset)
        # All slots attend to the cached tokens; slot i > 0 also attends to slots 1 .. i of this pass.
        slot_mask = torch.full((count, count - 1), -math.inf, dtype=states.dtype, device=states.device).triu()
        slot_mask = torch.cat([slot_mask.new_zeros(count, self.offset), slot_mask], 1)
        mask = cache.mask(slot_mask.expand(len(states), -1, -1))
        hidden = self.layer.attend(spread, queries, keys, values, mask, self.state.packed)
        return self.head.finish(hidden, features[:, 0])

    def _positions(self, count: int) -> Tensor:
        """Return the `count` position ids (B, count) after the token from which the block began."""
        starts = torch.tensor(self.state.positions, device=self.device)[:, None]
        return starts + self.done + torch.arange(count, device=self.device)


class SlotChain:
    """Grows a chain from FLASH's slots for a single row, on NumPy arrays.

    It computes what `SlotLevels` does, in less time.

    Args:
        waiting: Accepted tokens to process first.
        depth: Maximum depth of the draft.
    """

    def __init__(self, step: SlotStep, state: DraftState, waiting: PendingTokens, depth: int) -> None:
        self.step, self.state, self.depth = step, state, depth
        # done: number of tokens that earlier blocks drafted; offset: number of tokens processed after the accepted ones
        self.done, self.offset = 0, 0
        count = waiting.counts[0]
        self.slots = self._pass(waiting.tokens[0, :count].tolist(), waiting.features.detach().numpy()[0, :count])
        state.cache.keep(count)
        state.positions = [state.positions[0] + count]
        self.offset = 0

    @property
    def first(self) -> Vector:
        """The hidden state (H,) from which the first token of a block is predicted."""
        return self.slots[0]

    def advance(self, token: int, feature: Vector) -> Vector:
        """Return the hidden state (H,) that predicts the token after `token`.

        Args:
            feature: (H,), the state that predicted `token`.
        """
        self.path.append((token, feature))
        index = len(self.path)
        if index == self.step.slots:
            tokens, features = zip(*self.path, strict=True)
            self.done += index
            self.slots = self._pass(tokens, np.stack(features))
            return self.first
        embedding = self.step.embedding[token]
        self.preceding = embedding if index == 1 else self.preceding + embedding
        return self.step.refine_slot(self.slots[index], self.preceding, index)

    def _pass(self, tokens: Sequence[int], features: Vector) -> Vector:
        """Process n tokens with the features (n, H) before them.

        Returns:
            The slots (k', H) after the last token.
        """
        count = min(self.step.slots, self.depth - self.done)
        keys, values = self.state.cache.reserve(self.offset + len(tokens) + count - 1, self.step.column)
        position = self.state.positions[0] + self.offset
        self.offset += len(tokens)
        self.path: list[tuple[int, Vector]] = []  # tokens and features (H,) since the block began
        # only a placeholder (H,): `advance` replaces it by the sum of the embeddings of the block's tokens
        self.preceding = features[-1]
        return self.step.block(tokens, features, position, count, keys, values)
