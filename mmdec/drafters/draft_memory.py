"""A tree-growing drafter's memory of a run: waiting columns, the network's cache, how prompts were compressed."""

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
    """The fresh columns of a prompt, before they have been through the network. Its last column is none of them: it
    waits for its token and comes with the first verdict."""

    embeds: Tensor  # (B, F, H)
    features: Tensor  # (B, F, k * H)
    visual: Tensor  # (B, F) bool
    mask: Tensor  # (B, F) bool

    def select(self, live: Tensor) -> WaitingPrompt:
        return WaitingPrompt(self.embeds[live], self.features[live], self.visual[live], self.mask[live])


@dataclass(frozen=True)
class Waiting:
    """Columns that a round accepted, before they have been through the network."""

    features: Tensor  # (B, A, k * H)
    tokens: Tensor  # (B, A): that after each feature
    counts: list[int]  # of each row, padded on the right

    @classmethod
    def of(cls, features: Tensor, verdict: Verdict, counts: list[int]) -> Waiting:
        """features (B, N, k * H) of a draft's nodes, of which the path's are taken."""
        path = verdict.path
        if len(path) == 1 < features.shape[1]:
            features = features.index_select(1, path[0].clamp(min=0))
        elif features.shape[1] > 1:
            features = features.gather(1, path.clamp(min=0)[..., None].expand(-1, -1, features.shape[2]))
        return cls(features, verdict.tokens.clamp(min=0), counts)

    @classmethod
    def joined(cls, parts: Sequence[Waiting]) -> Waiting:
        """One after another."""
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
        return Waiting(self.features[live], self.tokens[live], [self.counts[row] for row in live.tolist()])


@dataclass(frozen=True)
class PromptInfo:
    """How a row's visual tokens were compressed."""

    compressor: str | None = None
    kept: Tensor | None = None  # (V,) float in [0, 1]


@dataclass
class Memory:
    """A run, and what may follow it in a conversation."""

    cache: DraftCache
    columns: list[int]  # of each row's text, those that wait included
    positions: list[int]  # in each row's text, of its next column that goes through the network
    queue: list[WaitingPrompt | Waiting] = field(default_factory=list)  # the oldest first
    carry: Tensor | None = None  # (B, 1, C), what `DraftNetwork.fuse` wants
    info: list[PromptInfo] = field(default_factory=list)  # of each row; empty until the prompt's pass
    step: TokenStep | None = None  # a token at a time, of one row; None where torch does it as well, or not asked yet
    asked: bool = False  # whether a step was looked for since the prompt
    packed: Packed | None = None  # the network's weights; None until the first pass, and for large networks


@dataclass(frozen=True)
class LastColumn:
    """Each row's newest column, the root's: its keys and values are in the cache, its output is not computed yet."""

    states: Tensor  # (B, 1, H)
    queries: Tensor  # (B, heads, 1, d)
    features: Tensor  # (B, 1, k * H)

    def hidden(self, network: DraftNetwork, cache: DraftCache, packed: Packed | None = None) -> Tensor:
        """Its output (B, 1, H)."""
        return network.attend(self.states, self.queries, *cache.accepted(), packed)
