"""Drafts with a model's native head for multi-token prediction (MTP), as transformers implements it.

DeepSeek-V3 (arXiv 2412.19437, section 2.2) and GLM-4-MoE are published with such a head: one more decoder layer. At
position t it reads the model's last hidden state of token t and the embedding of token t + 1, and predicts token t + 2.
transformers drafts one token with the head (`generate(use_mtp=True)`). Here the layer's output is fed back as the
hidden state of the drafted token. So the head drafts chains and EAGLE-2 trees of any depth, in batches.

The layer's cache holds the accepted tokens; padding stays in it and is masked. A draft's entries are removed before the
next draft.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from mmdec.checks.fingerprint import fingerprint
from mmdec.compat import CACHE_ARGUMENT
from mmdec.core.tree import root_only
from mmdec.drafters.networks.kv_cache import PendingTokens
from mmdec.drafters.networks.tree import Levels
from mmdec.drafters.networks.vocabulary import DraftVocabulary
from mmdec.drafters.registry import built_in_drafter
from mmdec.errors import InputError
from mmdec.targets.mtp_head import load_mtp_head
from mmdec.types import Context, Draft, Needs, Plan, Scores, Target, Verdict

DEFAULT_TREE_WIDTH = 10  # maximum nodes of a tree level that get children; EAGLE-2's default


@dataclass
class MtpState:
    """The drafter's state of one `generate` call.

    It holds the head's key-value cache, and the accepted tokens that the head has not processed.
    """

    cache: DynamicCache
    seen: Tensor  # (B, C) bool, for the C accepted positions of the cache: False at padding
    positions: Tensor  # (B,), position id of each batch row's next token to process
    # tokens to process: ids (B, n), target's hidden states at the tokens before (B, n, H), and (B, n) False at padding
    queue: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    drafted: int = 0  # number of positions that the last draft left in the cache; the next pass removes them
    # always None; `Levels` reads this attribute to find faster code for single tokens, and an MTP head has none
    step: None = None


@built_in_drafter("mtp", note="MTP: the model's own native head.")
@final
class MtpDrafter:
    """A drafter that uses the model's native head for multi-token prediction.

    It holds weights only; the state of a `generate` call is in `MtpState`.

    Args:
        head: Transformers' `MtpModel` with one layer.
        width: Maximum nodes of a tree level that get children.
    """

    needs = Needs(layers=(-1,))

    def __init__(self, head: Any, width: int = DEFAULT_TREE_WIDTH) -> None:
        self.head, self.width = head.eval(), width
        self.embedding: nn.Module = head.embed_tokens

    @classmethod
    def from_model(cls, model: PreTrainedModel) -> MtpDrafter:
        """Make the drafter with the head of the checkpoint that the model was loaded from.

        Raises:
            InputError: If it has no head that can draft.
        """
        return cls(load_mtp_head(model))

    @property
    def name(self) -> str:
        """A name made of "mtp", the width, and a hash of the head's weights."""
        return f"mtp-{self.width}-{fingerprint(self.head.layers)}"

    def check(self, target: Target) -> None:
        """Raise InputError if the head was made for another model or is on another device."""
        weight = cast(Tensor, self.embedding.weight)
        if tuple(weight.shape) != (target.vocab_size, target.hidden_size) or weight.device != target.device:
            raise InputError(
                f"`drafter` must fit a model with {target.hidden_size} channels and {target.vocab_size} tokens on "
                f"{target.device}, but this head is for {' x '.join(map(str, weight.shape))} on {weight.device}. "
                "Load the head that was trained with the model."
            )

    def start(self, context: Context) -> MtpState:
        """Return the drafter's state for one `generate` call. The head is not run yet."""
        features = context.features[-1]
        fresh = features.shape[1]
        mask, tokens = context.mask[:, -fresh:], context.tokens[:, -fresh:]
        is_text = mask.new_zeros(len(mask), 0)
        state = MtpState(DynamicCache(), is_text, torch.full_like(tokens[:, 0], context.past + 1))
        # The target's hidden state at the last prompt token is read together with the first generated token, which
        # `update` brings.
        state.queue.append((tokens[:, 1:], features[:, :-1], mask[:, :-1]))
        return state

    def update(self, state: MtpState, draft: Draft, scores: Scores, verdict: Verdict) -> None:
        """Store the accepted tokens and the target's hidden states. The head processes them before the next draft."""
        part = PendingTokens.from_verdict(scores.features[-1], verdict, verdict.lengths.tolist())
        exists = torch.arange(part.tokens.shape[1], device=part.tokens.device) < verdict.lengths[:, None]
        state.queue.append((part.tokens, part.features, exists))

    def select(self, state: MtpState, live: Tensor) -> None:
        if state.seen.shape[1]:
            state.cache.batch_select_indices(live)
        state.seen, state.positions = state.seen[live], state.positions[live]
        state.queue = [(tokens[live], features[live], exists[live]) for tokens, features, exists in state.queue]

    def propose(self, state: MtpState, roots: Tensor, plan: Plan) -> Draft:
        """Draft a tree after each batch row's last token, `roots` (B,); a chain if `plan.is_chain`."""
        depth = min(plan.depth, plan.nodes)
        if depth < 1:
            return root_only(roots)
        hidden = self._take_in(state)
        levels = MtpLevels(self, state)
        if plan.warp is not None:
            return levels.sampled_tree(roots, hidden, plan)
        if plan.is_chain:
            return levels.chain(roots, hidden, depth, plan.threshold)
        return levels.tree(roots, hidden, plan)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits (..., V) of hidden states (..., H), by the target's LM head."""
        return self.head.shared_head(hidden)

    def _take_in(self, state: MtpState) -> Tensor:
        """Run the MTP head over the accepted tokens that it has not processed yet.

        Returns:
            The head's hidden state (B, 1, H) at the last token of each batch row.
        """
        if state.drafted:
            state.cache.crop(-state.drafted)
            state.drafted = 0
        tokens, features, exists = (torch.cat(parts, 1) for parts in zip(*state.queue, strict=True))
        state.queue = []
        positions = state.positions[:, None] + exists.cumsum(1) - 1
        state.positions = state.positions + exists.sum(1)
        rows, size = tokens.shape
        causal = torch.ones(size, size, dtype=torch.bool, device=tokens.device)
        # let each padding position see itself, because a softmax over no position is NaN
        sees = (causal.tril() & exists[:, None]) | causal.triu().tril()
        sees = torch.cat([state.seen[:, None].expand(-1, size, -1), sees], 2)
        state.seen = torch.cat([state.seen, exists], 1)
        hidden = self.run(state, tokens, features, positions, sees)
        last = (exists * torch.arange(size, device=tokens.device)).argmax(1)
        return hidden[torch.arange(rows, device=tokens.device), last][:, None]

    def run(self, state: MtpState, tokens: Tensor, features: Tensor, positions: Tensor, sees: Tensor) -> Tensor:
        """Run the head over n tokens in each batch row, and add their keys and values to the cache.

        Args:
            tokens: (B, n), token ids.
            positions: (B, n), position ids.
            features: (B, n, H), hidden states at the tokens before.
            sees: (B, n, S + n) bool, which of the S cached and n new positions each token sees.

        Returns:
            The head's hidden states (B, n, H).
        """
        embeds = self.embedding(tokens)
        mask = torch.zeros(sees.shape, dtype=embeds.dtype, device=embeds.device).masked_fill(~sees, -math.inf)
        return self.head.layers[0](
            embeds,
            features,
            position_embeddings=self.head.rotary_emb(embeds, position_ids=positions.clamp(min=0)),
            attention_mask=mask[:, None],
            position_ids=positions.clamp(min=0),
            **{CACHE_ARGUMENT: state.cache},
        )


