"""Does the same as `dag.scaled` on a CPU, one sample at a time: there, call overhead and memory traffic cost more than
additions.

A sample with many tokens is processed vertex by vertex (`scan_vertices`); other samples, and those for which that is
inaccurate, token by token (`_scan_tokens`). Numbers below e^-708 of their scale are flushed to 0; `TRUSTED` and
`TRUSTED_BY_VERTEX` bound how much of P may depend on them, as in `dag.scaled`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

EVERY = 4  # steps between two divisions of a state by its maximum, which keep it in float64's range
DRIFT = 60.0  # maximum fall of a state between two such divisions, as a logarithm
TRUSTED = 640.0 - DRIFT
LARGEST = 700.0  # maximum logarithm of a factor: exp overflows at 709
STRIP = 128  # rows of the links that are processed together; columns left of them are skipped: jumps go forward only
NEG_INF = -math.inf
# the constants below are those of `scan_vertices`
BLOCK = 48  # vertices in a block: larger blocks take less time, but allow their states to fall less
AT_ONCE = 8192  # maximum numbers in a block's states: from 9216 on, OpenBLAS uses a second thread for a vector product
HIGH, LOW = 1e80, 1e-120  # if a token's largest state leaves this range, the token gets a new unit
TRUSTED_BY_VERTEX = 580.0

Vector = NDArray[np.float64]


class States(NamedTuple):
    """The states of one direction, in the order of tokens."""

    states: Tensor  # (M, R + 1)
    factors: list[float]  # log of each state's divisor, relative to the divisor of the state before


def scan(match: Tensor, links: Tensor, *, vertices: bool, counted: bool) -> Sample | None:
    """Scan one sample: match (M, L), links (L, L), cropped to it, in any float dtype; L >= M.

    vertices: whether posteriors are needed; without them only one direction runs, for log P. counted: whether link
        counts are needed; requires `vertices`.
    """
    weights, link_top = _exponentiated(links)
    with np.errstate(all="ignore"):  # underflow and overflow are detected afterwards
        sample = None
        if not _few_tokens(*match.shape):
            sample = scan_vertices(match, weights, link_top, vertices=vertices, counted=counted)
        return sample or _scan_tokens(match, weights, link_top, vertices, counted)


def _few_tokens(steps: int, size: int) -> bool:
    """Return whether one large product for each token is cheaper than one small product for each vertex.

    Measured: starting a large product costs as much as 10,000 pairs of vertices; a small product costs 12,000.
    """
    return steps * ((size - steps) ** 2 + 10_000) < 12_000 * size


def _scan_tokens(match: Tensor, weights: Tensor, link_top: float, vertices: bool, counted: bool) -> Sample | None:
    """Do what `scan` does, token by token, with exponentiated links, which are overwritten if they are counted.

    Token t is on one of the vertices t .. t + R, R = L - M, so a state is a row of R + 1 numbers, and the links from
    token t to t + 1 are a window that moves down the matrix's diagonal by one. All windows are views made by one call;
    both directions read the same matrix.

    A state is divided by its maximum every few steps, within the product that reads it: finding a maximum costs as much
    as a product of some hundred numbers. The possible fall of a state in between reduces the trusted range. A sample
    that falls by more is recomputed with the maximum of every state.
    """
    steps, size = match.shape
    room = size - steps + 1  # number of vertices a token can be on
    whole = torch.empty(steps, size, dtype=torch.float64).copy_(match)
    emission = _window(whole, room).contiguous()  # (M, R + 1)
    match_top = _finite(emission.amax(1))  # (M,)
    emission = emission.sub_(match_top[:, None]).exp_()
    windows = weights.as_strided((steps - 1, room, room), (size + 1, size, 1), 1)  # [t, p, q]: t + p -> t + 1 + q
    tops = [value + link_top for value in match_top.tolist()]

    onward = _run(windows, emission, None)
    if onward is None:
        return None
    scale = [tops[0] - link_top]  # log of the factor by which each state was divided
    for k in range(1, steps):
        scale.append(scale[-1] + onward.factors[k] + tops[k])
    final = float(onward.states[-1, -1])
    if final <= 0.0:
        return None
    log_prob = scale[-1] + math.log(final)
    peaks = onward.states.amax(1).log().tolist()
    if not vertices:
        gain = math.log(float(weights.sum(1).amax())) if steps > 1 else 0.0
        beta_top = 0.0  # upper bound: a step gains at most the best emission times a vertex's sum of links
        for k in range(steps - 1, 0, -1):
            if scale[k - 1] + peaks[k - 1] + tops[k] + beta_top - log_prob > TRUSTED:
                return None
            beta_top += tops[k] + gain
        return Sample(log_prob, None, None)

    arrivals = torch.zeros(steps, room, dtype=torch.float64)  # states before the token is emitted
    arrivals[-1, -1] = 1.0
    back = _run(windows, emission, arrivals)
    if back is None:
        return None
    into, beta = [0.0] * steps, [0.0] * steps  # logs of the factors that undo the scaling of states and arrivals
    into[-1] = tops[-1] - link_top
    for t in range(steps - 2, -1, -1):
        beta[t] = into[t + 1] + back.factors[t] + link_top
        into[t] = beta[t] + tops[t] - link_top
    best = arrivals.amax(1).tolist()
    for t in range(1, steps):
        if best[t] <= 0.0 or scale[t - 1] + peaks[t - 1] + tops[t] + math.log(best[t]) + beta[t] - log_prob > TRUSTED:
            return None
    own = torch.tensor([a + b - log_prob for a, b in zip(scale, beta, strict=True)], dtype=torch.float64)
    found = torch.zeros(steps, size, dtype=torch.float64)
    torch.mul(onward.states, arrivals, out=arrivals)
    _window(found, room).copy_(arrivals.mul_(own.exp_()[:, None]))
    if not counted:
        return Sample(log_prob, found, None)
    both = [scale[t] + link_top + into[t + 1] - log_prob for t in range(steps - 1)]
    if max(both, default=0.0) > LARGEST:
        return None
    _count_links(weights, onward.states, back.states, torch.tensor(both, dtype=torch.float64).exp_())
    return Sample(log_prob, found, weights)


def _count_links(weights: Tensor, onward: Tensor, back: Tensor, rates: Tensor) -> None:
    """Multiply exponentiated links (L, L) by the rate of their use, which makes them the expected counts.

    onward, back: states (M, R + 1) of both directions. rates: (M - 1,) factors of the jumps from each token.
    """
    (steps, room), size = onward.shape, len(weights)
    leaving, entering = torch.zeros(2, max(steps - 1, 0), size, dtype=torch.float64)
    if steps > 1:
        _window(leaving, room).copy_(onward[:-1] * rates[:, None])
        entering.as_strided((steps - 1, room), (size + 1, 1), entering.storage_offset() + 1).copy_(back[1:])
    for row in range(0, size, STRIP):
        used = torch.mm(leaving[:, row : row + STRIP].t(), entering[:, row:])
        weights[row : row + STRIP, row:].mul_(used)


def _exponentiated(links: Tensor) -> tuple[Tensor, float]:
    """Return the exponentials (L, L) float64 of all forward links, divided by the largest one or by 1 if that is more.
    Also returns the divisor's logarithm."""
    link_top = float(links.amax())
    if not link_top <= 0.0:  # an entry below the diagonal, which is no link, may be the largest
        link_top = float(links.triu(1).amax())
    link_top = max(link_top, 0.0)  # its value does not matter: it only sets the scale
    weights = torch.empty(links.shape, dtype=torch.float64).copy_(links)
    for row in range(0, len(weights), STRIP):
        strip = weights[row : row + STRIP, row:]
        (strip.sub_(link_top) if link_top else strip).exp_()
        strip[:, :STRIP].triu_(1)
        if row:
            weights[row : row + STRIP, :row] = 0.0
    return weights, link_top


