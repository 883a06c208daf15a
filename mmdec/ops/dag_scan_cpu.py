"""`dag_scan.scaled` for a CPU, one sample at a time, where calls and memory cost more than sums.

Token t sits on one of the vertices t .. t + R, R = L - M: only these are held, so that a state is a row of R + 1
numbers and the links from token t to t + 1 are a window of the matrix, an upper triangle that moves down its diagonal
by one. All windows are views, made in one call. Both directions read the same matrix, a triangle's empty quarter is
left out, and a state's scale is applied by the product that reads it. Numbers, and what is trusted, are as in
`dag_scan.py`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from mmdec.ops.dag_links import NEG_INF

TRUSTED = 640.0
WORTH_HALVING = 96  # vertices from which two products are quicker than one


class Sample(NamedTuple):
    """One sample's answer; None: not to be trusted, `dag_scan.exact` knows."""

    log_prob: float
    vertices: Tensor | None  # (M, L) float64, where asked for
    links: Tensor | None  # (L, L) float64, where asked for


def scan(match: Tensor, links: Tensor, *, vertices: bool, counted: bool) -> Sample | None:
    """match (M, L) and links (L, L) of one sample, cropped to it, in any float dtype; L >= M.

    Without `vertices` only log P is found, from one direction; `counted` needs `vertices`.
    """
    steps, size = match.shape
    room = size - steps + 1  # vertices that a token can sit on
    whole = torch.empty(steps, size, dtype=torch.float64).copy_(match)
    emission = _window(whole, room).contiguous()  # (M, R + 1)
    match_top = _finite(emission.amax(1))  # (M,)
    emission = emission.sub_(match_top[:, None]).exp_()
    held = links.masked_fill(_backwards(size), NEG_INF)
    top = float(held.amax())
    link_top = top if top > NEG_INF else 0.0
    weights = held.double().sub_(link_top).exp_()
    windows = weights.as_strided((steps - 1, room, room), (size + 1, size, 1), 1)  # [t, p, q]: t + p -> t + 1 + q

    onward = torch.zeros(steps, room, dtype=torch.float64)  # states, each with a peak of its own
    onward[0, 0] = emission[0, 0]
    falls = _run(windows, emission, onward, None)
    tops = [value + link_top for value in match_top.tolist()]
    scale = [tops[0] - link_top + falls[0]]  # log of what a state must be multiplied by, once divided by its peak
    for k in range(1, steps):
        scale.append(scale[-1] + falls[k] + tops[k])
    final = float(onward[-1, -1])
    if final <= 0.0 or min(falls) < -TRUSTED:
        return None
    log_prob = scale[-1] - falls[-1] + math.log(final)
    if not vertices:
        gain = math.log(float(weights.sum(1).amax())) if steps > 1 else 0.0
        beta_top = 0.0  # an upper bound: no path gains more than the best emission and a vertex's whole sum of links
        for k in range(steps - 1, 0, -1):
            if scale[k - 1] + tops[k] + beta_top - log_prob > TRUSTED:
                return None
            beta_top += tops[k] + gain
        return Sample(log_prob, None, None)
    return _both(emission, weights, windows, onward, (falls, scale, tops), log_prob, link_top, counted)


