"""Training of DFlash (Chen et al. 2026, arXiv 2602.06036), which drafts a block of tokens in one pass.

A block is a root, which is a token of the answer, and mask tokens after the root. The block attends to the target's
features before the root, and to itself in both directions. The k-th drafted token is compared with the target's
distribution k tokens after the root in the true answer. Training draws some tokens of each answer as roots; validation
takes all of them.

In shapes: B texts, M positions of the longest prompt, N of the longest answer, R roots of a text, b tokens of a block,
K drafted tokens of a block, H channels, P compared states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmdec.drafters.dflash.network import DFlash, DFlashConfig
from mmdec.drafters.networks.draft_network import DraftConfig, KeyValues
from mmdec.drafters.networks.training.module import (
    MAX_LOGITS,
    DraftModule,
    LossWeights,
    in_pieces,
    target_states,
    token_loss,
)
from mmdec.drafters.networks.training.teacher import TargetFeatures, Teacher
from mmdec.drafters.networks.training.unroll import UnrollInputs, additive_mask
from mmdec.errors import InputError
from mmdec.training.callbacks import ESTIMATED_CHAIN_LENGTH
from mmdec.training.checkpoints import check_counts
from mmdec.training.optim import token_weight
from mmdec.types import Needs


@final
class DFlashModule(DraftModule):
    """Trains DFlash.

    The paper's settings are `anchors` 512, `unroll_decay` 0.78 and `noise` 0. Unlike in the paper, the loss compares
    with the target's distributions, not with the answer's tokens. `unroll_decay` is the loss weight of a drafted token
    relative to the one before it, exp(-1 / 4) in the paper. The mask token is the target's padding token unless
    `network` names one.

    Args:
        anchors: Maximum number of roots that are drawn from an answer in a training step.
    """

    system: ClassVar[str] = "dflash"
    weights: ClassVar[LossWeights] = LossWeights(features=0.0, tokens=1.0)

    def __init__(self, units: list[str] | None = None, anchors: int = 512, **options: Any) -> None:
        super().__init__(units, **options)
        check_counts(anchors=anchors)
        self.anchors = anchors
        self.hparams.update(anchors=anchors)

    def training_needs(self, config: DraftConfig) -> Needs:
        """Return which hidden states of the target training needs: those that the network reads, and the LM head's
        input (layer -1), from which the target's distributions are computed."""
        return Needs(layers=(*config.layers, -1))

    def draft_config(self, teacher: Teacher) -> DraftConfig:
        """Return the configuration of a new network: sizes are those of the target's layers, the mask token is the
        target's padding token, and the recipe's `network` options override both."""
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

    def steps(self, columns: UnrollInputs, texts: list[TargetFeatures], count: int) -> list[Tensor]:
        """Draft up to `count` tokens after each answer token.

        Returns:
            For each depth s from 0, the network's final states (B, N - s, H). State c predicts answer token c + s + 1.
        """
        length = columns.mask.shape[1]
        roots = torch.arange(length, device=columns.mask.device).expand_as(columns.mask)
        states = torch.cat([self.blocks(columns, texts, part) for part in roots.split(self.anchors, 1)], 1)
        return [states[:, : length - step, step] for step in range(min(count, length))]

    def blocks(self, columns: UnrollInputs, texts: list[TargetFeatures], roots: Tensor) -> Tensor:
        """Run the network over the blocks that begin at some answer tokens.

        Args:
            roots: (B, R), indices of these tokens in the answers; -1 for none.

        Returns:
            Final states (B, R, K, H), after the norm, one for each of the K tokens that a block drafts.
        """
        network = cast(DFlash, self.network)
        answers = pad_sequence([torch.tensor(text.answer[:-1]) for text in texts], batch_first=True).to(roots.device)
        tokens = answers.gather(1, roots.clamp(min=0))[..., None].repeat(1, 1, network.config.block_size)
        tokens[..., 1:] = network.config.mask_token
        block = network.embed_block(tokens.flatten(1), self.teacher.model.get_input_embeddings())
        return block_states(network, columns, roots, block)

    def compare(self, columns: UnrollInputs, texts: list[TargetFeatures]) -> Mapping[str, Tensor]:
        """Return name -> value: the batch's "loss", and other values for the log. "round" estimates the tokens per
        round of decoding with chains of `ESTIMATED_CHAIN_LENGTH` drafted tokens."""
        expected = target_states(texts, self.teacher.config.hidden_size, self.needs.layers)
        lengths = columns.mask.sum(1)
        roots = draw_roots(lengths, self.anchors if self.training else columns.mask.shape[1])
        states = self.blocks(columns, texts, roots)
        total, parts, accepted = columns.states.new_zeros(()), dict[str, Tensor](), columns.states.new_zeros(())
        alive = roots >= 0
        rows = torch.arange(len(texts), device=roots.device)[:, None].expand_as(roots)
        counts = [(roots >= 0) & (roots + step < lengths[:, None]) for step in range(self.depth)]
        weights = token_weight(torch.stack([has_target.sum() for has_target in counts]))
        for step, has_target in enumerate(counts[: columns.mask.shape[1]]):
            target_hidden = expected[rows[has_target], roots[has_target] + step]
            width = max(1, MAX_LOGITS // cast(DFlash, self.network).vocabulary)
            pieces = in_pieces(self._compare_tokens, width, states[:, :, step][has_target], target_hidden)
            entropy, right = (torch.cat(part) for part in zip(*pieces, strict=True))
            total = total + self.options.unroll_decay**step * weights[step] * entropy.sum() / max(len(entropy), 1)
            name = str(step + 1) if step else ""
            parts |= {"right" + name: right.mean()} if len(right) else {}
            parts |= {} if step else {"tokens": entropy.detach().mean()}
            if step < ESTIMATED_CHAIN_LENGTH:
                alive = alive & torch.zeros_like(has_target).masked_scatter(has_target, right > 0)
                accepted = accepted + alive.sum()
        if self.depth >= ESTIMATED_CHAIN_LENGTH:
            parts["round"] = 1 + accepted / (roots >= 0).sum()
        return {**parts, "loss": self.loss_weights.tokens * total}

    def _compare_tokens(self, hidden: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
        """Compare the distributions of the drafter's states `hidden` (P, H) and the target's, `expected` (P, H).

        Returns:
            The cross-entropies (P,); and (P,) 1 where both have the same likeliest token, else 0.
        """
        drafted, target_logits = self.teacher.logits(hidden), self.teacher.logits(expected)
        return token_loss(drafted, target_logits), (drafted.argmax(-1) == target_logits.argmax(-1)).to(drafted.dtype)


def draw_roots(lengths: Tensor, most: int) -> Tensor:
    """Draw up to `most` tokens of each answer at random, as roots of blocks.

    Args:
        lengths: (B,), number of tokens to draw from.

    Returns:
        Indices (B, R) int64, ascending; -1 at the end of rows with fewer roots.
    """
    width = int(lengths.max())
    outside = torch.arange(width, device=lengths.device) >= lengths[:, None]
    order = torch.rand(outside.shape, device=lengths.device).masked_fill(outside, 2.0).argsort(1)[:, : min(most, width)]
    roots = order.masked_fill(order >= lengths[:, None], width).sort(1).values
    return roots.masked_fill(roots == width, -1)


def block_states(network: DFlash, columns: UnrollInputs, roots: Tensor, block: Tensor) -> Tensor:
    """Run the network over blocks that begin at answer tokens.

    Args:
        roots: (B, R), indices of the blocks' first tokens in the answers; -1 for none.
        block: (B, R * b, H), embeddings of the blocks' tokens, b for each block.

    Returns:
        Final states (B, R, K, H), after the norm, one for each of K drafted tokens; undefined at a root of -1.
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
        context = network.context(read, before, index)
        queries, keys, values = network.project(block, positions.flatten(1), None, index)
        mixed = block_attention(queries, context, (keys, values), mask, size)
        block = network.after_attention(block, mixed, None, index)
    return network.norm(block).unflatten(1, (-1, size))[:, :, -network.config.drafts :]


def block_attention(queries: Tensor, context: KeyValues, block: KeyValues, mask: Tensor, size: int) -> Tensor:
    """Compute the attention of R blocks of b tokens each: to the target's features, and within each block in both
    directions.

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
