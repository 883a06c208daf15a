"""Training of EAGLE-3 (Li et al. 2025, arXiv 2503.01840): training-time test, and a draft vocabulary from the answers.

Training unrolls several drafting steps: from the second step on, the network reads its own hidden states. Each step's
distribution is compared with the target's at the same token, restricted to the draft vocabulary. Hidden states are not
compared. Tokens at which the target's likeliest token is not in the draft vocabulary do not count.

In shapes: P answer tokens of a batch, V tokens of the target's vocabulary, Vd of the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, cast, final

import torch
from torch import Tensor

from mmdec.drafters.eagle.eagle3 import Eagle3, Eagle3Config
from mmdec.drafters.networks.config import DraftConfig
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
from mmdec.drafters.networks.training.teacher import TargetFeatures, Teacher
from mmdec.drafters.networks.training.unroll import UnrollInputs
from mmdec.errors import InputError
from mmdec.types import Needs

# value of the option `columns`, which says how a picture's tokens enter the network -> fields of `Eagle3Config`
CONVENTIONS: dict[str, dict[str, str]] = {
    "engine": {"positions": "temporal", "pictures": "placeholder"},
    "projected": {"positions": "text", "pictures": "projected"},
}


@final
class Eagle3Module(DraftModule):
    """Trains EAGLE-3. The paper's settings are `unroll` 7, `unroll_decay` 0.8 and `noise` 0.

    Args:
        columns: How a picture's tokens enter the network; its configuration stores this. "engine", as in vLLM: with the
            embedding of the placeholder token, at the first axis of the target's positions. "projected", as in MSD:
            with the projected visual embeddings, at positions counted like text.
        draft_vocab: Number of tokens that can be drafted: the most frequent ones in the training answers; 0: all.
    """

    system: ClassVar[str] = "eagle3"
    weights: ClassVar[LossWeights] = LossWeights(features=0.0, tokens=1.0)

    def __init__(
        self,
        units: list[str] | None = None,
        columns: Literal["engine", "projected"] = "engine",
        draft_vocab: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(units, **options)
        if columns not in CONVENTIONS:
            raise InputError(f"`columns` must be engine or projected, but is {columns!r:.60}. If in doubt, use engine.")
        if draft_vocab < 0:
            raise InputError(f"`draft_vocab` must be 0 or more, but is {draft_vocab}. 0 drafts all tokens.")
        self.convention, self.draft_vocab = columns, draft_vocab
        self.hparams.update(columns=columns, draft_vocab=draft_vocab)

    def training_needs(self, config: DraftConfig) -> Needs:
        """Return which hidden states of the target training needs.

        They are those that the network reads, and the LM head's input (layer -1), from which the target's distributions
        are computed.
        """
        return Needs(layers=(*config.layers, -1), embeds=config.projected)

    def draft_config(self, teacher: Teacher) -> DraftConfig:
        """Return the configuration of a new network.

        Sizes are those of the target's layers; `columns`, `draft_vocab` and the recipe's `network` options override
        them.
        """
        settings = {**CONVENTIONS[self.convention], "draft_vocab_size": self.draft_vocab, **self.options.network}
        if settings["draft_vocab_size"] >= teacher.config.vocab_size:
            settings["draft_vocab_size"] = 0
        return Eagle3Config.like(teacher.config, **settings)

    def first_network(self) -> DraftNetwork:
        """Return the network that training begins with: loaded from the folder `start`, or new.

        A new network gets its draft vocabulary from the training answers. Its LM head begins as a copy of the target's
        LM head, if both have the same hidden size.
        """
        network = cast(Eagle3, super().first_network())
        config = network.config
        if config.own_embedding or config.mask_token is not None:
            raise InputError(
                "`network` must be EAGLE-3's, with the target's embedding, but has `own_embedding` or `mask_token`. "
                "Leave them out."
            )
        if self.options.start is None:
            token_ids = torch.arange(config.vocab_size)
            if config.has_draft_vocabulary:
                token_ids = frequent_tokens(self.data.training_answers(), config.vocabulary)
                network.get_buffer("d2t").copy_(token_ids - torch.arange(len(token_ids)))
                network.get_buffer("t2d").zero_()[token_ids] = True
            head = self.teacher.head[0]
            if head.shape[1] == config.hidden_size:
                network.lm_head.weight.data.copy_(head[token_ids.to(head.device)])
        return network

    @property
    def draft_indices(self) -> Tensor:
        network = cast(Eagle3, self.network)
        places = torch.full((network.config.vocab_size,), -1, device=self.device)
        token_ids = network.draft_vocabulary.all_token_ids(self.device)
        places[token_ids] = torch.arange(len(token_ids), device=self.device)
        return places

    def step_logits(self, states: Tensor, depth: int) -> Tensor:
        """Compute the logits (..., Vd) float32 over the draft vocabulary, by the network's LM head."""
        return cast(Eagle3, self.network).logits(states, cast(Any, None)).float()

    def compare(self, columns: UnrollInputs, texts: list[TargetFeatures]) -> Mapping[str, Tensor]:
        probs, best = self.distributions(columns, texts)
        # for each answer token, the index of its distribution in `probs`
        number = (columns.mask.flatten().cumsum(0) - 1).view(columns.mask.shape)
        weights = step_weights(torch.zeros_like(columns.mask).masked_scatter(columns.mask, best >= 0), self.depth)
        totals = StepTotals(columns.mask, weights, self.options.unroll_decay)
        for step, hidden in enumerate(self.steps(columns, self.depth)):
            has_target = columns.mask[:, step:]
            rows = number[:, step:][has_target]
            compared = hidden[has_target], probs[rows], best[rows]
            entropy, right = concat_pieces(self._compare_tokens, probs.shape[1], *compared)
            tokens = entropy.sum() / (best[rows] >= 0).sum().clamp(min=1)
            totals.add(self.loss_weights.tokens * tokens, has_target, right)
            totals.parts.setdefault("tokens", tokens)
        return totals.result()

    def _compare_tokens(self, hidden: Tensor, probs: Tensor, best: Tensor) -> tuple[Tensor, Tensor]:
        """Compare the drafter with the target at P answer tokens.

        Args:
            hidden: (P, H), the drafter's states.
            probs: (P, Vd), the target's distributions over the draft vocabulary.
            best: (P,), index of the target's likeliest token in the draft vocabulary; -1: it is not there.

        Returns:
            The cross-entropies (P,), 0 where `best` is -1; and (P,) 1 where both have the same likeliest token.
        """
        drafted = self.step_logits(hidden, 0)
        entropy = -(probs * drafted.log_softmax(-1)).sum(-1)
        return entropy.masked_fill(best < 0, 0.0), (drafted.argmax(-1) == best).to(entropy.dtype)

    @torch.no_grad()
    def distributions(self, columns: UnrollInputs, texts: Sequence[TargetFeatures]) -> tuple[Tensor, Tensor]:
        """Return the target's distributions (P, Vd) over the draft vocabulary, and its likeliest tokens (P,).

        Both are for P answer tokens. The likeliest token is an index of the draft vocabulary; -1 if it is not there.
        """
        expected = target_states(texts, self.teacher.config.hidden_size, self.needs.layers)[columns.mask]
        drafted, network = self.draft_indices, cast(Eagle3, self.network)
        tokens = network.draft_vocabulary.all_token_ids(expected.device)

        def restrict(states: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.teacher.logits(states)
            restricted = logits[:, tokens] if network.config.has_draft_vocabulary else logits
            return restricted.softmax(-1), drafted[logits.argmax(-1)]

        probs, best = concat_pieces(restrict, len(drafted), expected)
        return probs, best
