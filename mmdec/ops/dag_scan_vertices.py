"""The scan of `dag_scan_cpu.py` vertex by vertex: the states of all tokens at once, (L, M).

A vertex needs those before it, whichever token they emit. So what comes from earlier blocks of vertices is one product
of matrices for all tokens, and only jumps within a block are taken one vertex at a time: L products of a small matrix
instead of M products of all links. These are NumPy's: torch takes longer to begin one than to do it.

What a state of 1 stands for (its unit, a logarithm) is chosen for each token, first by the mean of its emissions, and
again after any block that leaves numbers far from 1. A number below e^-708 of the unit that it is found in is flushed
to 0: the greatest unit that a token ever had tells what was lost, and `TRUSTED` how much of P may hang on that, as in
`dag_scan.py`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdec.ops.dag_links import NEG_INF

BLOCK = 48  # vertices: larger ones cost less, and hold states that fall less fast
AT_ONCE = 8192  # numbers of a block's states: OpenBLAS takes a second thread for a vector's product with 9216
HIGH, LOW = 1e80, 1e-120  # peaks of a token's states that call for another unit
TRUSTED = 580.0
STRIP = 128  # rows of the links that are worked on together, without what lies before them

Vector = NDArray[np.float64]


class Sample(NamedTuple):
    """One sample's answer; None: not to be trusted, `dag_scan.exact` knows."""

    log_prob: float
    vertices: Tensor | None  # (M, L) float64, where asked for
    links: Tensor | None  # (L, L) float64, where asked for


class _Sweep(NamedTuple):
    """One direction: what of all tokens is at each vertex, in units of its own for each token."""

    states: Tensor  # (L, M), with the emission
    arrivals: Vector  # (L, M), without it; of use backwards only
    shift: Vector  # (M,): logarithm of a state's unit over the product of the emissions' units
    most: Vector  # (M,): the greatest that it ever was while a token's states were found


def scan_vertices(match: Tensor, weights: Tensor, link_top: float, *, vertices: bool, counted: bool) -> Sample | None:
    """match (M, L) in any float dtype; weights (L, L): exponentials of links, over link_top's, above the diagonal.

    As `dag_scan_cpu.scan`, where NumPy's warnings are off. Where links are counted, the weights are overwritten.
    """
    emission, match_top, mean = _emissions(match)
    tops = match_top + link_top  # best gain of the jump to a token and of its emission
    units = match_top + np.log(mean)
    units[1:] += link_top
    onward = _sweep(weights, emission, onward=True)
    path = units.cumsum()
    alpha_unit, alpha_most = path + onward.shift, path + onward.most
    alpha_peak = onward.states.amax(0).numpy()
    alpha_top = alpha_unit + np.log(alpha_peak)
    log_prob = float(alpha_unit[-1] + np.log(float(onward.states[-1, -1])))
    if not math.isfinite(log_prob):
        return None
    # Numbers below e^-708 of these are lost: of states, and of arrivals, links or emissions that led to them.
    level = np.maximum(alpha_most[1:], np.maximum(alpha_most, alpha_top)[:-1] + tops[1:]) - log_prob
    if not vertices:
        # No path gains more than the best emissions and a vertex's whole sum of links.
        gain = tops[:0:-1] + (math.log(float(weights.sum(1).amax())) if len(tops) > 1 else 0.0)
        if _holds(level + (gain.cumsum() - gain)[::-1]):
            return Sample(log_prob, None, None)

    back = _sweep(weights, emission, onward=False)
    units[0] += link_top
    units[-1] -= link_top
    path = units[::-1].cumsum()[::-1]
    into_unit, into_most = path + back.shift, path + back.most
    beta_unit = np.append(into_unit[1:] + link_top, 0.0)
    beta_peak = back.arrivals.max(0)
    beta_top = beta_unit + np.log(beta_peak)
    if not (_holds(level + beta_top[1:]) and _holds(alpha_top[:-1] + link_top + into_most[1:] - log_prob)):
        return None
    if not vertices:
        return Sample(log_prob, None, None)
    # Each factor has a peak of 1, so that no product is lost that matters.
    alpha = onward.states / torch.from_numpy(alpha_peak)
    rates = torch.from_numpy(np.exp(alpha_top + beta_top - log_prob) / beta_peak)
    found = (torch.from_numpy(back.arrivals).mul_(rates) * alpha).t().contiguous()
    if not counted:
        return Sample(log_prob, found, None)
    into_peak = back.states[:, 1:].amax(0)
    entering = back.states[:, 1:] / into_peak
    rates = np.exp(alpha_top[:-1] + link_top + into_unit[1:] - log_prob) * into_peak.numpy()
    leaving = alpha[:, :-1] * torch.from_numpy(rates)
    for row in range(0, len(weights), STRIP):
        used = torch.mm(leaving[row : row + STRIP], entering[row:].t())
        weights[row : row + STRIP, row:].mul_(used)
    return Sample(log_prob, found, weights)


