"""The dynamic programs of `dag.py` on a GPU: one kernel launch for each token, all samples and vertices in parallel.

    alpha_t(j) = match_t(j) + LSE_{i<j}(alpha_{t-1}(i) + E_ij)      with the emission at vertex j
    beta_t(i)  = LSE_{j>i}(E_ij + match_{t+1}(j) + beta_{t+1}(j))   without the emission at vertex i
    count_ij   = sum_t exp(alpha_t(i) + E_ij + match_{t+1}(j) + beta_{t+1}(j) - log P)

All scores are in log space, with sums in float32. So every sample is accurate, and nothing synchronises with the
device. The only memory that grows with both L and M is alpha and beta, (B, M, L) each; autograd without this kernel
would store (B, M, L, L). The kernels run on the current stream and can be captured in a CUDA graph.

For the best path, a maximum replaces the sum.
"""

# A kernel is Triton's language in Python's syntax; which of it type checkers follow changes with Triton's release.
# pyright: reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmdec.kernels.availability import launch

NEG_INF = float("-inf")
NARROW, WIDE = 32, 128  # number of vertices that one program computes, and number of vertices that it reads at a time
TOKENS = 64  # number of target tokens that one program processes at a time
VOCABULARY = 2048  # number of logits that one program reads at a time


@triton.jit
def _log_add(top, total, scores, AXIS: tl.constexpr):
    """Update a running log-sum-exp by scores along the axis AXIS.

    Args:
        top: The maximum so far.
        total: Sum of exp(score - top).

    Returns:
        The new (top, total).
    """
    new_top = tl.maximum(top, tl.max(scores, AXIS))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp(scores - tl.expand_dims(shift, AXIS))
    return new_top, total * tl.exp(top - shift) + tl.sum(weights, AXIS)


@triton.jit
def _log(top, total):
    """Return the value of a running log-sum-exp, top + log(total); -inf if nothing was added.

    Args:
        top: The maximum.
        total: Sum of exp(score - top).
    """
    return tl.where(total == 0.0, float("-inf"), top + tl.log(tl.where(total == 0.0, 1.0, total)))


