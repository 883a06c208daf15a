"""Training of prompt tokens: the target reads its own answers as drafts, with soft nodes below some of their tokens.

An answer is a chain of nodes, so one pass gives the teacher's distributions at the answer's tokens and the student's at
the soft nodes. It runs by the code that scores drafts, and only the soft nodes' embeddings have gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from mmdec.core.tree import trees_from_lists
from mmdec.core.tree_shape import MAX_RANKS
from mmdec.drafters.networks.training.data import DraftBatch
from mmdec.drafters.networks.training.module import DraftModule, LossWeights
from mmdec.drafters.networks.training.samples import Inputs
from mmdec.drafters.networks.weights import WeightsConfig
from mmdec.drafters.prompt_tokens.network import PromptTokens
from mmdec.errors import InputError
from mmdec.training.checkpoints import check_positive
from mmdec.training.optim import token_weight
from mmdec.types import Needs


@dataclass(frozen=True)
class Guesses:
    """What soft nodes guess at one place of a batch of answers: P guesses."""

    logits: Tensor  # (P, V), the means of the copies
    expected: Tensor  # (P, V), the target's logits there
    texts: list[int]  # index of each guess's answer
    tokens: list[int]  # index of the guessed token in the answer


@final
class PromptTokensModule(DraftModule):
    """Trains prompt tokens, by the cross-entropy with the target's distribution.

    `network: {tokens: 3, copies: 1}` says how many. `unroll_decay` is the loss weight of a place relative to the place
    before, 0.8 in PPD. New embeddings begin as those of random tokens.

    Args:
        chains: Number of places in each answer below which soft nodes stand, drawn anew in each step.
    """

    system: ClassVar[str] = "prompt_tokens"
    weights: ClassVar[LossWeights] = LossWeights(features=0.0, tokens=1.0)

    def __init__(self, units: list[str] | None = None, chains: int = 32, **options: Any) -> None:
        super().__init__(units, **options)
        check_positive(chains=chains)
        if self.options.keep_features or self.loss_weights.features:
            raise InputError("`keep_features` and `features` must be left out: prompt tokens read no hidden states.")
        self.chains = chains
        self.hparams.update(chains=chains)

    def training_needs(self, config: WeightsConfig) -> Needs:
        return Needs()

    def first_network(self) -> PromptTokens:
        network = super().first_network()
        assert isinstance(network, PromptTokens)
        if self.options.start is None:
            ids = torch.randint(network.config.vocab_size, (len(network.embeddings),))
            with torch.no_grad():
                network.embeddings.copy_(self.teacher.embed(ids.to(self.teacher.device)))
        return network

    @property
    def depth(self) -> int:
        return self.network.max_depth

    @property
    def chain(self) -> int:
        return self.depth

    def guess(self, prompts: Sequence[Inputs], answers: Sequence[Sequence[int]], chains: int | None) -> list[Guesses]:
        """Let the target read answers with soft nodes.

        Args:
            prompts: The target's inputs for each.
            answers: Token ids.
            chains: Number of tokens in each answer below which soft nodes stand; None: all.

        Returns:
            The guesses of each place.
        """
        network: PromptTokens = self.network
        trees, inputs = list[tuple[list[int], list[int]]](), list[list[int]]()
        # [place]: (answer, soft nodes of all copies, node whose logits are expected)
        guessed: list[list[tuple[int, list[int], int]]] = [[] for _ in range(self.depth)]
        for text, answer in enumerate(answers):
            length = max(len(answer) - 1, 1)  # nothing follows the last token
            parents, indices = list(range(length - 1)), [-1] * length
            roots = torch.randperm(max(length - 1, 0))[:chains].sort().values.tolist()
            for node in roots:
                places = min(self.depth, length - 1 - node)
                first = 1 + len(parents)
                below = network.chains_below(node, first, places)
                parents += below[0]
                indices += below[1]
                for place in range(places):
                    soft = list(range(first + place, first + network.copies * places, places))
                    guessed[place].append((text, soft, node + 1 + place))
            filler = [answer[0]] * (len(parents) + 1 - length)
            trees.append(([*answer[1:length], *filler], parents))
            inputs.append(indices)
        device = network.embeddings.device
        draft = trees_from_lists(torch.tensor([answer[0] for answer in answers], device=device), trees)
        size = draft.tokens.shape[1]
        table = torch.tensor([[*row, *[-1] * (size - len(row))] for row in inputs], device=device)
        draft = replace(draft, soft=network.inputs_of(table))
        logits = self.teacher.score_draft(prompts, draft, self.options.half_teacher).logits
        found = list[Guesses]()
        for place in guessed:
            texts = [text for text, _, _ in place]
            copies = torch.tensor([soft for _, soft, _ in place], dtype=torch.long).view(-1, network.copies)
            nodes = [node for _, _, node in place]
            drafted = logits[torch.tensor(texts, dtype=torch.long)[:, None], copies].float().mean(1)
            found.append(Guesses(drafted, logits[texts, nodes].float().detach(), texts, [node + 1 for node in nodes]))
        return found

    def compare_guesses(self, guesses: Sequence[Guesses]) -> Mapping[str, Tensor]:
        """Return name -> value: the batch's "loss", and "right", "right2", ...

        The latter say for each place how often guess and target have the same likeliest token.
        """
        total, parts = guesses[0].logits.new_zeros(()), dict[str, Tensor]()
        weights = token_weight(torch.tensor([len(place.texts) for place in guesses], device=total.device))
        for index, place in enumerate(guesses):
            if not place.texts:
                continue
            loss = self.loss_weights.logit_loss(place.logits, place.expected).mean()
            total = total + self.options.unroll_decay**index * weights[index] * loss
            right = place.logits.argmax(-1) == place.expected.argmax(-1)
            parts["right" + (str(index + 1) if index else "")] = right.float().mean()
        return {**parts, "loss": total}

    def training_step(self, batch: DraftBatch, batch_idx: int) -> Tensor:
        assert batch.prompts is not None
        parts = self.compare_guesses(self.guess(batch.prompts, batch.answers, self.chains))
        self.log_parts(parts, len(batch.rows))
        return parts["loss"]

    def validation_step(self, batch: DraftBatch, batch_idx: int) -> None:
        assert batch.prompts is not None
        for prompt, answer in zip(batch.prompts, batch.answers, strict=True):  # one by one, to save memory
            guesses = self.guess([prompt], [answer], None)
            ranks = torch.full((max(len(answer) - 1, 1), self.depth), MAX_RANKS)
            for index, place in enumerate(guesses):
                true = torch.tensor([answer[token] for token in place.tokens], dtype=torch.long)
                own = place.logits.gather(-1, true.to(place.logits.device)[:, None])
                rows = [token - 1 - index for token in place.tokens]
                ranks[rows, index] = (place.logits > own).sum(-1).clamp(max=MAX_RANKS).cpu()
            self.add_validation([ranks], float(self.compare_guesses(guesses)["loss"]))

    def keep_probabilities(self, probabilities: list[list[float]]) -> None:
        self.network.config = replace(self.network.config, ranks=tuple(map(tuple, probabilities)))
