"""The forward-backward scan of `dag.scaled` for a CPU. It processes one sample at a time, because on a CPU, call
overhead and memory traffic cost more time than additions.

A sample with many tokens is processed vertex by vertex (`scan_vertices`). Other samples, and samples for which
`scan_vertices` is inaccurate, are processed token by token (`_scan_tokens`). Probabilities below e^-708 of their scale
become 0. `TRUSTED` and `TRUSTED_BY_VERTEX` limit how much of P may be lost by this.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

EVERY = 4  # number of steps after which a state is divided by its maximum, to keep it in float64's range
DRIFT = 60.0  # in nats: maximum decrease of a state between two such divisions
TRUSTED = 640.0 - DRIFT
LARGEST = 700.0  # in nats: maximum logarithm of a factor, because exp overflows float64 at 709
STRIP = 128  # number of rows of the link matrix that are processed at a time; the part below the diagonal is skipped
NEG_INF = -math.inf
# the constants below are those of `scan_vertices`
BLOCK = 48  # vertices in a block: larger ones take less time, but their states decrease more without rescaling
# maximum numbers in a block's states (vertices times tokens): from 9216 on, OpenBLAS starts a second thread
AT_ONCE = 8192
HIGH, LOW = 1e80, 1e-120  # if a token's largest state leaves this range, all of the token's states are rescaled
TRUSTED_BY_VERTEX = 580.0

Vector = NDArray[np.float64]


class States(NamedTuple):
    """The scaled forward or backward probabilities of one sample, in the order of tokens."""

    states: Tensor  # (M, R + 1), one row for each token: its states at the R + 1 vertices on which it can be
    # for each token: natural log of the number by which its row was divided, beyond the division of the row before
    factors: list[float]


def scan(match: Tensor, links: Tensor, *, vertices: bool, counted: bool) -> Sample | None:
    """Compute log P and the posteriors of one sample. Returns None if float64 is too imprecise.

    match: (M, L), links: (L, L), log-probabilities in any float dtype, without padding; L >= M.
    vertices: whether posteriors of vertices are needed; without them only one direction is scanned, for log P. counted:
        whether posteriors of links are needed; this requires `vertices`.
    """
    weights, link_top = _exponentiated(links)
    with np.errstate(all="ignore"):  # underflow and overflow are detected from the results
        sample = None
        if not _few_tokens(*match.shape):
            sample = scan_vertices(match, weights, link_top, vertices=vertices, counted=counted)
        return sample or _scan_tokens(match, weights, link_top, vertices, counted)


def _few_tokens(steps: int, size: int) -> bool:
    """Return whether the scan by tokens (one large product per token) is faster than the scan by vertices (one small
    product per vertex). steps: number of tokens. size: number of vertices.

    Measured: starting a large product costs as much as 10,000 pairs of vertices; a small product costs 12,000.
    """
    return steps * ((size - steps) ** 2 + 10_000) < 12_000 * size


def _scan_tokens(match: Tensor, weights: Tensor, link_top: float, vertices: bool, counted: bool) -> Sample | None:
    """Scan one sample token by token. Returns None if float64 is too imprecise.

    match: (M, L). weights: (L, L), the links' probabilities divided by exp(link_top); overwritten if `counted`.
        vertices, counted: whether posteriors of vertices and of links are needed.

    Token t can only be on the vertices t .. t + R, where R = L - M. So a state is a row of R + 1 numbers, and the links
    from token t to t + 1 are a window of the link matrix that moves down the diagonal by one. All windows are views,
    made by a single call; both directions read the same matrix.

    A state is divided by its maximum every few steps, within the product that reads it, because finding a maximum takes
    as long as a product of some hundred numbers. A state may decrease in between, so the trusted range is smaller. If
    it decreases too much, the scan is repeated with a division in every step.
    """
    steps, size = match.shape
    room = size - steps + 1  # number of vertices on which a token can be
    whole = torch.empty(steps, size, dtype=torch.float64).copy_(match)
    emission = _window(whole, room).contiguous()  # shape (M, R + 1)
    match_top = _finite(emission.amax(1))  # shape (M,)
    emission = emission.sub_(match_top[:, None]).exp_()
    # windows[t, p, q]: probability of the jump from vertex t + p (token t) to vertex t + 1 + q (token t + 1)
    windows = weights.as_strided((steps - 1, room, room), (size + 1, size, 1), 1)
    tops = [value + link_top for value in match_top.tolist()]

    onward = _run(windows, emission, None)
    if onward is None:
        return None
    scale = [tops[0] - link_top]  # natural log of the total factor by which each token's state was divided
    for k in range(1, steps):
        scale.append(scale[-1] + onward.factors[k] + tops[k])
    final = float(onward.states[-1, -1])
    if final <= 0.0:
        return None
    log_prob = scale[-1] + math.log(final)
    peaks = onward.states.amax(1).log().tolist()
    if not vertices:
        gain = math.log(float(weights.sum(1).amax())) if steps > 1 else 0.0
        beta_top = 0.0  # upper bound of log beta: a step adds at most the best emission and a vertex's summed links
        for k in range(steps - 1, 0, -1):
            if scale[k - 1] + peaks[k - 1] + tops[k] + beta_top - log_prob > TRUSTED:
                return None
            beta_top += tops[k] + gain
        return Sample(log_prob, None, None)

    arrivals = torch.zeros(steps, room, dtype=torch.float64)  # backward states without the emission at the vertex
    arrivals[-1, -1] = 1.0
    back = _run(windows, emission, arrivals)
    if back is None:
        return None
    # natural logs of the factors that undo the scaling of `back.states` and of `arrivals`
    into, beta = [0.0] * steps, [0.0] * steps
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
    """Multiply each link's scaled probability by the rate of its use. The product is the link's posterior: its expected
    number of uses.

    weights: (L, L), overwritten. onward, back: (M, R + 1), states of the forward and the backward direction. rates: (M
        - 1,), factors that undo the scaling, one for the jumps from each token.
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
    """Return the probabilities (L, L) float64 of all forward links, divided by the largest one if that exceeds 1; and
    the divisor's natural logarithm. Other entries are 0."""
    link_top = float(links.amax())
    if not link_top <= 0.0:  # the largest entry may lie below the diagonal, where it is no link
        link_top = float(links.triu(1).amax())
    link_top = max(link_top, 0.0)  # any value would be correct: it only sets the scale
    weights = torch.empty(links.shape, dtype=torch.float64).copy_(links)
    for row in range(0, len(weights), STRIP):
        strip = weights[row : row + STRIP, row:]
        (strip.sub_(link_top) if link_top else strip).exp_()
        strip[:, :STRIP].triu_(1)
        if row:
            weights[row : row + STRIP, :row] = 0.0
    return weights, link_top


