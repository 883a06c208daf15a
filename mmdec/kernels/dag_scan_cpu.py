"""The forward-backward scan of `dag.scaled_scan` for a CPU.

It processes one sample at a time, token by token, because on a CPU, call overhead and memory traffic cost more time
than additions.

Probabilities below e^-708 of their scale become 0. `MAX_TRUSTED_GAP` limits how much of P may be lost by this.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

STEPS_PER_RESCALE = 4  # number of steps after which a state is divided by its maximum, to keep it in float64's range
MAX_DRIFT = 60.0  # in nats: maximum decrease of a state between two such divisions
MAX_TRUSTED_GAP = 640.0 - MAX_DRIFT
MAX_LOG_FACTOR = 700.0  # in nats: maximum logarithm of a factor, because exp overflows float64 at 709
# number of rows of the link matrix that are processed at a time; the part below the diagonal is skipped
ROWS_PER_STRIP = 128
NEG_INF = -math.inf
# a window of at most this many links is multiplied in NumPy: from 9216 on, OpenBLAS starts a second thread
MAX_BLOCK_STATES = 8192


class States(NamedTuple):
    """The scaled forward or backward probabilities of one sample, in the order of tokens."""

    states: Tensor  # (M, R + 1), one row for each token: its states at the R + 1 vertices on which it can be
    # for each token: natural log of the number by which its row was divided, beyond the division of the row before
    factors: list[float]


@np.errstate(all="ignore")  # underflow and overflow are detected from the results
def scan(match: Tensor, links: Tensor, *, vertices: bool, counts: bool) -> ScanResult | None:
    """Compute log P and the posteriors of one sample.

    Token t can only be on the vertices t .. t + R, where R = L - M. So a state is a row of R + 1 numbers, and the links
    from token t to t + 1 are a window of the link matrix that moves down the diagonal by one. All windows are views,
    made by a single call; both directions read the same matrix.

    A state is divided by its maximum every few steps, within the product that reads it, because finding a maximum takes
    as long as a product of some hundred numbers. A state may decrease in between, so the trusted range is smaller. If
    it decreases too much, the scan is repeated with a division in every step.

    Args:
        match: (M, L), log-probabilities in any float dtype, without padding; L >= M.
        links: (L, L), log-probabilities.
        vertices: Whether posteriors of vertices are needed; without them only one direction is scanned, for log P.
        counts: Whether posteriors of links are needed; this requires `vertices`.

    Returns:
        None if float64 is too imprecise.
    """
    weights, link_top = _link_probabilities(links)
    steps, size = match.shape
    room = size - steps + 1  # number of vertices on which a token can be
    match_copy = torch.empty(steps, size, dtype=torch.float64).copy_(match)
    emission = _window(match_copy, room).contiguous()  # shape (M, R + 1)
    match_top = finite_or_zero(emission.amax(1))  # shape (M,)
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
            if scale[k - 1] + peaks[k - 1] + tops[k] + beta_top - log_prob > MAX_TRUSTED_GAP:
                return None
            beta_top += tops[k] + gain
        return ScanResult(log_prob, None, None)

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
        if (
            best[t] <= 0.0
            or scale[t - 1] + peaks[t - 1] + tops[t] + math.log(best[t]) + beta[t] - log_prob > MAX_TRUSTED_GAP
        ):
            return None
    log_weights = torch.tensor([a + b - log_prob for a, b in zip(scale, beta, strict=True)], dtype=torch.float64)
    posteriors = torch.zeros(steps, size, dtype=torch.float64)
    torch.mul(onward.states, arrivals, out=arrivals)
    _window(posteriors, room).copy_(arrivals.mul_(log_weights.exp_()[:, None]))
    if not counts:
        return ScanResult(log_prob, posteriors, None)
    both = [scale[t] + link_top + into[t + 1] - log_prob for t in range(steps - 1)]
    if max(both, default=0.0) > MAX_LOG_FACTOR:
        return None
    _count_links(weights, onward.states, back.states, torch.tensor(both, dtype=torch.float64).exp_())
    return ScanResult(log_prob, posteriors, weights)


def _count_links(weights: Tensor, onward: Tensor, back: Tensor, rates: Tensor) -> None:
    """Multiply each link's scaled probability by the rate of its use, in place.

    The product is the link's posterior: its expected number of uses.

    Args:
        weights: (L, L), overwritten.
        onward: (M, R + 1), states of the forward direction.
        back: (M, R + 1), states of the backward direction.
        rates: (M - 1,), factors that undo the scaling, one for the jumps from each token.
    """
    (steps, room), size = onward.shape, len(weights)
    leaving, entering = torch.zeros(2, max(steps - 1, 0), size, dtype=torch.float64)
    if steps > 1:
        _window(leaving, room).copy_(onward[:-1] * rates[:, None])
        entering.as_strided((steps - 1, room), (size + 1, 1), entering.storage_offset() + 1).copy_(back[1:])
    for row in range(0, size, ROWS_PER_STRIP):
        used = torch.mm(leaving[:, row : row + ROWS_PER_STRIP].t(), entering[:, row:])
        weights[row : row + ROWS_PER_STRIP, row:].mul_(used)


def _link_probabilities(links: Tensor) -> tuple[Tensor, float]:
    """Compute the probabilities of all forward links, divided by the largest one if that exceeds 1.

    Returns:
        (L, L) float64, 0 at other entries; and the divisor's natural logarithm.
    """
    link_top = float(links.amax())
    if not link_top <= 0.0:  # the largest entry may lie below the diagonal, outside the links
        link_top = float(links.triu(1).amax())
    link_top = max(link_top, 0.0)  # any value would be correct: it only sets the scale
    weights = torch.empty(links.shape, dtype=torch.float64).copy_(links)
    for row in range(0, len(weights), ROWS_PER_STRIP):
        strip = weights[row : row + ROWS_PER_STRIP, row:]
        (strip.sub_(link_top) if link_top else strip).exp_()
        strip[:, :ROWS_PER_STRIP].triu_(1)
        if row:
            weights[row : row + ROWS_PER_STRIP, :row] = 0.0
    return weights, link_top


def _run(windows: Tensor, emission: Tensor, arrivals: Tensor | None, every: int = STEPS_PER_RESCALE) -> States | None:
    """Compute all states of one direction.

    Args:
        windows: (M - 1, R + 1, R + 1), probabilities of the jumps from each token to the next.
        emission: (M, R + 1), scaled emission probabilities.
        arrivals: (M, R + 1): if given, the direction is backward, and the states without emission are written here;
            None: forward.
        every: Number of steps after which a state is divided by its maximum.

    Returns:
        None if a state is 0 or too small for float64.
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
    small = room * room <= MAX_BLOCK_STATES
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
    if lowest > 0.0 and math.log(lowest) >= -MAX_DRIFT:
        return States(states, factors)
    if every > 1:
        if arrivals is not None:
            arrivals[:-1] = 0.0
        return _run(windows, emission, arrivals, 1)
    return States(states, factors) if lowest > 0.0 and math.log(lowest) >= -MAX_TRUSTED_GAP else None


def _window(full: Tensor, room: int) -> Tensor:
    """Return a diagonal view (T, room) of a contiguous (T, L) matrix: row t shows the columns t .. t + room - 1."""
    return full.as_strided((full.shape[0], room), (full.shape[1] + 1, 1), full.storage_offset())


def finite_or_zero(values: Tensor) -> Tensor:
    """Replace -inf by 0, so that subtracting the value from -inf gives -inf, not NaN."""
    return values.masked_fill(values == NEG_INF, 0.0)


class ScanResult(NamedTuple):
    """The results of one sample.

    If float64 is too imprecise, a scan returns None instead; then `dag.log_space_scan` computes the sample.
    """

    log_prob: float
    vertices: Tensor | None  # (M, L) float64, posteriors P(y_t is emitted by v_j | Y); None if not needed
    links: Tensor | None  # (L, L) float64, expected number of uses of each link; None if not needed
