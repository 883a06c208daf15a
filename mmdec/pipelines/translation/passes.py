"""What a caller of `translate_speech` hears while it runs: each pass of the linguistic decoder, and the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from mmdec.runtime import Stopwatch
from mmdec.targets.units import EOS, PAD

SPECIALS = 4  # <s> <pad> </s> <unk> are the first four units of every vocabulary


@dataclass(frozen=True)
class Graph:
    """One utterance's graph, on the CPU."""

    emissions: Tensor = field(repr=False)  # (L, V) log-probabilities of units
    links: Tensor = field(repr=False)  # (L, L) log-probabilities, -inf where there is no link
    units: list[str] = field(repr=False)  # V names
    path: list[int]  # vertices in order; empty where the graph only drafts
    chosen: list[str]  # the unit of each vertex on the path, <s> and </s> among them


@dataclass(frozen=True)
class Pass:
    """One pass of a network that settles units, or of the graph that drafts them."""

    piece: int  # a long recording is cut at its pauses
    units: list[str]  # settled by this pass, in order
    tokens: int  # the same with the special ones, which are no units of speech
    seconds: float  # since the piece's linguistic decoding began, without what `on_pass` took
    graph: Graph | None = None  # where this is the graph's pass


OnPass = Callable[[Pass], None]


@final
class PassListener:
    """Turns one utterance's tokens into passes, with their time. Without `on_pass` it does nothing."""

    def __init__(self, on_pass: OnPass | None, piece: int, units: Sequence[str], device: torch.device) -> None:
        self._on_pass, self._piece, self._units = on_pass, piece, list(units)
        self._stopwatch, self._seconds = Stopwatch(device), 0.0
        self.limit: int | None = None  # tokens that are kept; a decoder may take a step more
        self._ended = False  # a decoder on a GPU takes some steps more, for it rarely looks whether its rows ended

    def tokens(self, tokens: Sequence[int], graph: Graph | None = None) -> None:
        """A pass settled these tokens, special ones among them."""
        if self._on_pass is None:
            return
        self._seconds += self._stopwatch.lap()
        if self.limit is not None:
            tokens = tokens[: self.limit]
            self.limit -= len(tokens)
        units = [self._units[token] for token in tokens if token >= SPECIALS]
        self._on_pass(Pass(self._piece, units, len(tokens), self._seconds, graph))
        self._stopwatch.lap()

    def step(self, tokens: Tensor) -> None:
        """As `ArDecoder.generate` calls it: one token (1,) of one row. After the row's end nothing is told."""
        if self._on_pass is not None and not self._ended:
            token = int(tokens)
            self._ended = token in (EOS, PAD)
            self.tokens([token])

    def graph(
        self, emissions: Tensor, links: Tensor, tokens: Tensor | None = None, vertices: Tensor | None = None
    ) -> None:
        """One row's graph was drawn, emissions (L, V) and links (L, L); with a path, tokens and vertices (K,) of which
        -1 is padding, its units are settled."""
        if self._on_pass is None:
            return
        chosen = [] if tokens is None else [token for token in tokens.tolist() if token >= 0]
        path = [] if vertices is None else [vertex for vertex in vertices.tolist() if vertex >= 0]
        names = [self._units[token] for token in chosen]
        self.tokens(chosen, Graph(emissions.cpu(), links.cpu(), self._units, path, names))
