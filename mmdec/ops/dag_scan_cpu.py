"""`dag_scan.scaled` for a CPU, one sample at a time: here call overhead and memory traffic cost more than additions.

Graphs with many tokens are processed vertex by vertex (`dag_scan_vertices.py`), unless that is inaccurate. The others
are processed here, token by token. Token t is on one of the vertices t .. t + R, R = L - M, so a state is a row of R +
1 numbers, and the links from token t to t + 1 are a window that moves down the matrix's diagonal by one. All windows
are views made by one call; both directions read the same matrix.

A state is divided by its maximum every few steps, within the product that reads it: finding a maximum costs as much as
a product of some hundred numbers. The possible fall of a state in between reduces the trusted range (see
`dag_scan.py`). A sample that falls by more is recomputed with the maximum of every state.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmdec.ops.dag_links import NEG_INF
from mmdec.ops.dag_scan_vertices import AT_ONCE, STRIP, Sample, scan_vertices

EVERY = 4  # steps between two divisions by the maximum
DRIFT = 60.0  # maximum fall of a state in between, as a logarithm
TRUSTED = 640.0 - DRIFT


class States(NamedTuple):
    """The states of one direction, in the order of tokens."""

    states: Tensor  # (M, R + 1)
    factors: list[float]  # log of the divisor of each state relative to the one before


def scan(match: Tensor, links: Tensor, *, vertices: bool, counted: bool) -> Sample | None:
    """Scan one sample: match (M, L), links (L, L), cropped to it, in any float dtype; L >= M.

    vertices: whether posteriors are needed; without them only one direction runs, for log P. counted: whether link
        counts are needed; requires `vertices`.
    """
    weights, link_top = _exponentiated(links)
    with np.errstate(all="ignore"):  # values that are lost or overflow are detected afterwards
        sample = None
        if not _few_tokens(*match.shape):
            sample = scan_vertices(match, weights, link_top, vertices=vertices, counted=counted)
        return sample or _scan_tokens(match, weights, link_top, vertices, counted)


def _few_tokens(steps: int, size: int) -> bool:
    """Whether one large product for each token is cheaper than one small product for each vertex.

    Measured: starting a large product costs as much as 10,000 pairs of vertices; a small product costs 12,000.
    """
    return steps * ((size - steps) ** 2 + 10_000) < 12_000 * size


def _scan_tokens(match: Tensor, weights: Tensor, link_top: float, vertices: bool, counted: bool) -> Sample | None:
    """`scan`, token by token, for exponentiated links, which are overwritten if they are counted."""
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
    scale = [tops[0] - link_top]  # log of the factor that restores each state
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
    into, beta = [0.0] * steps, [0.0] * steps  # logs, as `scale`: of the states and of the arrivals
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
    leaving, entering = torch.zeros(2, max(steps - 1, 0), size, dtype=torch.float64)
    if steps > 1:
        both = [scale[t] + link_top + into[t + 1] - log_prob for t in range(steps - 1)]
        rates = torch.tensor(both, dtype=torch.float64).exp_()
        _window(leaving, room).copy_(onward.states[:-1] * rates[:, None])
        entering.as_strided((steps - 1, room), (size + 1, 1), entering.storage_offset() + 1).copy_(back.states[1:])
    for row in range(0, size, STRIP):
        used = torch.mm(leaving[:, row : row + STRIP].t(), entering[:, row:])
        weights[row : row + STRIP, row:].mul_(used)
    return Sample(log_prob, found, weights)


def _exponentiated(links: Tensor) -> tuple[Tensor, float]:
    """exp of all forward links (L, L) float64, divided by the largest (at least 1); and the log of that divisor."""
    link_top = float(links.amax())
    if not link_top <= 0.0:  # the lower triangle may hold anything
        link_top = float(links.triu(1).amax())
    link_top = max(link_top, 0.0)  # only the scale depends on it
    weights = torch.empty(links.shape, dtype=torch.float64).copy_(links)
    for row in range(0, len(weights), STRIP):
        strip = weights[row : row + STRIP, row:]
        (strip.sub_(link_top) if link_top else strip).exp_()
        strip[:, :STRIP].triu_(1)
        if row:
            weights[row : row + STRIP, :row] = 0.0
    return weights, link_top


def _run(windows: Tensor, emission: Tensor, arrivals: Tensor | None, every: int = EVERY) -> States | None:
    """All states of one direction: backward if `arrivals` are given (they are filled), else forward.

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
    """A view (T, R) of a contiguous (T, L) matrix: row t from column t on."""
    return full.as_strided((full.shape[0], room), (full.shape[1] + 1, 1), full.storage_offset())


def _finite(values: Tensor) -> Tensor:
    return values.masked_fill(values == NEG_INF, 0.0)
