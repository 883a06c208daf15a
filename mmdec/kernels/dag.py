"""Dynamic programs on the directed acyclic graph of DA-Transformer: marginal likelihood, posterior and best alignment.

A path through the L vertices of a graph emits the target Y = y_1..y_M, one token at each of its vertices. It starts on
vertex 0, only jumps forward, and ends on the graph's last vertex (DASpeech, section 3.1). The inputs are
log-probabilities of emissions and links, on any device:

    match          (B, M, L)  log P(y_t | v_j)
    links          (B, L, L)  log E_ij, transition from vertex i to j; entries with j <= i are never read
    target_lengths (B,)       number of tokens, 1 .. M
    graph_lengths  (B,)       number of vertices, 1 .. L

Log-probabilities may be -inf. Padding may have any value, even NaN: it is never read.

On GPUs `dag_triton.py` computes in float32, unless an input is float64. Otherwise a forward-backward scan computes in
float64: a fast one (`scaled_scan`, on a CPU `dag_scan_cpu.py`), and a slow one (`log_space_scan`) where the fast one is
inaccurate:

    alpha_t(j) = match_t(j) + LSE_{i<j}(alpha_{t-1}(i) + E_ij)      alpha_0 is nonzero only on vertex 0
    beta_t(i)  = LSE_{j>i}(E_ij + match_{t+1}(j) + beta_{t+1}(j))   beta_last is nonzero only on the last vertex

`log_softmax_gather` makes `match` from logits.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mmdec.errors import InputError
from mmdec.kernels.availability import runs_on
from mmdec.kernels.dag_scan_cpu import ScanResult, finite_or_zero, scan

PosteriorVariant = Literal["paper", "released"]
NEG_INF = float("-inf")
# maximum deviation from 1 of a token's summed posterior; if it is larger, `log_space_scan` repeats the sample
MAX_POSTERIOR_ERROR = 1e-9
SMALLEST_NORMAL = 2.3e-308  # replaces a divisor of 0: about the smallest normal float64
# in nats: the maximum `gap` (see `scaled_scan`) for which the fast scan's float64 range is large enough
MAX_TRUSTED_GAP = 640.0


def dag_marginal(match: Tensor, links: Tensor, target_lengths: Tensor, graph_lengths: Tensor) -> Tensor:
    """Return log P(Y | X) (B,), summed over all paths.

    It is differentiable once, in match and links. An impossible sample (fewer vertices than tokens, or no path of
    finite score) gives -inf and zero gradients. The result has the dtype of match, but at least float32.

    Args:
        match: (B, M, L).
        links: (B, L, L).
        target_lengths: (B,), numbers of tokens.
        graph_lengths: (B,), numbers of vertices.
    """
    match, links, last, ends = _check_arguments(match, links, target_lengths, graph_lengths)
    if _kernels_take(match, links):
        from mmdec.kernels.dag_triton import marginal_triton

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
    """Return the posterior P(v_j emits y_t | X, Y) (B, M, L), without gradient; 0 for padding and impossible samples.

    Args:
        variant: "paper" is the posterior alpha_t(j) beta_t(j) / P(Y), where beta leaves out the emission at v_j.
            "released" is what the published code trains with: softmax over j of alpha + beta, where both include this
            emission. That is the posterior times P(y_t | v_j), normalised; it runs in log space and is several times
            slower.
    """
    if variant not in ("paper", "released"):
        raise InputError(f'`variant` must be "paper" or "released", but is {variant!r}. The first is the default.')
    with torch.no_grad():
        match, links, last, ends = _check_arguments(match, links, target_lengths, graph_lengths)
        if variant == "paper" and _kernels_take(match, links):
            from mmdec.kernels.dag_triton import posterior_triton

            return posterior_triton(match, links, last, ends)
        if variant == "paper":
            return forward_backward(match, links, last, ends, counts=False).vertices.to(_result_dtype(match))
        masked, forward = mask_inputs(match, links, last, ends)
        alpha, beta, _ = log_alpha_beta(masked, forward, last, ends)
        scores = alpha + beta + masked
        # for a row of scores that are all -inf the softmax is undefined; its result is set to 0
        empty = (scores == NEG_INF).all(2, keepdim=True)
        return scores.masked_fill(empty, 0.0).softmax(2).masked_fill(empty, 0.0).to(_result_dtype(match))


def dag_best_alignment(match: Tensor, links: Tensor, target_lengths: Tensor, graph_lengths: Tensor) -> Tensor:
    """Find the most probable path that emits the target, without a gradient.

    Args:
        match: (B, M, L).
        links: (B, L, L).
        target_lengths: (B,), numbers of tokens.
        graph_lengths: (B,), numbers of vertices.

    Returns:
        (B, L): for each vertex, the index of the target token that it emits; -1 if the path does not visit it, or the
        sample is impossible.
    """
    with torch.no_grad():
        match, links, last, ends = _check_arguments(match, links, target_lengths, graph_lengths)
        if _kernels_take(match, links):
            from mmdec.kernels.dag_triton import best_alignment_triton

            return best_alignment_triton(match, links, last, ends)
        batch, steps, size = match.shape
        match, links = mask_inputs(match, links, last, ends)
        sources = links.transpose(1, 2).contiguous()  # (B, L, L), [b, j, i]: the link from vertex i to j
        best = torch.full_like(match, NEG_INF)
        best[:, 0, 0] = match[:, 0, 0]
        for t in range(1, steps):
            best[:, t] = (sources + best[:, t - 1, None, :]).amax(2) + match[:, t]

        # the predecessor is needed only at vertices on the path, so the argmax is taken while tracing back
        row = torch.arange(batch, device=match.device)
        possible = best[row, last, ends] > NEG_INF
        # the buffer has one column more than there are vertices; unused steps write there
        alignment = match.new_full((batch, size + 1), -1, dtype=torch.long)
        vertex = ends
        for t in range(steps - 1, -1, -1):
            used = possible & (last >= t)
            alignment[row, torch.where(used, vertex, size)] = t
            if t > 0:
                before = (best[:, t - 1] + sources[row, vertex]).argmax(1)
                vertex = torch.where(last >= t, before, vertex)
        return alignment[:, :size]


def expected_states(posterior: Tensor, hidden: Tensor) -> Tensor:
    """Compute each target token's expected hidden state, z_t = sum_j P(a_t = j) v_j (DASpeech, section 3.2).

    posterior (B, M, L), hidden (B, L, D) -> (B, M, D). The gradient reaches the hidden states, as in the paper.
    """
    if posterior.dim() != 3 or hidden.dim() != 3 or posterior.shape[::2] != hidden.shape[:2]:
        raise InputError(
            f"`posterior` and `hidden` must be (B, M, L) and (B, L, D), but are {tuple(posterior.shape)} and "
            f"{tuple(hidden.shape)}. They must belong to the same graph."
        )
    return torch.bmm(posterior.to(hidden.dtype), hidden)


class _Marginal(torch.autograd.Function):
    """The autograd function of log P.

    The gradient of an emission or a link is its expected number of uses by a path; the forward-backward scan computes
    these numbers.
    """

    @staticmethod
    def forward(ctx: Any, match: Tensor, links: Tensor, last: Tensor, ends: Tensor) -> Tensor:
        if not any(ctx.needs_input_grad[:2]):
            return log_likelihood(match, links, last, ends).to(_result_dtype(match))
        log_prob, vertices, counts = forward_backward(match, links, last, ends, counts=ctx.needs_input_grad[1])
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


def _check_arguments(
    match: Tensor, links: Tensor, target_lengths: Tensor, graph_lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Check the arguments of the public functions.

    Returns:
        Match, links, and the indices (B,) of the last token and of the last vertex.
    """
    if match.dim() != 3 or 0 in match.shape[1:] or not match.is_floating_point():
        raise InputError(
            f"`match` must be floating-point log-probabilities (B, M, L), but is {match.dtype} of shape "
            f"{tuple(match.shape)}. Gather log P(y_t | v_j) from the emissions."
        )
    batch, steps, size = match.shape
    links = check_links(links, batch, size)
    last = check_lengths("target_lengths", target_lengths, batch, steps, match.device) - 1
    ends = check_lengths("graph_lengths", graph_lengths, batch, size, match.device) - 1
    return match, links, last, ends