def _emissions(match: Tensor) -> tuple[Tensor, Vector, Vector]:
    """Emissions (L, M) over each token's mean one, 0 where no path passes; logarithm of each token's best one (M,); and
    that mean as a share of the best one (M,)."""
    steps, size = match.shape
    room = size - steps + 1  # vertices that a token can sit on, from its own number on
    whole = torch.empty(steps, size, dtype=torch.float64).copy_(match)
    own = whole.as_strided((steps, room), (size + 1, 1)).contiguous()
    ends = own.numpy()
    ends[0, 1:] = ends[-1, :-1] = NEG_INF
    top = own.amax(1)
    top.masked_fill_(top == NEG_INF, 0.0)
    own = own.sub_(top[:, None]).exp_()
    mean = own.mean(1)
    emission = torch.zeros(size, steps, dtype=torch.float64)
    torch.div(own, mean[:, None], out=emission.as_strided((steps, room), (steps + 1, steps)))
    return emission, top.numpy(), mean.numpy()


def _sweep(weights: Tensor, emission: Tensor, *, onward: bool) -> _Sweep:
    """From the first vertex and token to the last ones, or back."""
    size, steps = emission.shape
    states, shift, peaks = torch.zeros(size, steps, dtype=torch.float64), np.zeros(steps), np.zeros(steps)
    ratio = np.ones(steps)  # of the unit of the token before to its own, beyond the emissions' units
    rows, links, emitted, room = states.numpy(), weights.numpy(), emission.numpy(), size - steps
    arrivals = np.zeros((0 if onward else size, steps))
    width = min(size, max(4, min(BLOCK, AT_ONCE // steps)))
    own, moves, most = _Block(width, steps, onward), np.multiply, np.full(steps, NEG_INF)
    for begin in range(0, size, width)[:: 1 if onward else -1]:
        end = min(begin + width, size)
        count = end - begin
        here = slice(max(0, begin - room), end)  # tokens
        most[here] = np.maximum(most[here], shift[here])
        # A block's rows hold what arrives from other blocks, by the token before, until their states take its place.
        own.states.fill_(0.0)
        if onward:
            low, high = max(0, begin - room - 1), min(steps, end)
            if low < begin:
                earlier = states[low:begin, low:high]
                torch.mm(weights[low:begin, begin:end].t(), earlier, out=own.states[:count, low:high])
        else:
            low, high = max(0, begin - room), min(steps, end + 1)
            last = min(size, high + room)
            if end < last:
                later = states[end:last, low:high]
                torch.mm(weights[begin:end, end:last], later, out=own.states[:count, low:high])
        own.load(links[begin:end, begin:end], emitted[begin:end], ratio)
        before = own.rows
        for jumps, to, arrival, emit, state in own.views(count):
            jumps.dot(before, to)
            moves(arrival, emit, state)
        rows[begin:end] = before[:count]
        if not onward:
            arrivals[begin:end] = own.arrivals[:count]
        np.maximum(peaks, before[count - 1 if onward else 0], out=peaks)  # the last vertex may speak for its block
        if peaks.max() > HIGH or ((peaks < LOW) & (peaks > 0.0)).any():
            done = slice(None, end) if onward else slice(begin, None)
            unit = _units(peaks)
            rows[done] /= unit
            if onward:
                ratio[1:] *= unit[:-1] / unit[1:]
            else:
                ratio[:-1] *= unit[1:] / unit[:-1]
                arrivals[done, :-1] /= unit[1:]
            shift += np.log(unit)
            peaks /= unit
    if not onward:
        arrivals[:, -1] = 0.0
        arrivals[-1, -1] = 1.0
    return _Sweep(states, arrivals, shift, np.maximum(most, shift))


class _Block:
    """The buffers of a block of vertices, and their rows, made once: a view costs as much as a small product."""

    def __init__(self, width: int, steps: int, onward: bool) -> None:
        self.onward = onward
        self.jumps, self.emitted = np.zeros((width, width)), np.zeros((width, steps))
        self.staying = self.jumps.reshape(-1)[:: width + 1]
        self.states = torch.zeros(width, steps, dtype=torch.float64)
        self.rows = self.states.numpy()
        # A jump moves to the next token: what arrives by the token before is written one place further. What falls over
        # the edge lands where the next row can emit nothing; a 1 that lies there begins the sweep.
        flat = np.ones(width * steps + 2)
        self.arrivals = flat[1:-1].reshape(width, steps)
        to = (flat[2:] if onward else flat[:-2]).reshape(width, steps)
        self._views = list(zip(self.jumps, to, self.arrivals, self.emitted, self.rows, strict=True))

    def views(self, count: int) -> list[tuple[Vector, Vector, Vector, Vector, Vector]]:
        """Of the first rows, in the order of the sweep: jumps, where arrivals are written, where they are read,
        emissions, states."""
        return self._views[:count][:: 1 if self.onward else -1]

    def load(self, links: Vector, emitted: Vector, ratio: Vector) -> None:
        """Links (N, N) within a block of N vertices, and their emissions (N, M). What lies beyond is multiplied by
        states of 0."""
        count = len(links)
        self.jumps[:count, :count] = links.T if self.onward else links
        self.staying.fill(1.0)  # what arrived already
        np.multiply(emitted, ratio, out=self.emitted[:count])


def _units(peaks: Vector) -> Vector:
    """Each token's peak; where it has none, what lies between its neighbours'."""
    reached = peaks.nonzero()[0]
    return np.exp(np.interp(np.arange(len(peaks)), reached, np.log(peaks[reached])))


def _holds(gap: Any) -> bool:
    return bool((gap <= TRUSTED).all())