def _run(windows: Tensor, emission: Tensor, arrivals: Tensor | None, every: int = EVERY) -> States | None:
    """Compute all states of one direction. Returns None if a state is 0 or too small for float64.

    windows: (M - 1, R + 1, R + 1), probabilities of the jumps from each token to the next. emission: (M, R + 1), scaled
        emission probabilities.
    arrivals: (M, R + 1): if given, the direction is backward, and the states without emission are written here; None:
        forward. every: number of steps after which a state is divided by its maximum.
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
    # small products run in NumPy, which has less call overhead; large ones in torch, which obeys its thread settings
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
    """Return a diagonal view (T, room) of a contiguous (T, L) matrix: its row t is row t of the matrix, columns t .. t
    + room - 1."""
    return full.as_strided((full.shape[0], room), (full.shape[1] + 1, 1), full.storage_offset())


def _finite(values: Tensor) -> Tensor:
    return values.masked_fill(values == NEG_INF, 0.0)


class Sample(NamedTuple):
    """The results of one sample. (A scan returns None instead if float64 is too imprecise; then `dag.exact` computes
    the sample.)"""

    log_prob: float
    vertices: Tensor | None  # (M, L) float64, posteriors P(y_t is emitted by v_j | Y); None if not needed
    links: Tensor | None  # (L, L) float64, expected number of uses of each link; None if not needed


class _Sweep(NamedTuple):
    """The scaled forward or backward probabilities of one sample. All states of a token are divided by one factor, the
    token's unit."""

    states: Tensor  # (L, M), at vertex l and token m, emission included
    arrivals: Vector  # (L, M), without the emission at the vertex; backward only
    # (M,): natural log of each token's unit, without the part that the scaling of the emissions contributes
    shift: Vector
    most: Vector  # (M,): the largest value that `shift` had while states of this token were computed