def _run(windows: Tensor, emission: Tensor, arrivals: Tensor | None, every: int = EVERY) -> States | None:
    """Return all states of one direction: backward if `arrivals` are given (they are filled), else forward.

    Returns None if a state is 0 or falls below the floating-point range.
    """
    steps, room = emission.shape
    states, factors = torch.zeros(steps, room, dtype=torch.float64), [0.0] * steps
    if arrivals is None:
        states[0, 0] = emission[0, 0]
        order, before, met = range(1, steps), -1, torch.zeros_like(states)
        jumps = windows.transpose(1, 2)
    else:
        states[-1, -1] = emission[-1, -1]
        order, before, met, jumps = range(steps - 2, -1, -1), 1, arrivals, windows
    # NumPy has less call overhead; torch's products obey thread settings and need no copies
    small = room * room <= AT_ONCE
    parts = (jumps, states, emission, met)
    views: Any = [list(part.numpy()) if small else part.unbind(0) for part in parts]
    matrices, rows, emitted, reached = views
    for number, t in enumerate(order):
        arrival, share = reached[t], 1.0
        if number % every == 0:
            peak = float(rows[t + before].max())
            if peak <= 0.0 or not math.isfinite(1.0 / peak):
                return None
            share, factors[t] = 1.0 / peak, math.log(peak)
        if small:
            np.matmul(matrices[min(t, t + before)], rows[t + before], arrival)
            if share != 1.0:
                arrival *= share
            np.multiply(arrival, emitted[t], rows[t])
        else:
            torch.addmv(arrival, matrices[min(t, t + before)], rows[t + before], beta=0, alpha=share, out=arrival)
            torch.mul(arrival, emitted[t], out=rows[t])
    lowest = float(states.amax(1).amin())
    if lowest > 0.0 and math.log(lowest) >= -DRIFT:
        return States(states, factors)
    if every > 1:
        if arrivals is not None:
            arrivals[:-1] = 0.0
        return _run(windows, emission, arrivals, 1)
    return States(states, factors) if lowest > 0.0 and math.log(lowest) >= -TRUSTED else None


