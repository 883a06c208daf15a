"""Compares the DAG's kernels with the torch implementation in float64."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from mmdec.kernels.dag import dag_best_alignment, dag_marginal, dag_posterior
from tests.kernels.interpreter import DEVICE  # before the kernels
from tests.support.poisoned_memory import poisoned


@dataclass(frozen=True)
class Case:
    tokens: list[int]  # number of tokens of each sample
    vertices: list[int]  # number of vertices of each sample
    dtype: torch.dtype = torch.float32
    scale: float = 1.0  # of the scores
    holes: float = 0.0  # share of scores that are -inf


CASES = {
    "one token, one vertex": Case([1], [1]),
    "one token of two vertices is impossible": Case([1, 2], [2, 2]),
    "ragged": Case([5, 3, 1, 4], [9, 7, 1, 3]),
    "as many tokens as vertices": Case([6], [6]),
    "holes": Case([4, 3], [12, 9], holes=0.3),
    "far apart": Case([5], [33], scale=60.0),
    "wider than a block": Case([3, 2], [161, 140]),
    "bfloat16": Case([6, 4], [20, 15], dtype=torch.bfloat16),
    "float16": Case([6, 4], [20, 15], dtype=torch.float16),
}
NEAR = {torch.float32: 2e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # tolerances: gradients have the inputs' dtype


def graph(case: Case, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw match (B, M, L), links (B, L, L), and the indices of the last token and vertex (B,). Cells that a kernel
    must not read are NaN; `match` is not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    batch, steps, size = len(case.tokens), max(case.tokens), max(case.vertices)
    match = case.scale * torch.randn(batch, size, steps, generator=generator).transpose(1, 2)
    links = (case.scale * torch.randn(batch, size, size, generator=generator)).log_softmax(2)
    match[torch.rand(match.shape, generator=generator) < case.holes] = -torch.inf
    links[torch.rand(links.shape, generator=generator) < case.holes] = -torch.inf
    links.masked_fill_(torch.ones(size, size, dtype=torch.bool).tril(), torch.nan)
    for row, (tokens, vertices) in enumerate(zip(case.tokens, case.vertices, strict=True)):
        match[row, tokens:] = match[row, :, vertices:] = torch.nan
        links[row, vertices:] = links[row, :, vertices:] = torch.nan
    last, ends = torch.tensor(case.tokens) - 1, torch.tensor(case.vertices) - 1
    return match.to(case.dtype), links.to(case.dtype), last, ends


def difference(module: ModuleType, case: Case, seed: int = 0) -> float:
    """Compute the largest difference from float64 of log P (relative to its size), gradients and posterior. Infinite if
    the set of impossible samples or a best alignment differs."""
    match, links, last, ends = graph(case, seed)
    weight = torch.linspace(0.5, 1.0, len(last))
    exact_match, exact_links = (part.double().requires_grad_() for part in (match, links))
    expected = dag_marginal(exact_match, exact_links, last + 1, ends + 1)
    (expected.masked_fill(~expected.isfinite(), 0.0) * weight).sum().backward()
    own_match, own_links = (part.to(DEVICE).requires_grad_() for part in (match, links))
    on_device = last.to(DEVICE), ends.to(DEVICE)
    with poisoned():
        got = module.marginal_triton(own_match, own_links, *on_device)
        (got * weight.to(DEVICE)).sum().backward()
        posterior = module.posterior_triton(own_match.detach(), own_links.detach(), *on_device).cpu()
        path = module.best_alignment_triton(own_match.detach(), own_links.detach(), *on_device).cpu()
    got = got.detach().cpu()
    if not torch.equal(got.isfinite(), expected.isfinite()):
        return torch.inf
    best = dag_best_alignment(exact_match.detach(), exact_links.detach(), last + 1, ends + 1)
    if not torch.equal(path, best):
        return torch.inf
    possible = expected.isfinite()
    parts = [((got - expected) / expected.abs().clamp(min=1.0))[possible]]
    expected_posterior = dag_posterior(exact_match.detach(), exact_links.detach(), last + 1, ends + 1)
    parts.append(posterior - expected_posterior)
    for own, exact in ((own_match, exact_match), (own_links, exact_links)):
        assert own.grad is not None
        assert exact.grad is not None
        parts.append(own.grad.cpu().double() - exact.grad)
    worst = [part.abs().amax() for part in parts if part.numel()]
    return float(torch.stack([value.detach().double() for value in worst]).amax())