@triton.jit(do_not_specialize=["t"])
def _alpha_step(
    match, links, alpha, last, ends, t, size,
    m_b, m_t, m_j, l_b, l_i, l_j, a_b, a_t,
    BEST: tl.constexpr, NARROW: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute alpha_t of NARROW vertices.

    Args:
        BEST: Compute the score of the best path instead of the sum over paths.
    """
    row = tl.program_id(1).to(tl.int64)
    j = tl.program_id(0) * NARROW + tl.arange(0, NARROW)
    final, end = tl.load(last + row), tl.load(ends + row)
    # Each token needs a later vertex: token t is on vertex t at the earliest, and leaves one for each later token. The
    # last condition is written for each j, because Triton 3.9's interpreter makes an integer of a scalar's.
    open_j = (j >= t) & (j <= end - final + t) & (final + 0 * j >= t)
    here = alpha + row * a_b + t * a_t
    emitted = tl.load(match + row * m_b + t * m_t + j * m_j, mask=open_j, other=float("-inf")).to(tl.float32)
    if t == 0:
        tl.store(here + j, tl.where(j == 0, emitted, float("-inf")), mask=j < size)
    else:
        top = tl.full([NARROW], float("-inf"), tl.float32)
        total = tl.zeros([NARROW], tl.float32)
        lowest = tl.program_id(0) * NARROW
        for begin in range(t - 1, tl.minimum(lowest + NARROW - 1, size - 1), WIDE):
            i = begin + tl.arange(0, WIDE)
            before = tl.load(here - a_t + i, mask=(i >= 0) & (i < size), other=float("-inf"))
            jump = j[None] - i[:, None]
            real = (jump >= 1) & (i >= 0)[:, None] & open_j[None]
            jumps = links + row * l_b + i[:, None].to(tl.int64) * l_i + j[None].to(tl.int64) * l_j
            scores = before[:, None] + tl.load(jumps, mask=real, other=float("-inf")).to(tl.float32)
            if BEST:
                top = tl.maximum(top, tl.max(scores, 0))
            else:
                top, total = _log_add(top, total, scores, 0)
        if not BEST:
            top = _log(top, total)
        tl.store(here + j, emitted + top, mask=j < size)


@triton.jit(do_not_specialize=["t"])
def _beta_step(
    match, links, beta, last, ends, t, size,
    m_b, m_t, m_j, l_b, l_i, l_j, b_b, b_t,
    NARROW: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute beta_t, the log-probability of all path ends after token t, at NARROW vertices."""
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * NARROW + tl.arange(0, NARROW)
    final, end = tl.load(last + row), tl.load(ends + row)
    here = beta + row * b_b + t * b_t
    if t >= final:
        tl.store(here + i, tl.where((i == end) & (final + 0 * i == t), 0.0, float("-inf")), mask=i < size)
    else:
        open_i = (i >= t) & (i <= end - final + t)
        top = tl.full([NARROW], float("-inf"), tl.float32)
        total = tl.zeros([NARROW], tl.float32)
        lowest = tl.program_id(0) * NARROW
        for begin in range(lowest + 1, end - final + t + 2, WIDE):
            j = begin + tl.arange(0, WIDE)
            open_j = (j >= t + 1) & (j <= end - final + t + 1)
            emitted = tl.load(match + row * m_b + (t + 1) * m_t + j * m_j, mask=open_j, other=float("-inf"))
            after = tl.load(here + b_t + j, mask=open_j, other=float("-inf"))
            jump = j[None] - i[:, None]
            real = (jump >= 1) & open_i[:, None] & open_j[None]
            jumps = links + row * l_b + i[:, None].to(tl.int64) * l_i + j[None].to(tl.int64) * l_j
            scores = (emitted.to(tl.float32) + after)[None] + tl.load(jumps, mask=real, other=float("-inf")).to(
                tl.float32
            )
            top, total = _log_add(top, total, scores, 1)
        tl.store(here + i, _log(top, total), mask=i < size)


@triton.jit
def _link_counts(
    match, links, alpha, beta, log_prob, scale, counts, last, ends, size,
    m_b, m_t, m_j, l_b, l_i, l_j, a_b, a_t, c_b, c_i, c_j,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the expected number of uses of BLOCK x BLOCK links, times the gradient `scale` of the sample's log P."""
    row = tl.program_id(2).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    j = (tl.program_id(0) + tl.program_id(1)) * BLOCK + tl.arange(0, BLOCK)
    final, end = tl.load(last + row), tl.load(ends + row)
    jump = j[None] - i[:, None]
    inside = (jump >= 1) & (j < size)[None]
    real = inside & (j <= end)[None]
    offset = i[:, None].to(tl.int64) * l_i + j[None].to(tl.int64) * l_j
    link = tl.load(links + row * l_b + offset, mask=real, other=float("-inf")).to(tl.float32)
    link -= tl.load(log_prob + row)
    total = tl.zeros([BLOCK, BLOCK], tl.float32)
    for t in range(0, final):
        before = tl.load(alpha + row * a_b + t * a_t + i, mask=i < size, other=float("-inf"))
        open_j = (j >= t + 1) & (j <= end - final + t + 1)
        emitted = tl.load(match + row * m_b + (t + 1) * m_t + j * m_j, mask=open_j, other=float("-inf"))
        after = tl.load(beta + row * a_b + (t + 1) * a_t + j, mask=open_j, other=float("-inf"))
        total += tl.exp(before[:, None] + link + (emitted.to(tl.float32) + after)[None])
    total *= tl.load(scale + row)
    target = i[:, None].to(tl.int64) * c_i + j[None].to(tl.int64) * c_j
    tl.store(counts + row * c_b + target, total.to(counts.dtype.element_ty), mask=inside)


@triton.jit
def _trace(links, best, path, last, ends, size, l_b, l_i, l_j, a_b, a_t, WIDE: tl.constexpr):
    """Trace the best path of one sample back from its last vertex.

    If scores are equal, the vertex with the lowest index is taken.

    Args:
        path: (B, L), filled with -1; the index of the emitted token is written at each vertex on the path.
    """
    row = tl.program_id(0).to(tl.int64)
    final, vertex = tl.load(last + row), tl.load(ends + row)
    if tl.load(best + row * a_b + final * a_t + vertex) > float("-inf"):
        tl.store(path + row * size + vertex, final)
        for back in range(0, final):
            t = final - back
            top = float("-inf")
            chosen = vertex - 1
            for begin in range(t - 1, vertex, WIDE):
                i = begin + tl.arange(0, WIDE)
                real = (i >= 0) & (i < vertex)
                before = tl.load(best + row * a_b + (t - 1) * a_t + i, mask=real, other=float("-inf"))
                jumps = links + row * l_b + i.to(tl.int64) * l_i + vertex.to(tl.int64) * l_j
                scores = before + tl.load(jumps, mask=real, other=float("-inf")).to(tl.float32)
                score = tl.max(scores, 0)
                if score > top:
                    top, chosen = score, begin + tl.argmax(scores, 0)
            vertex = chosen
            tl.store(path + row * size + vertex, t - 1)


def alphas(match: Tensor, links: Tensor, last: Tensor, ends: Tensor, *, best: bool = False) -> Tensor:
    """Compute alpha (B, M, L) float32; -inf where no path passes.

    Args:
        last, ends: (B,) indices of the last token and the last vertex.
        best: Compute scores of the best path instead of sums over paths.
    """
    batch, steps, size = match.shape
    alpha = torch.empty(batch, steps, size, dtype=torch.float32, device=match.device)
    for t in range(steps):
        launch(_alpha_step, (triton.cdiv(size, NARROW), batch))(
            match, links, alpha, last, ends, t, size, *match.stride(), *links.stride(), *alpha.stride()[:2],
            BEST=best, NARROW=NARROW, WIDE=WIDE, num_warps=8,
        )  # fmt: skip
    return alpha


def betas(match: Tensor, links: Tensor, last: Tensor, ends: Tensor) -> Tensor:
    """Compute beta (B, M, L) float32; -inf where no path passes.

    Args:
        last, ends: (B,) indices of the last token and the last vertex.
    """
    batch, steps, size = match.shape
    beta = torch.empty(batch, steps, size, dtype=torch.float32, device=match.device)
    for t in range(steps - 1, -1, -1):
        launch(_beta_step, (triton.cdiv(size, NARROW), batch))(
            match, links, beta, last, ends, t, size, *match.stride(), *links.stride(), *beta.stride()[:2],
            NARROW=NARROW, WIDE=WIDE, num_warps=8,
        )  # fmt: skip
    return beta


def final_scores(alpha: Tensor, last: Tensor, ends: Tensor) -> Tensor:
    """Return each sample's alpha at its last token and last vertex, (B,).

    Args:
        alpha: (B, M, L).
        last, ends: (B,) indices of these two.
    """
    return alpha[torch.arange(len(alpha), device=alpha.device), last, ends]


def link_gradient(
    match: Tensor,
    links: Tensor,
    alpha: Tensor,
    beta: Tensor,
    log_prob: Tensor,
    scale: Tensor,
    ends: Tensor,
    last: Tensor,
) -> Tensor:
    """Compute the gradient (B, L, L) of the links: their expected numbers of uses times scale (B,).

    The result has the dtype and strides of `links`.

    Args:
        log_prob: (B,), log P.
        ends, last: (B,) indices of the last vertex and the last token.
    """
    batch, _, size = match.shape
    counts = torch.zeros(links.shape, dtype=links.dtype, device=links.device)
    block = 32
    tiles = triton.cdiv(size, block)
    launch(_link_counts, (tiles, tiles, batch))(
        match, links, alpha, beta, log_prob, scale, counts, last, ends, size,
        *match.stride(), *links.stride(), *alpha.stride()[:2], *counts.stride(), BLOCK=block, num_warps=4,
    )  # fmt: skip
    return counts


class _TritonMarginal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, match: Tensor, links: Tensor, last: Tensor, ends: Tensor) -> Tensor:
        alpha = alphas(match, links, last, ends)
        log_prob = final_scores(alpha, last, ends)
        ctx.save_for_backward(match, links, last, ends, alpha, log_prob)
        return log_prob.clone()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] # the decorator makes `ctx` position-only
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        match, links, last, ends, alpha, log_prob = ctx.saved_tensors
        possible = log_prob > NEG_INF
        # a loss may pass an infinite gradient for an impossible sample; its counts are 0, and 0 * inf would be NaN
        scale = grads[0].masked_fill(~possible, 0.0).float().contiguous()
        shift = log_prob.masked_fill(~possible, 0.0)
        beta = betas(match, links, last, ends)
        wants_match, wants_links = ctx.needs_input_grad[:2]
        links_grad = link_gradient(match, links, alpha, beta, shift, scale, ends, last) if wants_links else None
        if not wants_match:
            return None, links_grad, None, None
        vertices = beta.add_(alpha).sub_(shift[:, None, None]).exp_().mul_(scale[:, None, None])
        return vertices.to(match.dtype), links_grad, None, None


