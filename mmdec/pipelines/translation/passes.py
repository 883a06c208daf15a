"""The values that `translate_speech` passes to `on_pass`: each pass of the linguistic decoder, and the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from mmdec.decode.watch import Stopwatch
from mmdec.targets.units import EOS, PAD

SPECIALS = 4  # <s> <pad> </s> <unk> are the first four units of every vocabulary


@dataclass(frozen=True)
class Graph:
    """The graph of one utterance, on the CPU."""

    emissions: Tensor = field(repr=False)  # (L, V) log-probabilities of V units at L vertices
    links: Tensor = field(repr=False)  # (L, L) log-probabilities of links from row to column, -inf where there is none
    units: list[str] = field(repr=False)  # the V units' names, by id
    path: list[int]  # vertices of the chosen path in order; empty if the graph only drafts
    chosen: list[str]  # the unit of each vertex on the path, <s> and </s> included


@dataclass(frozen=True)
class Pass:
    """One pass of a network: it makes units final, or, for strategy "verified", the graph's pass drafts them."""

    piece: int  # index of the piece: a long recording is cut at its pauses
    units: list[str]  # units that this pass made final, in order
    tokens: int  # number of units that it made final, special units such as </s> included
    seconds: float  # since the piece's linguistic decoding began, without the time in `on_pass`
    graph: Graph | None = None  # the graph that this pass made; None for a pass of the autoregressive decoder


OnPass = Callable[[Pass], None]


@final
class PassListener:
    """Reports one utterance's tokens to `on_pass` as timed passes. Does nothing without `on_pass`."""

    def __init__(self, on_pass: OnPass | None, piece: int, units: Sequence[str], device: torch.device) -> None:
        self._on_pass, self._piece, self._units = on_pass, piece, list(units)
        self._stopwatch, self._seconds = Stopwatch(device), 0.0
        self.limit: int | None = None  # the most tokens to report, because a decoder may run one step more
        # whether the row has ended: on a GPU the decoder checks this rarely, so it runs a few steps more
        self._ended = False

    def tokens(self, tokens: Sequence[int], graph: Graph | None = None) -> None:
        """Report a pass that made these token ids final, special ones included. graph: the graph of this pass, if it
        made one."""
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
        """Report a step of `ArDecoder.generate`, as its callback. tokens: (1,). Skips steps after the row's end."""
        if self._on_pass is not None and not self._ended:
            token = int(tokens)
            self._ended = token in (EOS, PAD)
            self.tokens([token])

    def graph(
        self, emissions: Tensor, links: Tensor, tokens: Tensor | None = None, vertices: Tensor | None = None
    ) -> None:
        """Report one row's graph. If a path is given, its units are final.

        emissions: (L, V) log-probabilities of V units at L vertices. links: (L, L) log-probabilities. tokens, vertices:
        (K,) of the path's K steps, padded with -1.
        """
        if self._on_pass is None:
            return
        chosen = [] if tokens is None else [token for token in tokens.tolist() if token >= 0]
        path = [] if vertices is None else [vertex for vertex in vertices.tolist() if vertex >= 0]
        names = [self._units[token] for token in chosen]
        self.tokens(chosen, Graph(emissions.cpu(), links.cpu(), self._units, path, names))
