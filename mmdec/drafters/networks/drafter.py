"""Drafts with a draft network, one tree level per pass: EAGLE-2 (Li et al. 2024, arXiv 2406.16858, section 4).

A feature is a hidden state of the target. At each position the network reads a token and the feature of the token
before; it predicts the next feature. In each level, the `width` nodes with the highest cumulative log-probability get
children. At the end the best nodes of all levels are drafted. With `plan.is_chain` the draft is a chain of
the likeliest tokens, which may end early (`Plan.threshold`). For residual sampling, children are sampled
without replacement.

The network's cache holds only accepted tokens, with the target's features. New tokens, the prompt included, wait in a
queue until the next draft, so they cost nothing if there are no drafts. The last layer computes only their keys and
values; only for the newest token it also computes its output, which gives the first level of the tree.

Some networks compute all levels in one pass (`DraftNetwork.draft_in_parallel`): P-EAGLE (arXiv 2602.01469) appends
positions without tokens, DFlash (arXiv 2602.06036) processes a block of the last token and mask tokens. The
distribution at a depth then does not depend on the tokens above it, unless the network has a head for this. The tree
has the nodes with the highest products of probabilities along their paths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import cast, final

import torch
from torch import Tensor, nn

from mmdec.checks.fingerprint import fingerprint
from mmdec.core.tree import root_only
from mmdec.drafters.fit import check_drafter_placement, check_target_sizes
from mmdec.drafters.networks.draft_network import DraftNetwork, stack_conditions
from mmdec.drafters.networks.kv_cache import DraftCache, DraftState, PendingPrompt, PendingTokens, PromptInfo, RootState
from mmdec.drafters.networks.layers import positions_from
from mmdec.drafters.networks.tree import Levels
from mmdec.errors import InputError
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict

DEFAULT_TREE_WIDTH = 10  # maximum nodes of a tree level that get children; EAGLE-2's default


@final
class NetworkDrafter:
    """A drafter that uses a draft network, the target's embedding and its LM head.

    It holds weights only; the state of a `generate` call is in `DraftState`.

    Args:
        network: The draft network.
        embedding: The target's embedding (`model.get_input_embeddings()`).
        output: The target's LM head (`model.get_output_embeddings()`).
        width: Maximum nodes of a tree level that get children.

    Raises:
        InputError: If `output` does not fit the network, or `width` is below 1.
    """

    def __init__(
        self, network: DraftNetwork, embedding: nn.Module, output: nn.Linear, width: int = DEFAULT_TREE_WIDTH
    ) -> None:
        config = network.config
        if tuple(output.weight.shape) != (config.vocab_size, config.target_size):
            raise InputError(
                f"`output` must be {config.vocab_size} x {config.target_size} for this network, but is "
                f"{' x '.join(map(str, output.weight.shape))}. Use a drafter trained for this model."
            )
        if width < 1:
            raise InputError(f"`width` must be at least 1, but is {width}. 10 is EAGLE-2's.")
        self.network, self.output, self.width = network.eval(), output, width
        own_embedding = network.own_embedding
        self.embedding: nn.Module = embedding if own_embedding is None else own_embedding
        self.needs = Needs(
            layers=config.layers, embeds=config.projected, keeps_state_between_turns=True, may_stop_early=True
        )

    @property
    def name(self) -> str:
        """A name made of the network's `system` (such as "eagle"), the width, and a hash of the weights."""
        return f"{self.network.system}-{self.width}-{fingerprint(self.network, self.network.config)}"

    def check(self, target: Target) -> None:
        """Raise InputError if the network was made for another model, or has another device or dtype."""
        config = self.network.config
        check_target_sizes(target, config.target_size, config.vocab_size)
        check_drafter_placement(target, next(self.network.parameters()), self.output.weight.dtype)

    def start(self, context: Context) -> DraftState:
        """Return the drafter's state for one `generate` call. The network is not run yet.

        In a chat, the state of the previous turn is continued if it ends where the new tokens begin. Otherwise the
        state holds only the new tokens of the prompt.
        """
        missing = any(layer not in context.features for layer in self.needs.layers)
        if missing or (self.needs.embeds and context.embeds is None):
            raise InputError(
                f"`drafter` must fit the model, but reads embeddings or layers {self.needs.layers}, which the model's "
                'target does not record. Use a drafter that reads only tokens, such as "lookup".'
            )
        features = self._concat_features(context.features)
        rows, fresh = features.shape[:2]
        state, mask = context.previous_state, context.mask[:, -fresh:]
        if not (isinstance(state, DraftState) and state.columns == [context.past] == [context.past] * rows):
            cache = DraftCache(rows, self.network.depth)
            state = DraftState(cache, [context.past] * rows, [context.past] * rows)
        # weights may have changed since the last turn
        state.packed, state.step, state.step_requested = None, None, False
        visual = context.visual
        embeds = self.network.prompt_embeds(context, visual, self.embedding)
        waiting = PendingPrompt(embeds, features, visual, mask)
        axes = self.network.config.mrope_axes
        if axes and len(context.positions) > 1:
            waiting = replace(waiting, positions=context.positions[:axes], next=context.next_position)
        state.queue.append(waiting)
        state.columns = [old + new - 1 for old, new in zip(state.columns, mask.sum(1).tolist(), strict=True)]
        return state

    def update(self, state: DraftState, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Store the accepted tokens and the target's features. They are processed before the next draft."""
        counts = verdict.lengths.tolist()
        state.queue.append(PendingTokens.from_verdict(self._concat_features(scores.features), verdict, counts))
        state.columns = [old + count for old, count in zip(state.columns, counts, strict=True)]

    def select(self, state: DraftState, live: Tensor) -> None:
        rows = live.tolist()
        state.cache.select(live)
        state.columns = [state.columns[row] for row in rows]
        state.positions = [state.positions[row] for row in rows]
        state.queue = [part.select(live) for part in state.queue]
        state.condition = None if state.condition is None else state.condition[live]
        state.info = [state.info[row] for row in rows] if state.info else []

    def propose(self, state: DraftState, roots: Tensor, plan: Plan) -> Draft:
        """Draft a tree after each batch row's last token, `roots` (B,); a chain if `plan.is_chain`."""
        network, chain = self.network, plan.is_chain
        if network.max_depth is not None:
            plan = replace(plan, depth=min(plan.depth, network.max_depth))
        depth = min(plan.depth, plan.nodes)
        if depth < 1:
            return root_only(roots)
        block = network.draft_in_parallel(self, state, roots, depth)
        if block is None:
            hidden = self.process_pending(state).hidden_state(network, state.cache, state.packed)
            levels = Levels(self, state)
        else:
            hidden, levels = block
        if plan.warp is not None:
            return levels.sampled_tree(roots, hidden, replace(plan, nodes=depth) if chain else plan)
        if not chain:
            return levels.tree(roots, hidden, plan)
        if block is None and len(roots) == 1 and not state.step_requested:
            state.step_requested = True
            conditioned = network.condition_on(state.condition)
            state.step = conditioned.cpu_step(state.packed, self.embedding, self.output)
        return levels.chain(roots, hidden, depth, plan.threshold)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) of hidden states (..., H), by the target's LM head or that of the network."""
        return self.network.logits(hidden, self.output)

    def _concat_features(self, features: Mapping[int, Tensor]) -> Tensor:
        parts = [features[layer] for layer in self.needs.layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def process_pending(self, state: DraftState) -> RootState:
        """Run the draft network over the accepted tokens in the queue, and cache their keys and values.

        Returns:
            The network's state at the last token of each batch row.
        """
        return self.root_state(state, self.catch_up(state))

    def root_state(self, state: DraftState, part: PendingTokens) -> RootState:
        """Run the network over the accepted tokens in `part`, which `catch_up` returned.

        Returns:
            The network's state at the last token of each batch row.
        """
        states, queries = self.extend_cache(state, part)
        counts, features = part.counts, part.features
        if min(counts) == states.shape[1]:
            return RootState(states[:, -1:], queries[:, :, -1:], features[:, -1:])
        last = torch.tensor(counts, device=states.device) - 1
        rows = torch.arange(len(counts), device=states.device)
        return RootState(states[rows, last][:, None], queries[rows, :, last][:, :, None], features[rows, last][:, None])

    def catch_up(self, state: DraftState) -> PendingTokens:
        """Run the network over the queued tokens up to the end of the newest prompt.

        Returns:
            The tokens accepted after this prompt, which are not processed yet.
        """
        if state.packed is None:
            state.packed = self.network.pack_weights()
        groups = [list(parts) for _, parts in groupby(state.queue, lambda part: isinstance(part, PendingPrompt))]
        state.queue = []
        for group in groups[:-1]:
            for part in group if isinstance(group[0], PendingPrompt) else [_concat_pending(group)]:
                self.extend_cache(state, part)
        return _concat_pending(groups[-1])

    def extend_cache(self, state: DraftState, part: PendingPrompt | PendingTokens) -> tuple[Tensor, Tensor]:
        """Run the network over the tokens in `part`, and accept them in the cache.

        Returns:
            The last layer's input (B, n, H) and queries (B, heads, n, d).
        """
        if isinstance(part, PendingPrompt):
            states, positions, counts = self._advance_over_prompt(state, part)
        else:
            states, positions, counts = self.advance_over_text(state, part)
        queries = torch.empty(0)
        if states.shape[1]:
            states, queries = self.network.extend_cache(state.cache, states, positions, counts, state.packed)
        state.cache.accept(counts)
        return states, queries

    def advance_over_text(self, state: DraftState, part: PendingTokens) -> tuple[Tensor, Tensor, list[int]]:
        """Move the state's positions behind accepted tokens.

        Returns:
            The network's input for them: states (B, n, H), position ids (B, n), and each batch row's number of tokens.
        """
        network = self.network.condition_on(state.condition)
        states = network.fuse(self.embedding(part.tokens), part.features)
        positions = positions_from(state.positions, states.shape[1], states.device)
        state.positions = [start + count for start, count in zip(state.positions, part.counts, strict=True)]
        return states, positions, part.counts

    def _advance_over_prompt(self, state: DraftState, part: PendingPrompt) -> tuple[Tensor, Tensor, list[int]]:
        """Move the state's positions behind the prompts, and set its `condition` and `info`.

        Returns:
            The network's input for the prompts, with visual tokens compressed: states (B, M, H), position ids (B, M) or
            (3, B, M), both padded on the right, and each batch row's number of positions.
        """
        earlier = [None] * len(part.mask) if state.condition is None else list(state.condition[:, 0])
        prompts = zip(part.embeds, part.features, part.visual, part.mask, earlier, strict=True)
        rows = [
            self.network.condition_on(vector).prompt(embeds[mask], features[mask], visual[mask])
            for embeds, features, visual, mask, vector in prompts
        ]
        state.info = [PromptInfo(row.compressor, row.visual_weights) for row in rows]
        condition = stack_conditions(rows)
        if condition is not None:
            # drop the fast code `step`: it has a copy of the condition, which changes here
            state.condition, state.step, state.step_requested = condition, None, False
        pad = nn.utils.rnn.pad_sequence
        if part.positions is None or part.next is None:
            row_positions = [row.positions + start for row, start in zip(rows, state.positions, strict=True)]
            positions = pad(row_positions, batch_first=True)
            ends = [
                length - 1 if row.end is None else row.end
                for row, length in zip(rows, part.mask.sum(1).tolist(), strict=True)
            ]
            state.positions = [start + end for start, end in zip(state.positions, ends, strict=True)]
        else:
            axes = [
                pad([ids[mask][:-1] for ids, mask in zip(axis, part.mask, strict=True)], batch_first=True)
                for axis in part.positions
            ]
            positions = axes[0] if len(axes) == 1 else torch.stack(axes)
            state.positions = [following - 1 for following in part.next.tolist()]
        states = pad([row.states for row in rows], batch_first=True)
        return states, positions, [len(row.states) for row in rows]


def _concat_pending(parts: Sequence[PendingPrompt | PendingTokens]) -> PendingTokens:
    return PendingTokens.concat(cast(Sequence[PendingTokens], parts))