def _result_dtype(match: Tensor) -> torch.dtype:
    return torch.promote_types(match.dtype, torch.float32)


def check_links(links: Tensor, batch: int, size: int) -> Tensor:
    """Return the links if they are (B, L, L) floats for graphs with `size` vertices, else raise InputError."""
    if not links.is_floating_point():
        raise InputError(f"`links` must hold floating-point log-probabilities, but is {links.dtype}. Convert it.")
    if tuple(links.shape) != (batch, size, size):
        raise InputError(
            f"`links` must have shape ({batch}, {size}, {size}), but has {tuple(links.shape)}. "
            "Batch and graph size are those of the emissions."
        )
    return links


def check_lengths(name: str, lengths: Tensor, batch: int, longest: int, device: torch.device) -> Tensor:
    """Return the lengths (B,) as int64 on `device`; raise InputError unless all are integers from 1 to `longest`.

    Args:
        name: The argument's name in the error.
        batch: B.
    """
    if tuple(lengths.shape) != (batch,) or lengths.is_floating_point():
        raise InputError(
            f"`{name}` must be {batch} integers, but is {lengths.dtype} of shape {tuple(lengths.shape)}. "
            "Pass one length for each sample of the batch."
        )
    if batch:
        low, high = (int(value) for value in torch.stack(lengths.aminmax()).tolist())
        if low < 1 or high > longest:
            raise InputError(
                f"`{name}` must be between 1 and {longest}, but ranges from {low} to {high}. "
                "Check the padding of the batch."
            )
    return lengths.to(device=device, dtype=torch.long)


