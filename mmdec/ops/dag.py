"""The directed acyclic graph of DA-Transformer: marginal likelihood, posterior and best alignment.

A target Y = y_1..y_M is emitted along a path through L vertices: the first token on vertex 0, the last one on the
graph's last vertex, jumps forward only (DASpeech, section 3.1). The inputs are log-probabilities of emissions and
links, on any device:

match          (B, M, L)  log P(y_t | v_j)
links          (B, L, L)  log E_ij; jumps go forward only: entries with j <= i are ignored, whatever they hold
target_lengths (B,)       1 .. M
graph_lengths  (B,)       1 .. L

Log-probabilities may be -inf. Padding may hold anything, NaN included: it is never read.

GPUs use `dag_triton.py`, in float32 unless an input is float64; all other devices use `dag_scan.py`, in float64.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmdec.ops.dag_links import NEG_INF, checked_lengths, checked_links
from mmdec.ops.dag_scan import forward_backward, log_alpha_beta, log_likelihood, masked_inputs
from mmdec.ops.kernels import runs_on
from mmdec.types import InputError

PosteriorVariant = Literal["paper", "released"]


def dag_marginal(match: Tensor, links: Tensor, target_lengths: Tensor, graph_lengths: Tensor) -> Tensor:
    """Log P(Y | X), summed over all paths: (B,). Differentiable once, in match and links.

    An impossible sample (graph shorter than the target, or no path of finite score) gives -inf and zero gradients.
    The result has the dtype of match, float32 at least.
    """
    match, links, last, ends = _checked(match, links, target_lengths, graph_lengths)
    if _kernels_take(match, links):
        from mmdec.ops.dag_triton import marginal_triton

        return marginal_triton(match, links, last, ends)
    return _Marginal.apply(match, links, last, ends)


def dag_posterior(
    match: Tensor,
    links: Tensor,
    target_lengths: Tensor,
    graph_lengths: Tensor,
    *,
    variant: PosteriorVariant = "paper",
) -> Tensor:
    """P(y_t is emitted by v_j | X, Y): (B, M, L), without gradient. Padding and impossible samples are 0.

    variant: "paper" is the posterior alpha_t(j) beta_t(j) / P(Y), where beta leaves out the emission at v_j. "released"
        is what the published code trains with: softmax over j of alpha + beta where both include it. That is the
        posterior
        times P(y_t | v_j), normalised; it runs in log space and is several times slower.
    """
    if variant not in ("paper", "released"):
        raise InputError(f'`variant` must be "paper" or "released", but is {variant!r}. The first is the default.')
    with torch.no_grad():
        match, links, last, ends = _checked(match, links, target_lengths, graph_lengths)
        if variant == "paper" and _kernels_take(match, links):
            from mmdec.ops.dag_triton import posterior_triton

            return posterior_triton(match, links, last, ends)
        if variant == "paper":
            return forward_backward(match, links, last, ends, counted=False).vertices.to(_result_dtype(match))
        masked, forward = masked_inputs(match, links, last, ends)
        alpha, beta, _ = log_alpha_beta(masked, forward, last, ends)
        scores = alpha + beta + masked
        # a row without a finite score has no softmax and stays 0
        empty = (scores == NEG_INF).all(2, keepdim=True)
        return scores.masked_fill(empty, 0.0).softmax(2).masked_fill(empty, 0.0).to(_result_dtype(match))


def dag_best_alignment(match: Tensor, links: Tensor, target_lengths: Tensor, graph_lengths: Tensor) -> Tensor:
    """The most probable path: (B, L), the index of the token that each vertex emits, or -1. No gradient.

    Every vertex of an impossible sample gets -1.
    """
    with torch.no_grad():
        match, links, last, ends = _checked(match, links, target_lengths, graph_lengths)
        if _kernels_take(match, links):
            from mmdec.ops.dag_triton import best_alignment_triton

            return best_alignment_triton(match, links, last, ends)
        batch, steps, size = match.shape
        match, links = masked_inputs(match, links, last, ends)
        sources = links.transpose(1, 2).contiguous()  # (B, L, L), [j, i]
        best = torch.full_like(match, NEG_INF)
        best[:, 0, 0] = match[:, 0, 0]
        for t in range(1, steps):
            best[:, t] = (sources + best[:, t - 1, None, :]).amax(2) + match[:, t]

        # only vertices on the path need their predecessor: take the argmax while backtracing, over (B, L)
        row = torch.arange(batch, device=match.device)
        possible = best[row, last, ends] > NEG_INF
        alignment = match.new_full((batch, size + 1), -1, dtype=torch.long)  # column `size` collects unused steps
        vertex = ends
        for t in range(steps - 1, -1, -1):
            used = possible & (last >= t)
            alignment[row, torch.where(used, vertex, size)] = t
            if t > 0:
                before = (best[:, t - 1] + sources[row, vertex]).argmax(1)
                vertex = torch.where(last >= t, before, vertex)
        return alignment[:, :size]


def expected_states(posterior: Tensor, hidden: Tensor) -> Tensor:
    """Expected hidden state of each target token, z_t = sum_j P(a_t = j) v_j (DASpeech, section 3.2).

    posterior (B, M, L), hidden (B, L, D) -> (B, M, D). The gradient reaches the hidden states, as in the paper.
    """
    if posterior.dim() != 3 or hidden.dim() != 3 or posterior.shape[::2] != hidden.shape[:2]:
        raise InputError(
            f"`posterior` and `hidden` must be (B, M, L) and (B, L, D), but are {tuple(posterior.shape)} and "
            f"{tuple(hidden.shape)}. They must speak of the same graph."
        )
    return torch.bmm(posterior.to(hidden.dtype), hidden)


class _Marginal(torch.autograd.Function):
    """log P and its gradient. The gradient of a log-probability is the expected count of its use, which the scan
    computes."""

    @staticmethod
    def forward(ctx: Any, match: Tensor, links: Tensor, last: Tensor, ends: Tensor) -> Tensor:
        if not any(ctx.needs_input_grad[:2]):
            return log_likelihood(match, links, last, ends).to(_result_dtype(match))
        log_prob, vertices, counts = forward_backward(match, links, last, ends, counted=ctx.needs_input_grad[1])
        ctx.save_for_backward(vertices.to(match.dtype), counts.to(links.dtype), log_prob > NEG_INF)
        return log_prob.to(_result_dtype(match))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] # the decorator makes `ctx` position-only
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        vertices, counts, possible = ctx.saved_tensors
        # a loss may pass an infinite gradient for an impossible sample; its counts are 0, and 0 * inf would be NaN
        grad = grads[0].masked_fill(~possible, 0.0)[:, None, None]
        wants_match, wants_links = ctx.needs_input_grad[:2]
        return (
            (vertices * grad).to(vertices.dtype) if wants_match else None,
            (counts * grad).to(counts.dtype) if wants_links else None,
            None,
            None,
        )


def _kernels_take(match: Tensor, links: Tensor) -> bool:
    return runs_on(match.device) and torch.float64 not in (match.dtype, links.dtype)


def _checked(
    match: Tensor, links: Tensor, target_lengths: Tensor, graph_lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Check the inputs. Returns match, links, and the indices of the last token and the last vertex (B,)."""
    if match.dim() != 3 or 0 in match.shape[1:] or not match.is_floating_point():
        raise InputError(
            f"`match` must be floating-point log-probabilities (B, M, L), but is {match.dtype} of shape "
            f"{tuple(match.shape)}. Gather log P(y_t | v_j) from the emissions."
        )
    batch, steps, size = match.shape
    links = checked_links(links, batch, size)
    last = checked_lengths("target_lengths", target_lengths, batch, steps, match.device) - 1
    ends = checked_lengths("graph_lengths", graph_lengths, batch, size, match.device) - 1
    return match, links, last, ends


def _result_dtype(match: Tensor) -> torch.dtype:
    return torch.promote_types(match.dtype, torch.float32)
