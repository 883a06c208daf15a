"""Reports the passes of a translator's decoder, and the graphs that they predict, to the caller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from mmdec.core.timing import Stopwatch
from mmdec.daspeech.units import EOS, NUM_SPECIAL_UNITS, PAD


@dataclass(frozen=True)
class Graph:
    """The graph decoder's output for one utterance, on the CPU."""

    emissions: Tensor = field(repr=False)  # (L, V) log-probabilities of V units at L vertices
    # (L, L) log-probabilities of links from vertex i (row) to j (column); -inf: no link
    links: Tensor = field(repr=False)
    units: list[str] = field(repr=False)  # names of the V units, ordered by id
    path: list[int]  # vertices on the chosen path, in order; empty if the graph only makes drafts
    chosen: list[str]  # the unit at each vertex on the path, <s> and </s> included


@dataclass(frozen=True)
class Pass:
    """One pass of a decoder, as it is reported to the caller.

    It makes units final, except for the strategy "verified", in which the graph's pass only drafts units.
    """

    segment: int  # index of the recording's segment; long recordings are cut into segments at pauses
    units: list[str]  # names of the units that this pass made final, in order
    tokens: int  # number of units that this pass made final, special ones such as </s> included
    seconds: float  # seconds since decoding of the segment began, without the time spent in `on_pass`
    graph: Graph | None = None  # the graph that this pass predicted; None for a pass of the autoregressive decoder


OnPass = Callable[[Pass], None]


@final
class PassListener:
    """Reports the decoder passes of one utterance to the callback `on_pass`, with their times.

    Args:
        on_pass: The callback; None: nothing is reported.
        segment: Index of the utterance among the segments of its recording.
        units: Names of the units, ordered by id.
        device: The decoder's device.
        limit: Maximum number of units to report, because a decoder may run one step more; None: no limit.
    """

    def __init__(
        self,
        on_pass: OnPass | None,
        segment: int,
        units: Sequence[str],
        device: torch.device,
        limit: int | None = None,
    ) -> None:
        self._on_pass = on_pass
        self._segment = segment
        self._units = list(units)
        self._stopwatch, self._seconds = Stopwatch(device), 0.0
        self._remaining = limit  # number of units that may still be reported
        # Whether the text has ended. On a GPU the decoder checks this only now and then, so it may report a few more
        # steps after the end; they are ignored.
        self._ended = False

    def tokens(self, tokens: Sequence[int], graph: Graph | None = None) -> None:
        """Report a pass that made these unit ids final, special ones included.

        Args:
            graph: The graph that the pass predicted, or None.
        """
        if self._on_pass is None:
            return
        self._seconds += self._stopwatch.lap()
        if self._remaining is not None:
            tokens = tokens[: self._remaining]
            self._remaining -= len(tokens)
        units = [self._units[token] for token in tokens if token >= NUM_SPECIAL_UNITS]
        self._on_pass(Pass(self._segment, units, len(tokens), self._seconds, graph))
        self._stopwatch.lap()

    def step(self, tokens: Tensor) -> None:
        """Report one step of `ArDecoder.greedy_steps`.

        Args:
            tokens: (1,), the step's unit. Steps after the row's end are skipped.
        """
        if self._on_pass is not None and not self._ended:
            token = int(tokens)
            self._ended = token in (EOS, PAD)
            self.tokens([token])

    def graph(
        self, emissions: Tensor, links: Tensor, tokens: Tensor | None = None, vertices: Tensor | None = None
    ) -> None:
        """Report the graph of one row.

        Args:
            emissions: (L, V) log-probabilities of V units at L vertices.
            links: (L, L) log-probabilities.
            tokens: (K,), unit of each step of the chosen path, padded with -1; the units are final. None: no path.
            vertices: (K,), vertex of each of these steps, padded with -1.
        """
        if self._on_pass is None:
            return
        chosen = [] if tokens is None else [token for token in tokens.tolist() if token >= 0]
        path = [] if vertices is None else [vertex for vertex in vertices.tolist() if vertex >= 0]
        names = [self._units[token] for token in chosen]
        self.tokens(chosen, Graph(emissions.cpu(), links.cpu(), self._units, path, names))