class MtpLevels(Levels):
    """Grows one draft with the MTP head, which is run once for each level of the tree."""

    def __init__(self, drafter: MtpDrafter, state: MtpState) -> None:
        super().__init__(cast(Any, drafter), cast(Any, state))
        self.seen: Tensor | None = None  # (B, n, T) bool: which of the draft's T nodes the newest level's n nodes see

    @property
    def vocabulary(self) -> DraftVocabulary:
        return DraftVocabulary(cast(MtpDrafter, self.drafter).head.shared_head.out_features)

    def expand(self, tokens: Tensor, features: Tensor, above: Tensor | None) -> Tensor:
        drafter, state = cast(MtpDrafter, self.drafter), cast(MtpState, self.state)
        rows, size = tokens.shape
        ancestors = torch.eye(size, dtype=torch.bool, device=tokens.device).expand(rows, -1, -1)
        if self.seen is not None:
            assert above is not None
            before = self.seen.gather(1, above[..., None].expand(-1, -1, self.seen.shape[2]))
            ancestors = torch.cat([before, ancestors], 2)
        self.seen = ancestors
        sees = torch.cat([state.seen[:, None].expand(-1, size, -1), ancestors], 2)
        positions = (state.positions + self.level)[:, None].expand(-1, size)
        self.level, self.offset = self.level + 1, self.offset + size
        state.drafted = self.offset
        return drafter.run(state, tokens, features, positions, sees)