def _both(
    emission: Tensor,
    weights: Tensor,
    windows: Tensor,
    onward: Tensor,
    known: tuple[list[float], list[float], list[float]],
    log_prob: float,
    link_top: float,
    counted: bool,
) -> Sample | None:
    """The way back, and what both ways say together."""
    falls, scale, tops = known
    steps, room = emission.shape
    size = weights.shape[0]
    back = torch.zeros(steps, room, dtype=torch.float64)  # emission included
    arrivals = torch.zeros(steps, room, dtype=torch.float64)  # and not
    arrivals[-1, -1] = 1.0
    back[-1, -1] = emission[-1, -1]
    back_falls = _run(windows, emission, back, arrivals)
    if min(back_falls) < -TRUSTED:
        return None
    # Logs of what each row is to be multiplied by.
    into = [0.0] * steps
    beta = [0.0] * steps
    into[-1] = tops[-1] - link_top + back_falls[-1]
    for t in range(steps - 2, -1, -1):
        beta[t] = into[t + 1] + link_top
        into[t] = beta[t] + tops[t] - link_top + back_falls[t]
    best = arrivals.amax(1).tolist()
    for t in range(1, steps):
        if best[t] <= 0.0 or scale[t - 1] + tops[t] + math.log(best[t]) + beta[t] - log_prob > TRUSTED:
            return None
    own = torch.tensor([a - f + b - log_prob for a, f, b in zip(scale, falls, beta, strict=True)], dtype=torch.float64)
    vertices = torch.zeros(steps, size, dtype=torch.float64)
    _window(vertices, room).copy_((onward * arrivals).mul_(own.exp()[:, None]))
    if not counted:
        return Sample(log_prob, vertices, None)
    leaving, entering = torch.zeros(2, max(steps - 1, 0), size, dtype=torch.float64)
    if steps > 1:
        both = [scale[t] - falls[t] + link_top + into[t + 1] - back_falls[t + 1] - log_prob for t in range(steps - 1)]
        rates = torch.tensor(both, dtype=torch.float64).exp_()
        _window(leaving, room).copy_(onward[:-1] * rates[:, None])
        entering.as_strided((steps - 1, room), (size + 1, 1), entering.storage_offset() + 1).copy_(back[1:])
    return Sample(log_prob, vertices, torch.mm(leaving.t(), entering).mul_(weights))


def _run(windows: Tensor, emission: Tensor, states: Tensor, arrivals: Tensor | None) -> list[float]:
    """Fill the states, forwards, or backwards where arrivals are wanted; the log of each state's peak, -inf if none."""
    steps, room = emission.shape
    near = room // 2 if room >= WORTH_HALVING else 0
    back = arrivals is not None
    rows = states.unbind(0)
    falls = [0.0] * steps
    start = steps - 1 if back else 0
    peak = float(rows[start].max())
    if peak <= 0.0:
        return [NEG_INF] * steps
    falls[start] = math.log(peak)
    if steps == 1:
        return falls
    emitted = emission.unbind(0)
    met = (torch.zeros_like(states) if arrivals is None else arrivals).unbind(0)
    if back:
        whole = windows[:, : near or room].unbind(0)
        corner = windows[:, near:, near:].unbind(0) if near else ()
    else:
        turned = windows.transpose(1, 2)
        whole = turned[:, near:].unbind(0)
        corner = turned[:, :near, :near].unbind(0) if near else ()
    for t in range(steps - 2, -1, -1) if back else range(1, steps):
        source, target = (rows[t + 1], met[t]) if back else (rows[t - 1], met[t])
        window = t if back else t - 1
        share = 1.0 / peak
        if not near:
            torch.addmv(target, whole[window], source, beta=0, alpha=share, out=target)
        elif back:
            first, second = target[:near], target[near:]
            torch.addmv(first, whole[window], source, beta=0, alpha=share, out=first)
            torch.addmv(second, corner[window], source[near:], beta=0, alpha=share, out=second)
        else:
            first, second = target[:near], target[near:]
            torch.addmv(first, corner[window], source[:near], beta=0, alpha=share, out=first)
            torch.addmv(second, whole[window], source, beta=0, alpha=share, out=second)
        torch.mul(target, emitted[t], out=rows[t])
        peak = float(rows[t].max())
        if peak <= 0.0 or not math.isfinite(1.0 / peak):
            return [NEG_INF] * steps
        falls[t] = math.log(peak)
    return falls


def _window(full: Tensor, room: int) -> Tensor:
    """(T, R) view of a contiguous (T, L): row t from column t on."""
    return full.as_strided((full.shape[0], room), (full.shape[1] + 1, 1), full.storage_offset())


def _finite(values: Tensor) -> Tensor:
    return values.masked_fill(values == NEG_INF, 0.0)


@lru_cache(maxsize=8)
def _backwards(size: int) -> Tensor:
    """(L, L) bool: not a jump forwards."""
    with torch.inference_mode(False):
        return torch.ones(size, size, dtype=torch.bool).tril_()