def marginal_triton(match: Tensor, links: Tensor, last: Tensor, ends: Tensor) -> Tensor:
    """Compute log P(Y | X) (B,) in float32, differentiable once.

    Args:
        match: (B, M, L).
        links: (B, L, L).
        last, ends: (B,) indices of the last token and the last vertex.
    """
    return _TritonMarginal.apply(match, links, last, ends)


def posterior_triton(match: Tensor, links: Tensor, last: Tensor, ends: Tensor) -> Tensor:
    """Compute the posterior P(v_j emits y_t | X, Y), (B, M, L) float32; 0 for an impossible sample.

    Args:
        last, ends: (B,) indices of the last token and the last vertex.
    """
    alpha = alphas(match, links, last, ends)
    log_prob = final_scores(alpha, last, ends)
    shift = log_prob.masked_fill(log_prob == NEG_INF, 0.0)[:, None, None]
    return alpha.add_(betas(match, links, last, ends)).sub_(shift).exp_()


def best_alignment_triton(match: Tensor, links: Tensor, last: Tensor, ends: Tensor) -> Tensor:
    """Find the most probable path.

    Args:
        last, ends: (B,) indices of the last token and the last vertex.

    Returns:
        (B, L) int64: for each vertex, the index of the token that it emits; -1 if the path does not visit it.
    """
    best = alphas(match, links, last, ends, best=True)
    batch, _, size = match.shape
    path = torch.full((batch, size), -1, dtype=torch.long, device=match.device)
    launch(_trace, (batch,))(
        links, best, path, last, ends, size, *links.stride(), *best.stride()[:2], WIDE=WIDE, num_warps=4
    )  # fmt: skip
    return path


