"""Training of DFlash (Chen et al. 2026, arXiv 2602.06036), which drafts a block of tokens in one pass.

Its successors with a sequential head are trained here, too: DSpark (arXiv 2607.05147), DFlash 2 and Domino.

A block is a root, which is a token of the answer, and mask tokens after the root. The block attends to the target's
features before the root, and to itself in both directions. The k-th drafted token is compared with the target's
distribution k tokens after the root in the true answer. Training draws some tokens of each answer as roots; validation
takes all of them. A sequential head reads the true answer's tokens above each drafted token.

In shapes: B texts, M positions of the longest prompt, N of the longest answer, R roots of a text, b tokens of a block,
K drafted tokens of a block, H channels, S channels of a head's state, P compared states.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from mmdec.drafters.dflash.heads import MARKOV_HEADS
from mmdec.drafters.dflash.network import DFlash, DFlashConfig
from mmdec.drafters.networks.config import DraftConfig
from mmdec.drafters.networks.layers import KeyValues
from mmdec.drafters.networks.training.module import (
    DraftModule,
    LossWeights,
    StepTotals,
    concat_pieces,
    distribution_loss,
    target_states,
    token_loss,
)
from mmdec.drafters.networks.training.teacher import TargetFeatures, Teacher
from mmdec.drafters.networks.training.unroll import UnrollInputs, additive_mask
from mmdec.errors import InputError
from mmdec.training.checkpoints import check_positive
from mmdec.training.optim import token_weight
from mmdec.types import Needs

# The total variation distance is half of the L1 distance.
DSPARK_WEIGHTS = LossWeights(features=0.0, tokens=0.1, distribution=0.9 / 2)
BLOCK_FROM_ROOT = {"from_anchor": True, "block_size": 8}  # as DSpark and Domino are published


@final
class DFlashModule(DraftModule):
    """Trains DFlash.

    The paper's settings are `anchors` 512, `unroll_decay` 0.78 and `noise` 0. Unlike in the paper, the loss compares
    with the target's distributions, not with the answer's tokens. `unroll_decay` is the loss weight of a drafted token
    relative to the one before it, exp(-1 / 4) in the paper. The mask token is the target's padding token unless
    `network` names one.

    `network: {head: ...}` chooses another system, and with it the loss of each drafted token:

    - vanilla, gated, rnn (DSpark): 0.1 times the cross-entropy, and 0.9 times the total variation distance. With
      `confidence: true`, the binary cross-entropy of the confidence with the share of the two distributions in common.
    - dflash2: DFlash's loss of the block's own logits, and the cross-entropy of the selector where the true token is
      one of its candidates.
    - domino: (1 - l) times the loss of the corrected logits plus l times that of the block's own. l falls from 1 to 0
      over the first `base_steps` training steps, half of all in the published recipe.

    Args:
        anchors: Maximum number of roots that are drawn from an answer in a training step.
        base_steps: See above; only Domino reads it.
    """

    system: ClassVar[str] = "dflash"
    heads: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        **{head: {"head": head, "confidence": True, **BLOCK_FROM_ROOT} for head in MARKOV_HEADS},
        "dflash2": {"head": "dflash2"},
        "domino": {"head": "domino", "plain_prefix": 1, **BLOCK_FROM_ROOT},
    }
    weights: ClassVar[LossWeights] = LossWeights(features=0.0, tokens=1.0)

    def __init__(
        self, units: list[str] | None = None, anchors: int = 512, base_steps: int = 1000, **options: Any
    ) -> None:
        super().__init__(units, **options)
        check_positive(anchors=anchors, base_steps=base_steps)
        self.anchors, self.base_steps = anchors, base_steps
        self.hparams.update(anchors=anchors, base_steps=base_steps)

    def training_needs(self, config: DraftConfig) -> Needs:
        """Return which hidden states of the target training needs.

        They are those that the network reads, and the LM head's input (layer -1), from which the target's distributions
        are computed.
        """
        return Needs(layers=(*config.layers, -1))

    def draft_config(self, teacher: Teacher) -> DraftConfig:
        """Return the configuration of a new network.

        Sizes are those of the target's layers, the mask token is the target's padding token, and the recipe's `network`
        options override both.
        """
        config = DFlashConfig.like(teacher.config, **{"mask_token": teacher.pad, **self.options.network})
        if config.own_head or config.own_embedding:
            raise InputError(
                "`network` must draft with the target's embedding and LM head, but has `own_embedding` or `own_head`. "
                "Leave them out."
            )
        return config

    @property
    def depth(self) -> int:
        """The number of tokens that a block drafts; the loss compares all of them."""
        return cast(DFlash, self.network).config.drafts

    @property
    def chain(self) -> int:
        return min(self.options.chain, self.depth)

    def steps(self, columns: UnrollInputs, count: int) -> list[Tensor]:
        """Draft up to `count` tokens after each answer token.

        Returns:
            For each depth s from 0, the network's final states (B, N - s, H + S). State c predicts answer token
            c + s + 1.
        """
        length = columns.mask.shape[1]
        roots = torch.arange(length, device=columns.mask.device).expand_as(columns.mask)
        states = torch.cat([self.blocks(columns, part) for part in roots.split(self.anchors, 1)], 1)
        return [states[:, : length - step, step] for step in range(min(count, length))]

    def blocks(self, columns: UnrollInputs, roots: Tensor) -> Tensor:
        """Run the network over the blocks that begin at some answer tokens.

        Args:
            roots: (B, R), indices of these tokens in the answers; -1 for none.

        Returns:
            (B, R, K, H + S), one for each of the K tokens that a block drafts: the final states, after the norm, and
            those of the sequential head for the true tokens above. S is 0 without a head.
        """
        network = cast(DFlash, self.network)
        answers = columns.tokens
        tokens = answers.gather(1, roots.clamp(min=0))[..., None].repeat(1, 1, network.config.block_size)
        tokens[..., 1:] = network.config.mask_token
        embedding = self.teacher.model.get_input_embeddings()
        states = block_states(network, columns, roots, network.embed_block(tokens.flatten(1), embedding))
        drafted, head = states[:, :, -self.depth :], network.head
        if head is None:
            return drafted
        places = roots.clamp(min=0)[..., None] + torch.arange(self.depth, device=roots.device)
        above = answers[:, None].expand(-1, roots.shape[1], -1).gather(2, places.clamp(max=answers.shape[1] - 1))
        of_head = [head.begin(above[..., 0], states[:, :, 0], embedding)]
        for depth in range(1, self.depth):
            of_head.append(head.step(of_head[-1], above[..., depth], drafted[:, :, depth - 1], embedding))
        return torch.cat([drafted, torch.stack(of_head, 2)], -1)

    def logits(self, states: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Compute logits (..., V) of the tokens at one depth: the block's own, and those that the head has corrected.

        Args:
            states: (..., H + S), from `blocks`.
        """
        size, head = self.network.config.hidden_size, cast(DFlash, self.network).head
        base = self.teacher.logits(states[..., :size])
        return base, base if head is None else head.logits(base, states[..., :size], states[..., size:], depth)

    def step_logits(self, states: Tensor, depth: int) -> Tensor:
        return self.logits(states, depth)[1]

    def compare(self, columns: UnrollInputs, texts: list[TargetFeatures]) -> Mapping[str, Tensor]:
        network = cast(DFlash, self.network)
        expected = target_states(texts, self.teacher.config.hidden_size, self.needs.layers)
        lengths = columns.mask.sum(1)
        roots = draw_roots(lengths, self.anchors if self.training else columns.mask.shape[1])
        states = self.blocks(columns, roots)
        rows = torch.arange(len(texts), device=roots.device)[:, None].expand_as(roots)
        counts = [(roots >= 0) & (roots + step < lengths[:, None]) for step in range(self.depth)]
        weights = token_weight(torch.stack([has_target.sum() for has_target in counts]))
        totals, vocab_size = StepTotals(roots >= 0, weights, self.options.unroll_decay), network.draft_vocabulary.size
        for step, has_target in enumerate(counts[: columns.mask.shape[1]]):
            places = rows[has_target], roots[has_target] + step
            compared = states[:, :, step][has_target], expected[places], columns.next_tokens[places]
            loss, entropy, right = concat_pieces(partial(self._compare_tokens, step), vocab_size, *compared)
            totals.add(loss.sum() / max(len(loss), 1), has_target, right)
            totals.parts.setdefault("tokens", entropy.detach().mean())
        return totals.result()

    def _compare_tokens(
        self, depth: int, states: Tensor, expected: Tensor, tokens: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compare the drafter's distributions at one depth with the target's.

        Args:
            states: (P, H + S), from `blocks`.
            expected: (P, H), the target's states.
            tokens: (P,), the answer's.

        Returns:
            The losses (P,); the cross-entropies (P,); and (P,) 1 where both have the same likeliest token, else 0.
        """
        network = cast(DFlash, self.network)
        kind = network.config.head
        target_logits, (base, drafted) = self.teacher.logits(expected), self.logits(states, depth)
        trained = base if kind == "dflash2" else drafted  # the selector's logits are finite for its candidates alone
        loss, entropy = self._weighted_loss(trained, target_logits), token_loss(trained, target_logits)
        if kind == "domino":
            loss = (1 - self.base_share) * loss + self.base_share * self._weighted_loss(base, target_logits)
        if kind == "dflash2":
            chosen = drafted.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
            loss = loss - torch.where(chosen.isfinite(), chosen, torch.zeros_like(chosen))
        if network.config.confidence:
            size = network.config.hidden_size
            shared = 1 - distribution_loss(drafted, target_logits).detach() / 2
            estimate = network.confidence_head(states[:, :size], states[:, size:])
            loss = loss + binary_cross_entropy_with_logits(estimate, shared.to(estimate.dtype), reduction="none")
        return loss, entropy, (drafted.argmax(-1) == target_logits.argmax(-1)).to(drafted.dtype)

    def _weighted_loss(self, drafted: Tensor, target_logits: Tensor) -> Tensor:
        """Return the loss (P,) of the drafter's logits (P, V), with the weights of the head's kind."""
        is_markov = cast(DFlash, self.network).config.head in MARKOV_HEADS
        weights = self.chosen_weights(DSPARK_WEIGHTS) if is_markov else self.loss_weights
        return weights.logit_loss(drafted, target_logits)

    @property
    def base_share(self) -> float:
        """Domino: the weight of the block's own logits in the loss, from 1 to 0 over the first `base_steps` steps."""
        return max(0.0, 1 - self.global_step / self.base_steps) if self.training else 0.0


def draw_roots(lengths: Tensor, max_roots: int) -> Tensor:
    """Draw up to `max_roots` tokens of each answer at random, as roots of blocks.

    Args:
        lengths: (B,), number of tokens to draw from.

    Returns:
        Indices (B, R) int64, ascending; -1 at the end of rows with fewer roots.
    """
    width = int(lengths.max())
    outside = torch.arange(width, device=lengths.device) >= lengths[:, None]
    order = torch.rand(outside.shape, device=lengths.device).masked_fill(outside, 2.0).argsort(1)[:, :max_roots]
    roots = order.masked_fill(order >= lengths[:, None], width).sort(1).values
    return roots.masked_fill(roots == width, -1)


def block_states(network: DFlash, columns: UnrollInputs, roots: Tensor, block: Tensor) -> Tensor:
    """Run the network over blocks that begin at answer tokens.

    Args:
        roots: (B, R), indices of the blocks' first tokens in the answers; -1 for none.
        block: (B, R * b, H), embeddings of the blocks' tokens, b for each block.

    Returns:
        Final states (B, R, b, H), after the norm, one for each token of a block; undefined at a root of -1.
    """
    size, at = network.config.block_size, roots.clamp(min=0)
    # A block attends to the target's features before its root. `UnrollInputs` stores the feature of a token under the
    # index of the next token, so the last of these features has the root's index.
    read = torch.cat([columns.states, network.fuse(columns.embeds, columns.features)], 1)
    before = torch.cat([columns.prompt_positions, columns.positions], -1)
    up_to_root = torch.arange(columns.mask.shape[1], device=roots.device) <= at[..., None]
    # (B, R, M + N): which tokens of prompt and answer each block sees
    visible = torch.cat([columns.prompt_mask[:, None].expand(-1, roots.shape[1], -1), up_to_root], 2)
    mask = additive_mask(visible, read.dtype)[:, :, None]  # (B, 1, 1, R, M + N), the same for all heads
    positions = columns.positions.gather(1, at)[..., None] + torch.arange(1, size + 1, device=roots.device)
    for index in range(network.depth):
        layer = network.layer(index)
        context = network.context(read, before, index)
        queries, keys, values = layer.project(block, positions.flatten(1))
        mixed = block_attention(queries, context, (keys, values), mask, size)
        block = layer.after_attention(block, mixed)
    return network.norm(block).unflatten(1, (-1, size))


def block_attention(queries: Tensor, context: KeyValues, block: KeyValues, mask: Tensor, size: int) -> Tensor:
    """Compute the attention of R blocks of b tokens each.

    A block attends to the target's features, and to itself in both directions.

    Args:
        queries: (B, heads, R * b, d).
        context: Keys and values (B, h, S, d) of S features.
        block: Keys and values (B, h, R * b, d) of the blocks.
        mask: Additive (B, 1, 1, R, S), which features each block sees.
        size: b.

    Returns:
        (B, heads, R * b, d).
    """
    groups, count = context[0].shape[1], mask.shape[3]
    # queries: (B, h, heads / h, R, b, d); the blocks' keys and values: (B, h, 1, R, b, d)
    queries = queries.unflatten(1, (groups, -1)).unflatten(3, (count, size)) * queries.shape[-1] ** -0.5
    keys, values = (part.unflatten(2, (count, size))[:, :, None] for part in block)
    before = torch.einsum("bhgrqd,bhsd->bhgrqs", queries, context[0]) + mask[..., None, :]
    within = queries @ keys.transpose(-1, -2)
    weights = torch.cat([before, within.to(before.dtype)], -1).softmax(-1).to(values.dtype)
    width = context[0].shape[2]
    mixed = torch.einsum("bhgrqs,bhsd->bhgrqd", weights[..., :width], context[1]) + weights[..., width:] @ values
    return mixed.flatten(3, 4).flatten(1, 2)