def forward_links(links: Tensor, graph_lengths: Tensor) -> Tensor:
    """Return the links (B, L, L) with -inf for impossible jumps: backward, in place, from or to padding."""
    return mask_impossible_(links.clone(), graph_lengths)


def mask_impossible_(scores: Tensor, graph_lengths: Tensor) -> Tensor:
    """Set the scores (B, L, L) of impossible jumps to -inf, in the tensor itself.

    A jump is impossible if it goes backward, stays in place, or touches padding.
    """
    size = scores.size(1)
    # a possible jump has i < j < length, so a check of j against the length covers i
    outside = torch.arange(size, device=scores.device) >= graph_lengths[:, None]  # shape (B, L)
    backward = torch.ones(size, size, dtype=torch.bool, device=scores.device).tril_()
    return scores.masked_fill_(backward | outside[:, None, :], NEG_INF)


class Posterior(NamedTuple):
    """Results of the forward-backward scan, float64. For an impossible sample all posteriors are 0."""

    log_prob: Tensor  # (B,), -inf where no path emits the target
    vertices: Tensor  # (B, M, L), P(y_t is emitted by v_j | Y)
    links: Tensor  # (B, L, L), P(the path jumps i -> j | Y)


def mask_inputs(match: Tensor, links: Tensor, last: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return `match` and `links` as float64, with -inf where no complete path can pass.

    Args:
        last, ends: (B,) indices of the last token and the last vertex.
    """
    steps = torch.arange(match.size(1), device=match.device)
    vertex = torch.arange(match.size(2), device=match.device)
    # each token needs a later vertex: token t is on vertex t at the earliest, and leaves one for each later token
    earliest = vertex >= steps[:, None]  # shape (M, L)
    latest = vertex <= (ends - last)[:, None, None] + steps[:, None]  # shape (B, M, L)
    possible = earliest & latest & (steps <= last[:, None])[:, :, None]
    return match.double().masked_fill(~possible, NEG_INF), forward_links(links.double(), ends + 1)


def forward_backward(match: Tensor, links: Tensor, last: Tensor, ends: Tensor, *, counts: bool = True) -> Posterior:
    """Compute log P(Y | X) and the posteriors of vertices and links by the forward-backward algorithm.

    Args:
        match: (B, M, L) float.
        links: (B, L, L) float.
        last, ends: (B,) indices of the last token and the last vertex.
        counts: Whether the posteriors of links are needed; without them the scan is faster, and they are 0.
    """
    if match.device.type == "cpu":
        return _scan_samples(match, links, last, ends, vertices=True, counted=counts)
    match, links = mask_inputs(match, links, last, ends)
    result, trusted = scaled_scan(match, links, last, ends)
    doubtful = (~trusted).nonzero().squeeze(1)  # reading the indices is the only step that waits for the GPU
    if len(doubtful) == 0:
        return result
    repaired = log_space_scan(match[doubtful], links[doubtful], last[doubtful], ends[doubtful])
    return Posterior(*(all_rows.index_copy(0, doubtful, part) for all_rows, part in zip(result, repaired, strict=True)))


def log_likelihood(match: Tensor, links: Tensor, last: Tensor, ends: Tensor) -> Tensor:
    """Compute only log P (B,) in float64, from match (B, M, L) and links (B, L, L).

    On a CPU this takes half of `forward_backward`'s time.

    Args:
        last, ends: (B,) indices of the last token and the last vertex.
    """
    if match.device.type == "cpu":
        return _scan_samples(match, links, last, ends, vertices=False, counted=False).log_prob
    return forward_backward(match, links, last, ends).log_prob


def _scan_samples(
    match: Tensor, links: Tensor, last: Tensor, ends: Tensor, *, vertices: bool, counted: bool
) -> Posterior:
    """Run the forward-backward scan on a CPU for one sample at a time, cropped to its lengths.

    `log_space_scan` repeats inaccurate samples.

    Args:
        match: (B, M, L).
        links: (B, L, L).
        last, ends: (B,) indices of the last token and the last vertex.
        vertices, counted: Whether posteriors of vertices and of links are needed; if not, these results are empty
            tensors.
    """
    batch, steps, size = match.shape
    log_prob = torch.full((batch,), NEG_INF, dtype=torch.float64)
    lengths = list(zip((last + 1).tolist(), (ends + 1).tolist(), strict=True))
    # a batch of one sample without padding: its results are returned without copies
    unpadded = lengths == [(steps, size)] and steps <= size
    posteriors = torch.zeros(batch, steps if vertices and not unpadded else 0, size, dtype=torch.float64)
    counts = torch.zeros(batch, size if counted and not unpadded else 0, size, dtype=torch.float64)
    for row, (tokens, width) in enumerate(lengths):
        if tokens > width:
            continue
        own_match, own_links = match[row, :tokens, :width], links[row, :width, :width]
        sample = scan(own_match, own_links, vertices=vertices, counts=counted)
        if sample is None:
            bounds = last[row : row + 1], ends[row : row + 1]
            inputs = mask_inputs(own_match[None], own_links[None], *bounds)
            if vertices:
                slow = log_space_scan(*inputs, *bounds)
                sample = ScanResult(float(slow.log_prob), slow.vertices[0], slow.links[0])
            else:
                sample = scan(own_match, own_links, vertices=True, counts=False)
                sample = sample or ScanResult(float(log_space_scan(*inputs, *bounds).log_prob), None, None)
        log_prob[row] = sample.log_prob
        if unpadded:
            return Posterior(
                log_prob,
                posteriors if sample.vertices is None else sample.vertices[None],
                counts if sample.links is None else sample.links[None],
            )
        if vertices and sample.vertices is not None:
            posteriors[row, :tokens, :width] = sample.vertices
        if counted and sample.links is not None:
            counts[row, :width, :width] = sample.links
    return Posterior(log_prob, posteriors, counts)


def scaled_scan(match: Tensor, links: Tensor, last: Tensor, ends: Tensor) -> tuple[Posterior, Tensor]:
    """Run the fast scan on masked float64 inputs.

    The scan computes with probabilities instead of logarithms, and divides each step by its maximum. So a step is one
    batched product of a vector and a matrix instead of L^2 exponentials. Numbers below e^-708 of their maximum become
    0. Whether that can matter is decided afterwards for each sample. With

        gap = max_t  max log alpha_t  +  max E  +  max match_{t+1}  +  max log beta_{t+1}  -  log P,

    the loss at one vertex in one step is less than 3 L e^-708 times the product of those four maxima, so all steps
    together lose less than 3 M L^2 e^(gap - 708) of P. If gap <= 640, and no step falls by more than e^-640, a sample
    is accurate to 1e-16 in log P and, absolutely, in every posterior, for M L^2 < 1e13. All other samples, including
    impossible ones, are recomputed by `log_space_scan`.

    Args:
        match: (B, M, L).
        links: (B, L, L).
        last: (B,) index of the last token.
        ends: (B,) index of the last vertex.

    Returns:
        The posteriors, and (B,) bool: whether each sample's result is accurate.
    """
    batch, steps, size = match.shape
    step = torch.arange(steps, device=match.device)
    link_top = finite_or_zero(links.amax((1, 2)))  # shape (B,)
    match_top = finite_or_zero(match.amax(2))  # shape (B, M)
    weights = (links - link_top[:, None, None]).exp()  # shape (B, L, L)
    emission = (match - match_top[:, :, None]).exp()  # shape (B, M, L)

    # The backward pass is a mirrored forward pass: tokens reversed for each sample, links transposed. Both run as one
    # batch of 2B.
    mirror = last[:, None] - step  # (B, M), step k of the mirror is token last - k
    outside, mirror = mirror < 0, mirror.clamp(min=0)
    mirrored = emission.gather(1, mirror[:, :, None].expand_as(emission)).masked_fill(outside[:, :, None], 0.0)
    factors = torch.cat([emission, mirrored]).transpose(0, 1).contiguous()  # shape (M, 2B, L)
    tops = torch.cat([match_top, match_top.gather(1, mirror)]) + link_top.repeat(2)[:, None]  # shape (2B, M)

    row = torch.arange(batch, device=match.device)
    arrivals = match.new_zeros(steps, 2 * batch, size)  # alpha of each token before its emission is multiplied in
    arrivals[0, :batch, 0] = 1.0
    arrivals[0, batch + row, ends] = 1.0
    states = arrivals.clone()  # these states include the emission, and are divided by their maximum
    peaks = match.new_ones(steps, 2 * batch, 1)
    both = torch.cat([weights, weights.transpose(1, 2)])  # shape (2B, L, L)
    for k in range(1, steps):
        arrive, state, peak = arrivals[k], states[k], peaks[k]
        torch.bmm(states[k - 1].unsqueeze(1), both, out=arrive.unsqueeze(1))
        torch.mul(arrive, factors[k], out=state)
        torch.amax(state, 1, keepdim=True, out=peak)
        state.div_(peak.clamp_min_(SMALLEST_NORMAL))

    log_peaks = peaks.squeeze(2).t().log()  # shape (2B, M)
    start = torch.cat([match[:, 0, 0], match[row, last, ends]])  # shape (2B,)
    scale = torch.cat([start[:, None], log_peaks[:, 1:] + tops[:, 1:]], 1).cumsum(1)  # (2B, M): log of each maximum
    arrival_scale = torch.cat([torch.zeros_like(start)[:, None], scale[:, :-1] + link_top.repeat(2)[:, None]], 1)

    def tokens(values: Tensor) -> Tensor:
        """Return the mirrored half of a buffer (M, 2B, L), put back into the order of tokens: (B, M, L)."""
        half = values[:, batch:].transpose(0, 1)
        return half.gather(1, mirror[:, :, None].expand(batch, steps, half.size(2)))

    alpha, beta = states[:, :batch].transpose(0, 1), tokens(arrivals)  # shape (B, M, L)
    alpha_scale, beta_scale = scale[:batch], arrival_scale[batch:].gather(1, mirror)  # shape (B, M)
    log_prob = alpha_scale.gather(1, last[:, None]).squeeze(1) + alpha[row, last, ends].log()  # shape (B,)

    excess = (alpha_scale + beta_scale - log_prob[:, None]).masked_fill(outside, NEG_INF)
    vertices = alpha * beta * excess.exp()[:, :, None]  # shape (B, M, L)

    # A link's count: leave v_i after token t, arrive at v_j, emit token t + 1.
    following = mirror[:, 1:]  # shape (B, M - 1)
    leaving = alpha_scale[:, :-1] + link_top[:, None] - log_prob[:, None]
    emitted_scale = scale[batch:].gather(1, following)
    into = (leaving + emitted_scale).masked_fill(outside[:, 1:], NEG_INF).exp()[:, :, None]
    counts = torch.bmm((alpha[:, :-1] * into).transpose(1, 2), tokens(states)[:, 1:]) * weights  # shape (B, L, L)

    beta_top = tokens(arrivals.amax(2, keepdim=True)).squeeze(2).log() + beta_scale  # shape (B, M)
    gap = (leaving + match_top[:, 1:] + beta_top[:, 1:]).masked_fill(outside[:, 1:], NEG_INF)
    fall = log_peaks[:, 1:].masked_fill(outside.repeat(2, 1)[:, 1:], 0.0)
    smooth = (fall >= -MAX_TRUSTED_GAP).all(1).view(2, batch).all(0)  # True only if both directions are accurate
    trusted = (gap <= MAX_TRUSTED_GAP).all(1) & smooth & log_prob.isfinite()
    # Each token is emitted by one vertex, so its posteriors must sum to 1. If float64 lost states at a vertex in both
    # directions, log P is still right, but the posteriors are not.
    lost = (vertices.sum(2) - 1).abs().masked_fill(outside, 0.0).amax(1)
    return Posterior(log_prob, vertices, counts), trusted & (lost <= MAX_POSTERIOR_ERROR)


def log_space_scan(match: Tensor, links: Tensor, last: Tensor, ends: Tensor) -> Posterior:
    """Run the slow scan, in log space, on masked float64 inputs match (B, M, L) and links (B, L, L).

    It is accurate for every input.

    Args:
        last, ends: (B,) indices of the last token and the last vertex.
    """
    alpha, beta, log_prob = log_alpha_beta(match, links, last, ends)
    # 0 for a sample without any possible path: alpha + beta are -inf there, and exp makes them 0
    shift = finite_or_zero(log_prob)[:, None, None]
    vertices = (alpha + beta - shift).exp()
    counts = torch.zeros_like(links)
    for t in range(match.size(1) - 1):
        into = match[:, t + 1] + beta[:, t + 1]  # shape (B, L)
        counts += (alpha[:, t, :, None] + links + into[:, None, :] - shift).exp()
    return Posterior(log_prob, vertices, counts)


def log_alpha_beta(match: Tensor, links: Tensor, last: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log alpha, log beta and log P of each sample.

    Args:
        last, ends: (B,) indices of the last token and the last vertex.

    Returns:
        Log alpha (B, M, L), which includes the emission at the vertex; log beta (B, M, L), which does not; log P (B,).
    """
    steps = match.size(1)
    row = torch.arange(match.size(0), device=match.device)
    alpha = torch.full_like(match, NEG_INF)
    alpha[:, 0, 0] = match[:, 0, 0]
    transposed = links.transpose(1, 2).contiguous()
    for t in range(1, steps):
        alpha[:, t] = match[:, t] + _log_sum(transposed + alpha[:, t - 1, None, :])
    final = torch.full_like(match[:, 0], NEG_INF)
    final[row, ends] = 0.0
    beta = torch.full_like(match, NEG_INF)
    after = torch.full_like(final, NEG_INF)
    for t in range(steps - 1, -1, -1):
        after = torch.where((last == t)[:, None], final, after)  # before the sample's last token the state is -inf
        beta[:, t] = after
        after = _log_sum(links + (match[:, t] + after)[:, None, :])
    return alpha, beta, alpha[row, last, ends]


def _log_sum(scores: Tensor) -> Tensor:
    """Return the log-sum-exp over the last axis; -inf where all scores are -inf."""
    top = finite_or_zero(scores.amax(-1, keepdim=True))
    return (scores - top).exp_().sum(-1).log_() + top.squeeze(-1)


def log_softmax_gather(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability of each target token at each vertex, without a log-softmax over the whole vocabulary.

    Args:
        logits: (B, L, V) of the vertices.
        targets: (B, M) token ids, 0 .. V - 1.

    Returns:
        (B, M, L) log P(y_t | v_j), at least float32. Differentiable once, in the logits. On a GPU the logits are read
        once, and a second time for the gradient.
    """
    if logits.dim() != 3 or targets.dim() != 2 or len(logits) != len(targets) or targets.is_floating_point():
        raise InputError(
            f"`logits` and `targets` must be (B, L, V) and integers (B, M), but are {tuple(logits.shape)} and "
            f"{targets.dtype} {tuple(targets.shape)}. Give every sample its own tokens."
        )
    if runs_on(logits.device) and logits.dtype != torch.float64:
        from mmdec.kernels.dag_triton import gather_triton

        return gather_triton(logits, targets)
    return _Gather.apply(logits, targets)


class _Gather(torch.autograd.Function):
    """The autograd function of the chosen tokens' logits minus the log-sum-exp of all logits.

    The backward pass allocates no memory except the gradient.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        wide = torch.promote_types(logits.dtype, torch.float32)
        index = targets.long()[:, None].expand(-1, logits.shape[1], -1)  # shape (B, L, M)
        total = logits.to(wide).logsumexp(2)  # shape (B, L)
        ctx.save_for_backward(logits, index, total)
        return (logits.gather(2, index).to(wide) - total[:, :, None]).transpose(1, 2).contiguous()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] # the decorator makes `ctx` position-only
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None]:
        logits, index, total = ctx.saved_tensors
        grad = grads[0].transpose(1, 2).to(total.dtype)  # shape (B, L, M)
        out = (logits.to(total.dtype) - total[:, :, None]).exp_()
        out *= -grad.sum(2, keepdim=True)
        return out.scatter_add_(2, index, grad).to(logits.dtype), None