@triton.jit
def _gather(
    logits, targets, out, totals, vertices, vocabulary, tokens, x_b, x_l, x_v,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    row, vertex = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    row_logits = logits + row * x_b + vertex * x_l
    top = float("-inf")
    total = 0.0
    for begin in range(0, vocabulary, BLOCK_V):
        v = begin + tl.arange(0, BLOCK_V)
        x = tl.load(row_logits + v * x_v, mask=v < vocabulary, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, 0))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(x - shift), 0)
        top = new_top
    log_total = top + tl.log(total)
    tl.store(totals + row * vertices + vertex, log_total)
    for begin in range(0, tokens, BLOCK_M):
        m = begin + tl.arange(0, BLOCK_M)
        token = tl.load(targets + row * tokens + m, mask=m < tokens, other=0)
        x = tl.load(row_logits + token * x_v, mask=m < tokens, other=0.0).to(tl.float32)
        tl.store(out + (row * tokens + m) * vertices + vertex, x - log_total, mask=m < tokens)


@triton.jit
def _gather_gradient(
    logits, targets, totals, grads, out, vertices, vocabulary, tokens, x_b, x_l, x_v, g_b, g_m, g_l,
    BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    row, vertex = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    row_logits = logits + row * x_b + vertex * x_l
    row_out = out + (row * vertices + vertex) * vocabulary
    log_total = tl.load(totals + row * vertices + vertex)
    grads += row * g_b + vertex * g_l
    targets += row * tokens
    total = 0.0
    for begin in range(0, tokens, BLOCK_M):
        m = begin + tl.arange(0, BLOCK_M)
        total += tl.sum(tl.load(grads + m * g_m, mask=m < tokens, other=0.0).to(tl.float32), 0)
    for begin in range(0, vocabulary, BLOCK_V):
        v = begin + tl.arange(0, BLOCK_V)
        x = tl.load(row_logits + v * x_v, mask=v < vocabulary, other=0.0).to(tl.float32)
        tl.store(row_out + v, (-total * tl.exp(x - log_total)).to(out.dtype.element_ty), mask=v < vocabulary)
    tl.debug_barrier()  # wait until the whole row is written, because single entries are overwritten next
    for begin in range(0, tokens, BLOCK_M):
        m = begin + tl.arange(0, BLOCK_M)
        token = tl.load(targets + m, mask=m < tokens, other=-1)
        share = tl.zeros([BLOCK_M], tl.float32)
        for other in range(0, tokens, BLOCK_M):
            n = other + tl.arange(0, BLOCK_M)
            others = tl.load(targets + n, mask=n < tokens, other=-2)
            grad = tl.load(grads + n * g_m, mask=n < tokens, other=0.0).to(tl.float32)
            share += tl.sum(tl.where(token[:, None] == others[None], grad[None], 0.0), 1)
        x = tl.load(row_logits + token * x_v, mask=m < tokens, other=0.0).to(tl.float32)
        value = share - total * tl.exp(x - log_total)
        tl.store(row_out + token, value.to(out.dtype.element_ty), mask=m < tokens)


class _TritonGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        batch, vertices, vocabulary = logits.shape
        targets = targets.long().contiguous()
        tokens = targets.shape[1]
        out = torch.empty(batch, tokens, vertices, dtype=torch.float32, device=logits.device)
        totals = torch.empty(batch, vertices, dtype=torch.float32, device=logits.device)
        launch(_gather, (vertices, batch))(
            logits, targets, out, totals, vertices, vocabulary, tokens, *logits.stride(),
            BLOCK_V=VOCABULARY, BLOCK_M=TOKENS, num_warps=8,
        )  # fmt: skip
        ctx.save_for_backward(logits, targets, totals)
        return out

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] # the decorator makes `ctx` position-only
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None]:
        logits, targets, totals = ctx.saved_tensors
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        launch(_gather_gradient, (logits.shape[1], len(logits)))(
            logits, targets, totals, grads[0], out, *logits.shape[1:], targets.shape[1],
            *logits.stride(), *grads[0].stride(), BLOCK_V=VOCABULARY, BLOCK_M=TOKENS, num_warps=8,
        )  # fmt: skip
        return out, None


def gather_triton(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute log-probabilities (B, M, L) float32 of the target tokens (B, M) at each vertex, from logits (B, L, V)."""
    return _TritonGather.apply(logits, targets)