def scan_vertices(match: Tensor, weights: Tensor, link_top: float, *, vertices: bool, counted: bool) -> Sample | None:
    """Scan one sample vertex by vertex, with the states of all tokens at once. Returns None if float64 is too
    imprecise. The caller must switch off NumPy's warnings.

    match: (M, L), log-probabilities in any float dtype. weights: (L, L), the links' probabilities divided by
        exp(link_top), 0 on and below the diagonal; overwritten if `counted`. vertices, counted: whether posteriors of
        vertices and of links are needed.

    The states at a vertex depend on those at earlier vertices, for all tokens in the same way. So one matrix product
    adds what earlier blocks of vertices contribute, for all tokens. Only jumps inside a block are processed vertex by
    vertex. This takes L products with a small matrix instead of M products with all links. The small products use
    NumPy, because torch's call overhead would exceed their work.

    The states of each token are divided by a factor, the token's unit. At first it is the mean of the token's
    emissions. After a block in which the states became too large or too small, the token gets a new unit. The largest
    unit that a token ever had limits how much probability can have been lost.
    """
    emission, match_top, mean = _emissions(match)
    tops = match_top + link_top  # upper bound, in nats, of what one jump and the emission of its token add
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
    # Upper bounds, in nats relative to P: probabilities below e^-708 of these were lost in states, arrivals, links or
    # emissions.
    level = np.maximum(alpha_most[1:], np.maximum(alpha_most, alpha_top)[:-1] + tops[1:]) - log_prob
    if not vertices:
        # upper bound: a step adds at most the best emission and a vertex's summed links
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
    # each factor is scaled to a maximum of 1, so that their product loses nothing that matters
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
    """Compute scaled emission probabilities. match: (M, L), log-probabilities.

    Returns: emissions (L, M), divided by each token's mean, 0 where no path can pass; the natural log of each token's
        best emission (M,); the mean divided by the best one (M,).
    """
    steps, size = match.shape
    room = size - steps + 1  # number of vertices on which a token can be: for token t, from vertex t on
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
    """Compute all states of one direction. weights: (L, L), scaled link probabilities. emission: (L, M), scaled
    emissions. onward: True: from the first vertex to the last; False: backward."""
    size, steps = emission.shape
    states, shift, peaks = torch.zeros(size, steps, dtype=torch.float64), np.zeros(steps), np.zeros(steps)
    # (M,): factor on each token's emissions: the unit of the token that is scanned before it, divided by its own unit
    ratio = np.ones(steps)
    rows, links, emitted, room = states.numpy(), weights.numpy(), emission.numpy(), size - steps
    arrivals = np.zeros((0 if onward else size, steps))
    width = min(size, max(4, min(BLOCK, AT_ONCE // steps)))
    own, moves, most = _Block(width, steps, onward), np.multiply, np.full(steps, NEG_INF)
    for begin in range(0, size, width)[:: 1 if onward else -1]:
        end = min(begin + width, size)
        count = end - begin
        here = slice(max(0, begin - room), end)  # indices of the tokens that the vertices of this block can emit
        most[here] = np.maximum(most[here], shift[here])
        # first a block's rows hold what other blocks contribute, in the column of the token before; then the states
        # overwrite these numbers
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
        # for speed, only the states at the block's last vertex are checked
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
    """The buffers of one block of vertices, with NumPy views of their rows. The views are made once, because a view
    costs as much time as a small product."""

    def __init__(self, width: int, steps: int, onward: bool) -> None:
        self.onward = onward
        self.jumps, self.emitted = np.zeros((width, width)), np.zeros((width, steps))
        self.staying = self.jumps.reshape(-1)[:: width + 1]
        self.states = torch.zeros(width, steps, dtype=torch.float64)
        self.rows = self.states.numpy()
        # A jump leads to the next token, so what arrives is written one column to the right of the token before.
        # Entries beyond the edge land in the next row, where they are not read as emissions; a 1 there starts the scan.
        flat = np.ones(width * steps + 2)
        self.arrivals = flat[1:-1].reshape(width, steps)
        to = (flat[2:] if onward else flat[:-2]).reshape(width, steps)
        self._views = list(zip(self.jumps, to, self.arrivals, self.emitted, self.rows, strict=True))

    def views(self, count: int) -> list[tuple[Vector, Vector, Vector, Vector, Vector]]:
        """Return for each of the first `count` vertices, in scan order, five views: probabilities of jumps, where
        arrivals are written, where they are read, emissions, states."""
        return self._views[:count][:: 1 if self.onward else -1]

    def load(self, links: Vector, emitted: Vector, ratio: Vector) -> None:
        """Load the data of a block of N vertices. links: (N, N), between its vertices. emitted: (N, M), its emissions.
        ratio: (M,), a factor on each token's emissions.

        What a larger block left beyond these N rows does no harm: it is multiplied by states of 0.
        """
        count = len(links)
        self.jumps[:count, :count] = links.T if self.onward else links
        self.staying.fill(1.0)  # with 1 on the diagonal, the product keeps what earlier blocks have contributed
        np.multiply(emitted, ratio, out=self.emitted[:count])


def _units(peaks: Vector) -> Vector:
    """Return the new unit of each token: its largest state; for a token without states, a value between its neighbours'
    (interpolated in the logarithm)."""
    reached = peaks.nonzero()[0]
    return np.exp(np.interp(np.arange(len(peaks)), reached, np.log(peaks[reached])))


def _holds(gap: Any) -> bool:
    return bool((gap <= TRUSTED_BY_VERTEX).all())
