"""Compares the DAG operations with enumeration of all paths, on small graphs."""

from collections.abc import Callable
from math import exp, log

import pytest
import torch
from torch import Tensor

from mmdec.kernels.dag import dag_best_alignment, dag_marginal, dag_posterior, expected_states
from tests.support.naive_dag import all_paths, enumerated_paths

TARGETS = torch.tensor([4, 3, 2, 1, 5, 2, 6, 4])
GRAPHS = torch.tensor([8, 7, 2, 1, 5, 8, 8, 3])  # the last one is too short for its target
IMPOSSIBLE = 7


def batch(seed: int, holes: float = 0.0) -> tuple[Tensor, Tensor]:
    """Normalised random emissions and links, a share of them forbidden; the padding is NaN, to be caught if read."""
    generator = torch.Generator().manual_seed(seed)
    size, count = int(GRAPHS.max()), len(GRAPHS)
    match = (2 * torch.randn(count, int(TARGETS.max()), size, generator=generator, dtype=torch.float64)).log_softmax(1)
    links = 2 * torch.randn(count, size, size, generator=generator, dtype=torch.float64)
    forward = torch.ones(size, size, dtype=torch.bool).triu(1)
    links = links.masked_fill(~forward, -torch.inf).log_softmax(2).masked_fill(~forward, -torch.inf)
    match = match.masked_fill(torch.rand(match.shape, generator=generator) < holes, -torch.inf)
    links = links.masked_fill(torch.rand(links.shape, generator=generator) < holes, -torch.inf)
    for b, (tokens, vertices) in enumerate(zip(TARGETS.tolist(), GRAPHS.tolist(), strict=True)):
        match[b, tokens:] = match[b, :, vertices:] = torch.nan
        links[b, vertices:] = links[b, :, vertices:] = torch.nan
    return match, links


def enumerated(match: Tensor, links: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log P (B,), vertex posterior (B, M, L) and expected link counts (B, L, L), path by path."""
    log_prob = torch.full((len(match),), -torch.inf, dtype=torch.float64)
    vertices, counts = torch.zeros_like(match), torch.zeros_like(links)
    for b, (tokens, size) in enumerate(zip(TARGETS.tolist(), GRAPHS.tolist(), strict=True)):
        paths = enumerated_paths(match[b, :tokens, :size], links[b, :size, :size])
        if not paths:
            continue
        total = log(sum(exp(score) for _, score in paths))
        log_prob[b] = total
        for path, score in paths:
            for t, vertex in enumerate(path):
                vertices[b, t, vertex] += exp(score - total)
                if t > 0:
                    counts[b, path[t - 1], vertex] += exp(score - total)
    return log_prob, vertices, counts


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("holes", [0.0, 0.3])
def test_marginal_and_its_gradient_equal_enumeration(seed: int, holes: float) -> None:
    match, links = batch(seed, holes)
    log_prob, vertices, counts = enumerated(match, links)
    match.requires_grad_()
    links.requires_grad_()
    result = dag_marginal(match, links, TARGETS, GRAPHS)
    torch.testing.assert_close(result, log_prob, rtol=1e-12, atol=1e-12)
    result.sum().backward()
    torch.testing.assert_close(match.grad, vertices, rtol=0, atol=1e-12)
    torch.testing.assert_close(links.grad, counts, rtol=0, atol=1e-12)
    assert result[IMPOSSIBLE] == -torch.inf


def posterior_agrees(posterior: Callable[[Tensor, Tensor], Tensor]) -> bool:
    """Whether a posterior is the enumerated one, for every sample of every batch."""
    for seed in range(3):
        match, links = batch(seed, holes=0.2)
        if not torch.allclose(posterior(match, links), enumerated(match, links)[1], rtol=0, atol=1e-10):
            return False
    return True


def test_posterior_equals_enumerated_paths() -> None:
    assert posterior_agrees(lambda match, links: dag_posterior(match, links, TARGETS, GRAPHS))


def test_counting_the_emission_twice_is_caught() -> None:
    """Negative control: alpha and beta both with the emission, which is what the released code computes."""
    assert not posterior_agrees(lambda match, links: dag_posterior(match, links, TARGETS, GRAPHS, variant="released"))


def test_a_band_off_by_one_is_caught() -> None:
    """Negative control: links shifted so that a jump takes the probability of the next longer one."""

    def shifted(match: Tensor, links: Tensor) -> Tensor:
        return dag_posterior(match, links.roll(-1, 2), TARGETS, GRAPHS)

    assert not posterior_agrees(shifted)


def test_released_posterior_is_the_posterior_times_the_emission() -> None:
    match, links = batch(0, holes=0.2)
    weighted = enumerated(match, links)[1] * match.nan_to_num(nan=0.0, neginf=-1e9).exp()
    total = weighted.sum(2, keepdim=True)
    expected = torch.where(total > 0, weighted / total.clamp_min(1e-300), 0.0)
    released = dag_posterior(match, links, TARGETS, GRAPHS, variant="released")
    torch.testing.assert_close(released, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("seed", range(4))
def test_best_alignment_is_the_likeliest_enumerated_path(seed: int) -> None:
    match, links = batch(seed, holes=0.2)
    alignment = dag_best_alignment(match, links, TARGETS, GRAPHS)
    for b, (tokens, size) in enumerate(zip(TARGETS.tolist(), GRAPHS.tolist(), strict=True)):
        paths = enumerated_paths(match[b, :tokens, :size], links[b, :size, :size])
        expected = torch.full((match.size(2),), -1)
        if paths:
            best = max(paths, key=lambda scored: scored[1])[0]
            expected[list(best)] = torch.arange(tokens)
        assert alignment[b].tolist() == expected.tolist()


def test_expected_states_are_the_mean_over_paths() -> None:
    match, links = batch(1)
    hidden = torch.randn(len(match), match.size(2), 3, dtype=torch.float64)
    states = expected_states(dag_posterior(match, links, TARGETS, GRAPHS), hidden)
    paths = enumerated_paths(match[0, :4], links[0])
    total = sum(exp(score) for _, score in paths)
    for t in range(4):
        mean = sum((exp(score) / total * hidden[0, path[t]] for path, score in paths), torch.zeros(3))
        torch.testing.assert_close(states[0, t], mean)


def test_enumeration_lists_every_path_once() -> None:
    assert all_paths(1, 1) == [(0,)]
    assert all_paths(1, 2) == all_paths(2, 1) == all_paths(3, 2) == []
    assert all_paths(2, 5) == [(0, 4)]
    assert all_paths(3, 5) == [(0, 1, 4), (0, 2, 4), (0, 3, 4)]
    assert len(all_paths(5, 9)) == 35
