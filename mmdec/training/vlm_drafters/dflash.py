"""Training of DFlash (Chen et al. 2026, arXiv 2602.06036): blocks of mask tokens behind roots of the answers.

A block is what the drafter runs in one pass: the root and mask tokens behind it. It sees the target's columns before
the root, and itself in both directions. State k of a block is compared with the target's distribution of the token k
behind its root, given the answer up to there. Training draws some roots of each answer; validation takes all of them.

B texts, M columns of the longest prompt, N of the longest answer, R roots of a text, b tokens of a block of which K
draft, H channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mmdec.nn.dflash import DFlash, DFlashConfig
from mmdec.nn.draft_network import DraftConfig, Pair
from mmdec.training.callbacks import CHAIN
from mmdec.training.checkpoints import check_counts
from mmdec.training.optim import token_weight
from mmdec.training.vlm_drafters.module import CELLS, DraftModule, Weights, expected_states, in_pieces, token_loss
from mmdec.training.vlm_drafters.teacher import Reading, Teacher
from mmdec.training.vlm_drafters.unroll import Columns, additive
from mmdec.types import InputError, Needs


@final
class DFlashModule(DraftModule):
    """DFlash. As published with `anchors` 512, `unroll_decay` 0.78 and `noise` 0, but compared with the target's
    distributions in place of the answer's tokens.

    `unroll_decay` is the weight of a draft relative to the one before, exp(-1 / 4) in the paper. The mask token is the
    target's padding token unless `network` names one. anchors: the most roots that are drawn of an answer.
    """

    system: ClassVar[str] = "dflash"
    weights: ClassVar[Weights] = Weights(features=0.0, tokens=1.0)

    def __init__(self, units: list[str] | None = None, anchors: int = 512, **options: Any) -> None:
        super().__init__(units, **options)
        check_counts(anchors=anchors)
        self.anchors = anchors
        self.hparams.update(anchors=anchors)

    def needed(self, config: DraftConfig) -> Needs:
        """The network's layers, and the LM head's input, from which the target's distributions are computed."""
        return Needs(layers=(*config.layers, -1))

    def draft_config(self, teacher: Teacher) -> DraftConfig:
        """As `DraftModule.draft_config`, with the target's padding token as mask."""
        config = DFlashConfig.like(teacher.config, **{"mask_token": teacher.pad, **self.options.network})
        if config.own_head or config.own_embedding:
            raise InputError(
                "`network` must draft with the target's embedding and LM head, but has `own_embedding` or `own_head`. "
                "Leave them out."
            )
        return config

    @property
    def depth(self) -> int:
        """Number of tokens that a block drafts: all are trained."""
        return cast(DFlash, self.network).config.drafts

    @property
    def chain(self) -> int:
        """Number of tokens of the chains that validation simulates."""
        return min(self.options.chain, self.depth)

    def steps(self, columns: Columns, texts: list[Reading], count: int) -> list[Tensor]:
        """For each depth s the states (B, N - s, H) of drafts s + 1 behind every column c, which predict token s + c +
        1; normed, as the LM head reads them."""
        length = columns.mask.shape[1]
        roots = torch.arange(length, device=columns.mask.device).expand_as(columns.mask)
        states = torch.cat([self.blocks(columns, texts, part) for part in roots.split(self.anchors, 1)], 1)
        return [states[:, : length - step, step] for step in range(min(count, length))]

    def blocks(self, columns: Columns, texts: list[Reading], roots: Tensor) -> Tensor:
        """The states (B, R, K, H) of the blocks behind `roots` (B, R), see `block_states`."""
        network = cast(DFlash, self.network)
        answers = pad_sequence([torch.tensor(text.answer[:-1]) for text in texts], batch_first=True).to(roots.device)
        tokens = answers.gather(1, roots.clamp(min=0))[..., None].repeat(1, 1, network.config.block_size)
        tokens[..., 1:] = network.config.mask_token
        block = network.embedded(tokens.flatten(1), self.teacher.model.get_input_embeddings())
        return block_states(network, columns, roots, block)

    def compare(self, columns: Columns, texts: list[Reading]) -> Mapping[str, Tensor]:
        """The loss of a batch, and its parts; "round" estimates the tokens a round of chains of `CHAIN` tokens."""
        expected = expected_states(texts, self.teacher.config.hidden_size, self.needs.layers)
        lengths = columns.mask.sum(1)
        roots = drawn_roots(lengths, self.anchors if self.training else columns.mask.shape[1])
        states = self.blocks(columns, texts, roots)
        total, parts, accepted = columns.states.new_zeros(()), dict[str, Tensor](), columns.states.new_zeros(())
        alive = roots >= 0
        rows = torch.arange(len(texts), device=roots.device)[:, None].expand_as(roots)
        counts = [(roots >= 0) & (roots + step < lengths[:, None]) for step in range(self.depth)]
        weights = token_weight(torch.stack([counted.sum() for counted in counts]))
        for step, counted in enumerate(counts[: columns.mask.shape[1]]):
            wanted = expected[rows[counted], roots[counted] + step]
            width = max(1, CELLS // cast(DFlash, self.network).vocabulary)
            pieces = in_pieces(self._compared, width, states[:, :, step][counted], wanted)
            entropy, right = (torch.cat(part) for part in zip(*pieces, strict=True))
            total = total + self.options.unroll_decay**step * weights[step] * entropy.sum() / max(len(entropy), 1)
            name = str(step + 1) if step else ""
            parts |= {"right" + name: right.mean()} if len(right) else {}
            parts |= {} if step else {"tokens": entropy.detach().mean()}
            if step < CHAIN:
                alive = alive & torch.zeros_like(counted).masked_scatter(counted, right > 0)
                accepted = accepted + alive.sum()
        if self.depth >= CHAIN:
            parts["round"] = 1 + accepted / (roots >= 0).sum()
        return {**parts, "loss": self.loss_weights.tokens * total}

    def _compared(self, hidden: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy (P,) with the target's distribution, and whether both choose the same token."""
        drafted, wanted = self.teacher.logits(hidden), self.teacher.logits(expected)
        return token_loss(drafted, wanted), (drafted.argmax(-1) == wanted.argmax(-1)).to(drafted.dtype)


def drawn_roots(lengths: Tensor, most: int) -> Tensor:
    """Roots (B, R) int64 among each row's first `lengths` (B,) columns, ascending: `most` that are drawn, or all if
    there are no more; -1 behind a shorter row's."""
    width = int(lengths.max())
    outside = torch.arange(width, device=lengths.device) >= lengths[:, None]
    order = torch.rand(outside.shape, device=lengths.device).masked_fill(outside, 2.0).argsort(1)[:, : min(most, width)]
    drawn = order.masked_fill(order >= lengths[:, None], width).sort(1).values
    return drawn.masked_fill(drawn == width, -1)


def block_states(network: DFlash, columns: Columns, roots: Tensor, block: Tensor) -> Tensor:
    """The states of blocks that begin at columns of the answers, as the LM head reads them: normed.

    roots: (B, R) the blocks' columns. block: (B, R * b, H), the embeddings of their tokens.
    Returns: (B, R, K, H), one state for each token that a block drafts; values at a root of -1 are undefined.
    """
    size, at = network.config.block_size, roots.clamp(min=0)
    # what a block sees is the target's columns before its root, the last of which a `Columns` counts as the root's own:
    # it holds the feature of the token before
    read = torch.cat([columns.states, network.fuse(columns.embeds, columns.features)], 1)
    before = torch.cat([columns.prompt_positions, columns.positions], -1)
    own = torch.arange(columns.mask.shape[1], device=roots.device) <= at[..., None]
    seen = torch.cat([columns.prompt_mask[:, None].expand(-1, roots.shape[1], -1), own], 2)  # (B, R, M + N)
    mask = additive(seen, read.dtype)[:, :, None]  # (B, 1, 1, R, M + N)
    positions = columns.positions.gather(1, at)[..., None] + torch.arange(1, size + 1, device=roots.device)
    for index in range(network.depth):
        context = network.context(read, before, index)
        queries, keys, values = network.project(block, positions.flatten(1), None, index)
        mixed = block_attention(queries, context, (keys, values), mask, size)
        block = network.after_attention(block, mixed, None, index)
    return network.norm(block).unflatten(1, (-1, size))[:, :, -network.config.drafts :]


def block_attention(queries: Tensor, context: Pair, own: Pair, mask: Tensor, size: int) -> Tensor:
    """Attention of blocks: to the target's columns, and within each block in both directions.

    queries: (B, heads, R * b, d). context: keys and values (B, h, S, d) of the target's columns. own: those of the
        blocks (B, h, R * b, d). mask: additive (B, 1, 1, R, S), which of the target's columns each block sees. size: b.
    Returns: (B, heads, R * b, d).
    """
    groups, count = context[0].shape[1], mask.shape[3]
    # (B, h, heads / h, R, b, d); keys and values lack the third dimension
    queries = queries.unflatten(1, (groups, -1)).unflatten(3, (count, size)) * queries.shape[-1] ** -0.5
    keys, values = (part.unflatten(2, (count, size))[:, :, None] for part in own)
    before = torch.einsum("bhgrqd,bhsd->bhgrqs", queries, context[0]) + mask[..., None, :]
    within = queries @ keys.transpose(-1, -2)
    weights = torch.cat([before, within.to(before.dtype)], -1).softmax(-1).to(values.dtype)
    width = context[0].shape[2]
    mixed = torch.einsum("bhgrqs,bhsd->bhgrqd", weights[..., :width], context[1]) + weights[..., width:] @ values
    return mixed.flatten(3, 4).flatten(1, 2)
