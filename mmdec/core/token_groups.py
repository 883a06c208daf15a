"""Groups of tokens that a relaxed rule takes for equal, such as codes of speech that sound alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast, final

import torch
from torch import Tensor

from mmdec.checks.arguments import check_whole
from mmdec.core.sampling import Rng
from mmdec.errors import InputError

MAX_MEMBERSHIPS = 16_000_000  # (token, group) pairs; two int64 tensors and their shares then take 384 MB
MAX_TOKENS = 4_000_000
DISTANCE_ROWS = 512  # rows of the codebook whose distances to all codes are in memory at a time


@final
@dataclass(frozen=True, eq=False)
class TokenGroups:
    """Groups that may overlap: a token in n groups gives each of them 1/n of its probability.

    `from_labels` and `near` make them.

    Args:
        tokens: (M,) int64, the token of each membership; every token has at least one.
        groups: (M,) int64, its group, below V.
        vocab_size: V, number of tokens of the model.

    References:
        Yanuka et al., "Principled Coarse-Grained Acceptance for Speculative Decoding in Speech", 2025, arXiv
        2511.13732.
    """

    tokens: Tensor
    groups: Tensor
    vocab_size: int

    def __post_init__(self) -> None:
        paired = self.tokens.shape == self.groups.shape and self.tokens.numel() > 0
        pairs = torch.stack([self.tokens, self.groups]) if paired else torch.tensor([-1])
        within = int(pairs.min()) >= 0 and int(pairs.max()) < self.vocab_size
        if not within or int(self.tokens.bincount(minlength=self.vocab_size).min()) < 1:
            raise InputError(
                f"`tokens` and `groups` must name a group below {self.vocab_size} for each of as many "
                "tokens, but do not. Make them by `TokenGroups.from_labels`."
            )

    @classmethod
    def from_labels(cls, labels: Any) -> TokenGroups:
        """Make groups that do not overlap.

        Args:
            labels: (V,) whole numbers, for each token of the model the number of its group: a list, an array or a
                tensor.

        Raises:
            InputError: If they are not.
        """
        remedy = "Give the number of a group for each token of the model."
        numbers = _tensor("labels", labels, remedy)
        is_integer = not (numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool)
        if not is_integer or numbers.ndim != 1 or not 1 <= len(numbers) <= MAX_TOKENS:
            raise InputError(
                f"`labels` must be 1 to {MAX_TOKENS} whole numbers in one dimension, but is {numbers.dtype} of the "
                f"shape {tuple(numbers.shape)}. {remedy}"
            )
        groups = cast(Any, torch).unique(numbers.long(), return_inverse=True)[1]  # cast: it is untyped
        return cls(torch.arange(len(groups), device=groups.device), groups, len(groups))

    @classmethod
    def near(cls, codebook: Any, distance: float, vocab_size: int, first_code: int = 0) -> TokenGroups:
        """Make a group around each code: all codes within a Euclidean distance. Other tokens are alone in theirs.

        Args:
            codebook: (C, D), the vector of each code: rows of a codec's codebook, or of the model's embedding.
            distance: Maximum distance to the code in a group's middle; 0: no two different codes count as equal.
            vocab_size: V, number of tokens of the model.
            first_code: Token id of the first code; the others follow it.

        Raises:
            InputError: If the codes do not fit the vocabulary, or the groups would be too large.
        """
        remedy = "Give a finite vector for each code, (C, D)."
        vectors = _tensor("codebook", codebook, remedy).detach().float()
        if vectors.ndim != 2 or not vectors.numel():
            raise InputError(f"`codebook` must have two dimensions, but has the shape {tuple(vectors.shape)}. {remedy}")
        if not vectors.isfinite().all():
            raise InputError(f"`codebook` must be finite, but holds NaN or infinity. {remedy}")
        count = len(vectors)
        check_whole("vocab_size", vocab_size, 1, MAX_TOKENS, "Give the model's number of tokens.")
        if not 0 <= first_code <= vocab_size - count:
            raise InputError(
                f"`vocab_size` must hold the codes {first_code} to {first_code + count - 1}, but is {vocab_size}. Give "
                "the model's, and the token id of the first code as `first_code`."
            )
        if not 0.0 <= distance < math.inf:
            raise InputError(f"`distance` must be 0 or more and finite, but is {distance}. 0 leaves each code alone.")
        rest = torch.ones(vocab_size, dtype=torch.bool, device=vectors.device)
        rest[first_code : first_code + count] = False
        alone = rest.nonzero().flatten()
        pairs, size = [torch.stack([alone, alone], 1)], 0
        for begin in range(0, count, DISTANCE_ROWS):
            rows = vectors[begin : begin + DISTANCE_ROWS]
            # not by matrix products, whose rounding would part equal codes
            near = torch.cdist(rows, vectors, compute_mode="donot_use_mm_for_euclid_dist") <= distance
            pairs.append(near.nonzero() + torch.tensor([begin + first_code, first_code], device=near.device))
            size += len(pairs[-1])
            if size > MAX_MEMBERSHIPS:
                raise InputError(
                    f"`distance` must leave groups of {MAX_MEMBERSHIPS // count} codes in the mean, but {distance} "
                    "makes larger ones. Give a smaller one."
                )
        tokens, groups = torch.cat(pairs).T
        return cls(tokens, groups, vocab_size)

    @cached_property
    def shares(self) -> Tensor:
        """(M,) float64, the share of its token's probability that each membership gets: 1/n for n groups."""
        return self.tokens.bincount(minlength=self.vocab_size).double().reciprocal()[self.tokens]

    def to(self, device: torch.device) -> TokenGroups:
        """Return the same groups on a device."""
        if self.tokens.device == device:
            return self
        return replace(self, tokens=self.tokens.to(device), groups=self.groups.to(device))

    def group_probs(self, p: Tensor) -> Tensor:
        """Return the probabilities (V,) of the groups, P(G) = sum of p(v) / n(v) over the tokens v in G.

        Args:
            p: (V,) float64, the tokens' probabilities.
        """
        return torch.zeros_like(p).index_add_(0, self.groups, p[self.tokens] * self.shares)

    def draw(self, token: int, rng: Rng) -> int:
        """Draw one of the token's groups, each with probability 1/n."""
        groups = self.groups[self.tokens == token]
        return int(groups[0] if len(groups) == 1 else groups[rng.draw(torch.ones_like(groups).double())])

    def token_probs(self, group_probs: Tensor, p: Tensor) -> Tensor:
        """Return the probabilities (V,) of tokens if a group is drawn, then a token v in it by p(v) / n(v).

        Args:
            group_probs: (V,) float64, the groups' probabilities, 0 where those of p are.
            p: (V,) float64.
        """
        inside = p[self.tokens] * self.shares / self.group_probs(p).clamp(min=1e-300)[self.groups]
        return torch.zeros_like(p).index_add_(0, self.tokens, inside * group_probs[self.groups])


def _tensor(name: str, values: Any, remedy: str) -> Tensor:
    try:
        return torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise InputError(f"`{name}` must be an array of numbers, but cannot be read ({error}). {remedy}") from None
