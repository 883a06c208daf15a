"""The state of a tree-growing drafter in one run: columns to process, the network's cache, how images were
compressed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mmdec.drafters.draft_cache import DraftCache
from mmdec.nn.draft_network import DraftNetwork, Packed
from mmdec.nn.draft_step import TokenStep
from mmdec.types import Verdict


@dataclass(frozen=True)
class WaitingPrompt:
    """The prompt's columns before the draft network has processed them.

    The last column is missing: it needs the first generated token, and comes with the first verdict.
    """

    embeds: Tensor  # (B, F, H)
    features: Tensor  # (B, F, k * H)
    visual: Tensor  # (B, F) bool
    mask: Tensor  # (B, F) bool

    def select(self, live: Tensor) -> WaitingPrompt:
        """Keep only the rows live (K,) int64."""
        return WaitingPrompt(self.embeds[live], self.features[live], self.visual[live], self.mask[live])


@dataclass(frozen=True)
class Waiting:
    """Columns accepted in one round, before the draft network has processed them."""

    features: Tensor  # (B, A, k * H)
    tokens: Tensor  # (B, A): the token after each feature
    counts: list[int]  # columns of each row; the rest is padding on the right

    @classmethod
    def of(cls, features: Tensor, verdict: Verdict, counts: list[int]) -> Waiting:
        """Select the accepted path from the features (B, N, k * H) of a draft's nodes."""
        path = verdict.path
        if len(path) == 1 < features.shape[1]:
            features = features.index_select(1, path[0].clamp(min=0))
        elif features.shape[1] > 1:
            features = features.gather(1, path.clamp(min=0)[..., None].expand(-1, -1, features.shape[2]))
        return cls(features, verdict.tokens.clamp(min=0), counts)

    @classmethod
    def joined(cls, parts: Sequence[Waiting]) -> Waiting:
        """Concatenate the columns of several rounds."""
        if len(parts) == 1:
            return parts[0]
        counts = [sum(row) for row in zip(*(part.counts for part in parts), strict=True)]
        if all(min(part.counts) == part.features.shape[1] for part in parts):
            features, tokens = torch.cat([part.features for part in parts], 1), torch.cat([p.tokens for p in parts], 1)
            return cls(features, tokens, counts)
        rows = range(len(counts))
        features = [torch.cat([part.features[row, : part.counts[row]] for part in parts]) for row in rows]
        tokens = [torch.cat([part.tokens[row, : part.counts[row]] for part in parts]) for row in rows]
        pad = nn.utils.rnn.pad_sequence
        return cls(pad(features, batch_first=True), pad(tokens, batch_first=True), counts)

    def select(self, live: Tensor) -> Waiting:
        """Keep only the rows live (K,) int64."""
        return Waiting(self.features[live], self.tokens[live], [self.counts[row] for row in live.tolist()])


@dataclass(frozen=True)
class PromptInfo:
    """How the visual tokens of a row were compressed."""

    compressor: str | None = None
    kept: Tensor | None = None  # (V,) in [0, 1]: weight of each visual token


@dataclass
class Memory:
    """The drafter's state of a run; the next turn of a chat may continue it."""

    cache: DraftCache
    columns: list[int]  # columns of each row's text, waiting ones included
    positions: list[int]  # text position of each row's next column to process
    queue: list[WaitingPrompt | Waiting] = field(default_factory=list)  # columns to process, oldest first
    carry: Tensor | None = None  # (B, 1, C), the extra input of `DraftNetwork.fuse`
    info: list[PromptInfo] = field(default_factory=list)  # for each row; empty until the prompt was processed
    step: TokenStep | None = None  # fast path for single tokens of one row; None: not available, or not looked for yet
    asked: bool = False  # whether `step` was looked for since the prompt
    packed: Packed | None = None  # packed weights; None before the first pass, and for large networks


@dataclass(frozen=True)
class LastColumn:
    """The newest column of each row (the root's): its keys and values are cached, its output is not computed yet."""

    states: Tensor  # (B, 1, H)
    queries: Tensor  # (B, heads, 1, d)
    features: Tensor  # (B, 1, k * H)

    def hidden(self, network: DraftNetwork, cache: DraftCache, packed: Packed | None = None) -> Tensor:
        """Compute the output (B, 1, H) of the column."""
        return network.attend(self.states, self.queries, *cache.accepted(), packed)
