"""The weights of prompt tokens: one embedding for each place ahead, and how often each guesses right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor, nn

from mmdec.core.tree_shape import HeadAccuracy
from mmdec.drafters.networks.weights import DrafterWeights, WeightsConfig, check_size
from mmdec.drafters.registry import built_in_network
from mmdec.errors import InputError
from mmdec.types import Drafter

MAX_TOKENS, MAX_COPIES = 16, 16


@dataclass(frozen=True)
class PromptTokensConfig(WeightsConfig):
    """Number of prompt tokens, and how often they guess right."""

    tokens: int = 3  # number of places ahead that are guessed
    copies: int = 1  # number of embeddings for each place, whose logits are averaged (PPD's ensemble)
    # [place][rank]: measured probability that the target's k-th best token there is right; (): not measured
    ranks: tuple[tuple[float, ...], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_size("tokens", self.tokens, MAX_TOKENS, "3 is the paper's.")
        check_size("copies", self.copies, MAX_COPIES, "If in doubt, use 1.")
        if not isinstance(self.ranks, (list, tuple)) or any(not _are_numbers(row) for row in self.ranks):
            raise InputError(f"`ranks` must be rows of numbers, but is {self.ranks!r:.60}. Leave it out.")
        object.__setattr__(self, "ranks", tuple(map(tuple, self.ranks)))  # lists from a JSON file become tuples
        if self.ranks:
            HeadAccuracy(self.ranks)  # raises InputError if they are no probabilities
            if len(self.ranks) != self.tokens:
                raise InputError(
                    f"`ranks` must have a row for each of {self.tokens} prompt tokens, but has {len(self.ranks)}. "
                    "Leave it out."
                )


def _are_numbers(row: object) -> bool:
    return isinstance(row, (list, tuple)) and all(
        type(probability) in (int, float) for probability in cast(list[Any], row)
    )


@built_in_network("prompt_tokens", note="Prompt tokens: trained inputs of the model's own pass, which guess ahead.")
@final
class PromptTokens(DrafterWeights[PromptTokensConfig]):
    """The embeddings of prompt tokens. No network runs beside the target, which reads them as soft nodes."""

    config_class: ClassVar[type[PromptTokensConfig]] = PromptTokensConfig

    def build(self, config: PromptTokensConfig) -> None:
        self.embeddings = nn.Parameter(torch.randn(self.copies * self.max_depth, config.hidden_size))

    def make_drafter(self, embedding: nn.Module, output: nn.Linear) -> Drafter:
        from mmdec.drafters.prompt_tokens.drafter import PromptTokensDrafter

        return PromptTokensDrafter(self)

    @property
    def max_depth(self) -> int:
        """The number of places ahead that are guessed."""
        return self.config.tokens

    @property
    def copies(self) -> int:
        """The number of embeddings for each place."""
        return self.config.copies

    @property
    def ranks(self) -> tuple[tuple[float, ...], ...]:
        """The measured probability [place][rank] that a guess is right; () if it was not measured."""
        return self.config.ranks

    def inputs_of(self, indices: Tensor) -> Tensor:
        """Return `Draft.soft` (B, N, H).

        Args:
            indices: (B, N), the index of each soft node's embedding, `copy * max_depth + place`; -1 at other nodes.
        """
        return torch.cat([self.embeddings, self.embeddings.new_zeros(1, self.embeddings.shape[1])])[indices]

    def chains_below(self, node: int, first: int, places: int) -> tuple[list[int], list[int]]:
        """Return the soft nodes below a node: a chain for each copy.

        Args:
            node: Index of the node.
            first: Index that the first soft node will have.
            places: Length of the chains; 0: there are none.

        Returns:
            The parents of the soft nodes, and the indices of their embeddings.
        """
        parents, indices = list[int](), list[int]()
        for copy in range(self.copies if places else 0):
            start = first + copy * places
            parents += [node, *range(start, start + places - 1)]
            indices += range(copy * self.max_depth, copy * self.max_depth + places)
        return parents, indices
