"""Training of heads that keep a state: Medusa's, Hydra's, ReDrafter's and MLPSpeculator's, on the target's own answers.

Every token of an answer is a root. The heads read the true answer's tokens, level by level, and the distribution of
each level is compared with the target's (`token_loss`, as Hydra++ does). Level i predicts the token i + 1 after the
root.

In shapes: B texts, N tokens of the longest answer, H channels, S channels of a state, P compared states.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mmdec.drafters.heads.network import HEADS_KINDS, Heads
from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.drafters.networks.training.data import frequent_tokens
from mmdec.drafters.networks.training.module import (
    DraftModule,
    LossWeights,
    StepTotals,
    concat_pieces,
    step_weights,
    target_states,
)
from mmdec.drafters.networks.training.teacher import TargetFeatures
from mmdec.drafters.networks.training.unroll import UnrollInputs, unroll_steps
from mmdec.errors import InputError


@final
class HeadsModule(DraftModule):
    """Trains heads of any kind.

    `network: {kind: hydra}` chooses the kind; it may be medusa, hydra, recurrent or mlp. `unroll` is the number of
    levels of the recurrent kind; the others train all of their `heads`. `unroll_decay` is the loss weight of a level
    relative to the level above, 0.8 in the papers. LM heads of the network's own begin as the target's.

    Hydra++ is `{kind: hydra, prefix_layer: true, blocks: 4}`. KOALA's deeper heads are `blocks: 2` or 3, Cerberus'
    sequential knowledge is `previous_head: true`. Amphista's attention between heads is `{kind: medusa, attention:
    true}`.

    Args:
        vocabulary: Number of tokens whose probabilities training compares, the most frequent in the answers; 0: all.
            With a large vocabulary most of the time goes into the LM head. Validation ranks all tokens.
    """

    system: ClassVar[str] = "heads"
    heads: ClassVar[Mapping[str, Mapping[str, Any]]] = {kind: {"kind": kind} for kind in HEADS_KINDS}
    weights: ClassVar[LossWeights] = LossWeights(features=0.0, tokens=1.0)

    def __init__(self, units: list[str] | None = None, vocabulary: int = 0, **options: Any) -> None:
        super().__init__(units, **options)
        if vocabulary < 0:
            raise InputError(f"`vocabulary` must be 0 or more, but is {vocabulary}. 0 compares all tokens.")
        self.vocabulary = vocabulary
        self.compared_tokens: Tensor | None = None  # ids of the tokens that training compares, or all if None
        self.hparams.update(vocabulary=vocabulary)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if 0 < self.vocabulary < self.network.draft_vocabulary.size:
            self.compared_tokens = frequent_tokens(self.data.training_answers(), self.vocabulary)

    def first_network(self) -> DraftNetwork:
        network = super().first_network()
        assert isinstance(network, Heads)
        if self.options.start is None:
            start_from_target(network, *self.teacher.head, cast(Any, self.teacher.model.get_input_embeddings()).weight)
        return network

    @property
    def depth(self) -> int:
        """The number of levels, all of which the loss compares."""
        return cast(Heads, self.network).max_depth or self.options.unroll

    @property
    def chain(self) -> int:
        return min(self.options.chain, cast(Heads, self.network).max_depth or self.options.chain)

    def steps(self, columns: UnrollInputs, count: int) -> list[Tensor]:
        """Run up to `count` levels, with each answer token as a root.

        Returns:
            For each level i the states (B, N - i, S). State r belongs to the root r, and predicts answer token r + i +
            1.
        """
        network, embed = cast(Heads, self.network), self.teacher.embed
        hidden, length = columns.features, columns.tokens.shape[1]
        if network.config.prefix_layer:
            hidden = network.norm(unroll_steps(network, columns, 1)[0])
        state, states = network.heads.begin(hidden), list[Tensor]()
        for level in range(min(count, length)):
            state = network.heads.step(state[:, : length - level], columns.tokens[:, level:], level, embed)
            states.append(state)
        return states

    def step_logits(self, states: Tensor, depth: int) -> Tensor:
        return self.level_logits(states, depth)

    def level_logits(self, state: Tensor, level: int, tokens: Tensor | None = None) -> Tensor:
        """Compute the logits float32 of one level from its states (..., S).

        Args:
            tokens: (v,), the tokens whose logits (..., v) are wanted; None: all.
        """
        network = cast(Heads, self.network)
        own = network.lm_head(level)
        weight, bias = self.teacher.head if own is None else (own.weight, own.bias)
        return chosen_logits(state[..., -network.config.output_size :], weight, bias, tokens)

    def compare(self, columns: UnrollInputs, texts: list[TargetFeatures]) -> Mapping[str, Tensor]:
        expected = target_states(texts, self.teacher.config.hidden_size, self.needs.layers)
        totals = StepTotals(columns.mask, step_weights(columns.mask, self.depth), self.options.unroll_decay)
        vocab_size = self.network.draft_vocabulary.size
        for level, states in enumerate(self.steps(columns, self.depth)):
            has_target = columns.mask[:, level:]
            compared = states[has_target], expected[:, level:][has_target]
            loss, right = concat_pieces(partial(self._compare_tokens, level), vocab_size, *compared)
            totals.add(loss.sum() / max(len(loss), 1), has_target, right)
        return totals.result()

    def _compare_tokens(self, level: int, states: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
        """Compare the heads' distributions at one level with the target's.

        Args:
            states: (P, S), from `steps`.
            expected: (P, H), the target's states.

        Returns:
            The losses (P,); and (P,) 1 where both have the same likeliest token, else 0.
        """
        tokens = self.compared_tokens if self.training else None
        tokens = None if tokens is None else tokens.to(states.device)
        drafted, target_logits = (
            self.level_logits(states, level, tokens),
            chosen_logits(expected, *self.teacher.head, tokens),
        )
        loss = self.loss_weights.logit_loss(drafted, target_logits)
        return loss, (drafted.argmax(-1) == target_logits.argmax(-1)).to(drafted.dtype)


def chosen_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor | None) -> Tensor:
    """Compute the logits (..., v) float32 of these tokens from the LM head's input (..., D).

    Args:
        weight: (V, D), the LM head.
        bias: (V,), its bias, or None.
        tokens: (v,); None: all V.
    """
    if tokens is not None:
        weight, bias = weight[tokens], None if bias is None else bias[tokens]
    return linear(hidden.to(weight.dtype), weight, bias).float()


@torch.no_grad()
def start_from_target(network: Heads, head: Tensor, bias: Tensor | None, embedding: Tensor) -> None:
    """Let new heads begin where the target is: each draws the target's next token once more.

    What narrows several vectors to one begins as the target's hidden state, LM heads as the target's, and embeddings
    of the mlp kind as the target's, scaled to their published variance.

    Args:
        head: (V, H), the target's LM head.
        bias: (V,), its bias, or None.
        embedding: (V, H), the target's embedding.
    """
    size = network.config.hidden_size
    ends = ("res_connection", "input_proj")
    for part in (cast(nn.Linear, part) for name, part in network.heads.named_modules() if name.endswith(ends)):
        part.weight[:, size:] = 0
        part.weight[:, :size] = torch.eye(len(part.weight), size)
        part.bias.zero_()
    for lm_head in cast(list[nn.Linear], list(network.lm_heads)):
        lm_head.weight.zero_()[:, :size] = head[:, : lm_head.in_features].to(lm_head.weight)
        if lm_head.bias is not None:
            lm_head.bias.copy_(lm_head.bias.new_zeros(len(lm_head.bias)) if bias is None else bias)
    for name, table in network.heads.named_parameters():
        if name.startswith("emb.") and table.shape == embedding.shape:
            table.copy_(embedding / embedding.std() / size**0.5)