def _window(full: Tensor, room: int) -> Tensor:
    """Return a view (T, R) of a contiguous (T, L) matrix: row t from column t on."""
    return full.as_strided((full.shape[0], room), (full.shape[1] + 1, 1), full.storage_offset())


def _finite(values: Tensor) -> Tensor:
    return values.masked_fill(values == NEG_INF, 0.0)


class Sample(NamedTuple):
    """The results for one sample. (The scans return None if float64 was too imprecise; then call `dag.exact`.)"""

    log_prob: float
    vertices: Tensor | None  # (M, L) float64 posteriors; None if not needed
    links: Tensor | None  # (L, L) float64 expected counts; None if not needed


class _Sweep(NamedTuple):
    """The states of one direction. Each token's states are divided by a scale factor of this token, its unit."""

    states: Tensor  # (L, M), after the emission
    arrivals: Vector  # (L, M), before the emission; used backward only
    shift: Vector  # (M,): log of a state's unit over the product of the emissions' units
    most: Vector  # (M,): the maximum of `shift` while a token's states were computed


def scan_vertices(match: Tensor, weights: Tensor, link_top: float, *, vertices: bool, counted: bool) -> Sample | None:
    """Do what `scan` does, vertex by vertex: the states of all tokens at once, (L, M). The caller must switch off
    NumPy's warnings.

    match: (M, L) in any float dtype. weights: (L, L), exponentials of links over that of link_top, above the diagonal;
        they are overwritten if links are counted.

    A vertex depends on earlier vertices, whichever token they emit. So the contribution of earlier blocks of vertices
    is one matrix product for all tokens, and only jumps within a block are processed vertex by vertex: L products with
    a small matrix instead of M products with all links. They use NumPy, because torch's call overhead exceeds their
    work.

    States are stored in a unit (a logarithm) for each token: first the mean of its emissions, and a new one after any
    block whose numbers are far from 1. The largest unit that a token ever had bounds what was lost.
    """
    emission, match_top, mean = _emissions(match)
    tops = match_top + link_top  # upper bound of what a jump and the emission of its token add
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
    # Numbers below e^-708 of these are lost: states, and the arrivals, links or emissions that lead to them.
    level = np.maximum(alpha_most[1:], np.maximum(alpha_most, alpha_top)[:-1] + tops[1:]) - log_prob
    if not vertices:
        # a step gains at most the best emission times a vertex's sum of links
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
    # each factor's maximum is 1, so that no relevant product is lost
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
    """Return the emissions (L, M) divided by each token's mean, 0 where no path passes.

    Also returns, (M,) each, the log of each token's best emission, and the mean as a share of the best one.
    """
    steps, size = match.shape
    room = size - steps + 1  # number of vertices a token can be on, from its own index on
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
    """Scan in one direction: from the first vertex and token to the last ones (`onward`), or back."""
    size, steps = emission.shape
    states, shift, peaks = torch.zeros(size, steps, dtype=torch.float64), np.zeros(steps), np.zeros(steps)
    ratio = np.ones(steps)  # a token's unit divided by that of the token before, apart from the emissions' units
    rows, links, emitted, room = states.numpy(), weights.numpy(), emission.numpy(), size - steps
    arrivals = np.zeros((0 if onward else size, steps))
    width = min(size, max(4, min(BLOCK, AT_ONCE // steps)))
    own, moves, most = _Block(width, steps, onward), np.multiply, np.full(steps, NEG_INF)
    for begin in range(0, size, width)[:: 1 if onward else -1]:
        end = min(begin + width, size)
        count = end - begin
        here = slice(max(0, begin - room), end)  # the tokens that this block's vertices can emit
        most[here] = np.maximum(most[here], shift[here])
        # a block's rows hold arrivals from other blocks, by the token before, until the states overwrite them
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
        # only the last vertex of the block is inspected, for all of its vertices
        np.maximum(peaks, before[count - 1 if onward else 0], out=peaks)
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
    """The buffers of a block of vertices, with views made once: a view costs as much as a small product."""

    def __init__(self, width: int, steps: int, onward: bool) -> None:
        self.onward = onward
        self.jumps, self.emitted = np.zeros((width, width)), np.zeros((width, steps))
        self.staying = self.jumps.reshape(-1)[:: width + 1]
        self.states = torch.zeros(width, steps, dtype=torch.float64)
        self.rows = self.states.numpy()
        # A jump moves on to the next token: arrivals by the token before are written one column to the right. Entries
        # beyond the edge land where the next row cannot emit; a 1 there starts the scan.
        flat = np.ones(width * steps + 2)
        self.arrivals = flat[1:-1].reshape(width, steps)
        to = (flat[2:] if onward else flat[:-2]).reshape(width, steps)
        self._views = list(zip(self.jumps, to, self.arrivals, self.emitted, self.rows, strict=True))

    def views(self, count: int) -> list[tuple[Vector, Vector, Vector, Vector, Vector]]:
        """Return views of the first `count` rows in scan order: jumps, where arrivals are written, where they are read,
        emissions, states."""
        return self._views[:count][:: 1 if self.onward else -1]

    def load(self, links: Vector, emitted: Vector, ratio: Vector) -> None:
        """Load the links (N, N) within a block of N vertices, and their emissions (N, M).

        Older entries beyond these N rows need no clearing: they are multiplied by states of 0.
        """
        count = len(links)
        self.jumps[:count, :count] = links.T if self.onward else links
        self.staying.fill(1.0)  # factor 1 keeps what has arrived from other blocks
        np.multiply(emitted, ratio, out=self.emitted[:count])


def _units(peaks: Vector) -> Vector:
    """Return each token's largest state; for a token without one, a value between its neighbours'."""
    reached = peaks.nonzero()[0]
    return np.exp(np.interp(np.arange(len(peaks)), reached, np.log(peaks[reached])))


def _holds(gap: Any) -> bool:
    return bool((gap <= TRUSTED_BY_VERTEX).all())
