"""Compares the fast DAG operations with simple ones, also for extreme and invalid inputs."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmdec.errors import InputError
from mmdec.kernels import dag, dag_scan_cpu
from mmdec.kernels.dag import dag_best_alignment, dag_marginal, dag_posterior, expected_states
from tests.support.naive_dag import INF, naive_marginal, path_score, random_graph


def gradients(match: Tensor, links: Tensor, *lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log P, and the gradients of the sum of log P over the possible samples."""
    match, links = match.detach().clone().requires_grad_(), links.detach().clone().requires_grad_()
    result = dag_marginal(match, links, *lengths)
    result[result.isfinite()].sum().backward()
    assert match.grad is not None
    assert links.grad is not None
    return result.detach(), match.grad, links.grad


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 6),
    size=st.integers(1, 9),
    seed=st.integers(0, 10**6),
    scale=st.sampled_from([0.1, 1.0, 10.0, 300.0]),
    holes=st.sampled_from([0.0, 0.1, 0.4]),
)
@example(batch=1, tokens=2, size=8, seed=18811, scale=300.0, holes=0.0)  # a link's count overflowed
def test_agrees_with_the_naive_recursion(
    batch: int, tokens: int, size: int, seed: int, scale: float, holes: float
) -> None:
    match, links, targets, graphs = random_graph(batch, tokens, size, seed, scale=scale, holes=holes)
    result, match_grad, links_grad = gradients(match, links, targets, graphs)
    for b, (m, n) in enumerate(zip(targets.tolist(), graphs.tolist(), strict=True)):
        own_match, own_links = match[b, :m, :n].clone().requires_grad_(), links[b, :n, :n].clone().requires_grad_()
        expected = naive_marginal(own_match, own_links)
        torch.testing.assert_close(result[b], expected.detach(), rtol=1e-10, atol=1e-10)
        expected_match, expected_links = torch.zeros_like(match[b]), torch.zeros_like(links[b])
        if expected.requires_grad:
            grads = torch.autograd.grad(expected, [own_match, own_links], materialize_grads=True)
            expected_match[:m, :n], expected_links[:n, :n] = grads
        torch.testing.assert_close(match_grad[b], expected_match, rtol=0, atol=1e-9)
        torch.testing.assert_close(links_grad[b], expected_links, rtol=0, atol=1e-9)
        # The posterior is a distribution over vertices for each token of a possible sample, and nothing elsewhere.
        possible = expected > -INF
        for variant in ("paper", "released"):
            posterior = dag_posterior(match, links, targets, graphs, variant=variant)[b]
            torch.testing.assert_close(posterior[:m].sum(1), torch.full((m,), float(possible), dtype=torch.float64))
            assert not posterior[m:].any()
            assert not posterior[:, n:].any()


def test_gradients_of_the_marginal_equal_finite_differences() -> None:
    match, links, _, _ = random_graph(2, 3, 5)
    targets, graphs = torch.tensor([3, 2]), torch.tensor([5, 4])

    def marginal(match: Tensor, links: Tensor) -> Tensor:
        return dag_marginal(match, links, targets, graphs)

    match.requires_grad_()
    finite_links = links.masked_fill(links == -INF, 0.0).requires_grad_()
    assert torch.autograd.gradcheck(marginal, (match, finite_links))


def test_padding_changes_nothing() -> None:
    match, links, targets, graphs = random_graph(4, 5, 9)
    wide_match = torch.full((4, 8, 14), torch.nan, dtype=torch.float64)
    wide_links = torch.full((4, 14, 14), torch.nan, dtype=torch.float64)
    wide_match[:, :5, :9], wide_links[:, :9, :9] = match, links
    result, match_grad, links_grad = gradients(match, links, targets, graphs)
    wide_result, wide_match_grad, wide_links_grad = gradients(wide_match, wide_links, targets, graphs)
    torch.testing.assert_close(wide_result, result, rtol=1e-13, atol=0)
    torch.testing.assert_close(wide_match_grad[:, :5, :9], match_grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(wide_links_grad[:, :9, :9], links_grad, rtol=1e-12, atol=1e-14)
    assert not wide_match_grad[:, 5:].any()
    assert not wide_match_grad[:, :, 9:].any()
    assert not wide_links_grad[:, 9:].any()
    assert not wide_links_grad[:, :, 9:].any()
    alignment = dag_best_alignment(wide_match, wide_links, targets, graphs)
    assert torch.equal(alignment[:, :9], dag_best_alignment(match, links, targets, graphs))
    # One by one gives what the batch gives.
    for b, (m, n) in enumerate(zip(targets.tolist(), graphs.tolist(), strict=True)):
        single = dag_marginal(match[b : b + 1, :m, :n], links[b : b + 1, :n, :n], targets[b : b + 1], graphs[b : b + 1])
        torch.testing.assert_close(single[0], result[b], rtol=1e-13, atol=0)


def test_ends_are_fixed_and_forbidden_entries_get_no_gradient() -> None:
    match, links, targets, graphs = random_graph(6, 4, 9, holes=0.1, seed=3)
    targets, graphs = targets.clamp(min=2), graphs.clamp(min=5)
    links[:, torch.ones(9, 9).tril().bool()] = 1.0  # backwards and in place: ignored, whatever they hold
    result, match_grad, links_grad = gradients(match, links, targets, graphs)
    assert result.isfinite().sum() >= 4
    for b in result.isfinite().nonzero().squeeze(1).tolist():
        torch.testing.assert_close(match_grad[b, 0, 0].item(), 1.0)
        torch.testing.assert_close(match_grad[b, targets[b] - 1, graphs[b] - 1].item(), 1.0)
        assert not match_grad[b, 0, 1:].any()
        assert not match_grad[b, targets[b] - 1, : graphs[b] - 1].any()
    assert not match_grad[match == -INF].any()
    assert not links_grad[links == -INF].any()
    assert not links_grad[:, torch.ones(9, 9).tril().bool()].any()


def test_impossible_samples_give_minus_infinity_and_no_gradient() -> None:
    match, links, _, _ = random_graph(6, 4, 6)
    targets = torch.tensor([4, 4, 1, 4, 4, 4])
    graphs = torch.tensor([3, 6, 6, 6, 6, 6])  # 0: too short; 2: one token, six vertices
    match[1, 0, 0] = -INF  # the first vertex cannot emit the first token
    links[3, :, 5] = -INF  # nothing leads to the last vertex
    match[4] = -INF
    match.requires_grad_()
    links.requires_grad_()
    result = dag_marginal(match, links, targets, graphs)
    assert result.isfinite().tolist() == [False, False, False, False, False, True]
    (-result).backward(torch.full((6,), INF).double().masked_fill(result.detach().isfinite(), 1.0))
    assert match.grad is not None
    assert links.grad is not None
    assert not match.grad[:5].any()
    assert not links.grad[:5].any()
    assert match.grad[5].isfinite().all()
    assert match.grad[5].any()
    assert (dag_best_alignment(match, links, targets, graphs)[:5] == -1).all()
    for variant in ("paper", "released"):
        posterior = dag_posterior(match, links, targets, graphs, variant=variant)
        assert posterior.isfinite().all()
    assert not dag_posterior(match, links, targets, graphs)[:5].any()


def test_float32_and_half_precision_agree_with_float64() -> None:
    match, links, targets, graphs = random_graph(4, 40, 200, scale=3.0)
    graphs = graphs.clamp(min=80)
    result, match_grad, links_grad = gradients(match, links, targets, graphs)
    single, single_match_grad, single_links_grad = gradients(match.float(), links.float(), targets, graphs)
    assert single.dtype == single_match_grad.dtype == single_links_grad.dtype == torch.float32
    torch.testing.assert_close(single.double(), result, rtol=1e-6, atol=0)
    torch.testing.assert_close(single_match_grad.double(), match_grad, rtol=0, atol=2e-5)
    torch.testing.assert_close(single_links_grad.double(), links_grad, rtol=0, atol=2e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(dag_marginal(match.float(), links.float(), targets, graphs), single)
    half, half_match_grad, _ = gradients(match.bfloat16(), links.bfloat16(), targets, graphs)
    assert half.dtype == torch.float32
    assert half_match_grad.dtype == torch.bfloat16
    torch.testing.assert_close(half.double(), result, rtol=0.01, atol=0)


def detour(depth: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a graph whose prefixes shine on vertices that lead nowhere, `depth` below the peak of each step."""
    match = torch.zeros(1, 5, 9, dtype=torch.float64)
    links = torch.zeros(1, 9, 9, dtype=torch.float64)
    match[0, 1:4, 1:4] = -depth  # the only way through: vertices 1, 2, 3
    links[0, 4:8, 8] = -INF  # the tempting vertices 4 to 7 do not reach the end
    return match, links, torch.tensor([5]), torch.tensor([9])


def test_underflow_of_the_scaled_pass_is_recomputed() -> None:
    for depth, expected in ((1.0, True), (100.0, True), (400.0, False), (5000.0, False)):
        match, links, targets, graphs = detour(depth)
        inputs = (*dag.mask_inputs(match, links, targets - 1, graphs - 1), targets - 1, graphs - 1)
        fast, trusted = dag.scaled_scan(*inputs)
        assert trusted.item() is expected
        truth = naive_marginal(match[0], links[0])
        torch.testing.assert_close(dag_marginal(match, links, targets, graphs)[0], truth, rtol=1e-12, atol=0)
        posterior = dag_posterior(match, links, targets, graphs)
        torch.testing.assert_close(posterior.sum(2), torch.ones(1, 5, dtype=torch.float64))
        assert fast.log_prob[0].isclose(truth).item() is expected  # negative control: unguarded, it is wrong


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([1.0, 30.0, 100.0, 300.0, 1000.0]))
@example(seed=17666, scale=300.0)  # log P was right, and a token lost the vertex that it sits on
def test_trusted_samples_equal_the_log_space_pass(seed: int, scale: float) -> None:
    match, links, targets, graphs = random_graph(4, 8, 14, seed, scale=scale, holes=0.2)
    inputs = (*dag.mask_inputs(match, links, targets - 1, graphs - 1), targets - 1, graphs - 1)
    fast, trusted = dag.scaled_scan(*inputs)
    slow = dag.log_space_scan(*inputs)
    torch.testing.assert_close(fast.log_prob[trusted], slow.log_prob[trusted], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(fast.vertices[trusted], slow.vertices[trusted], rtol=0, atol=1e-10)
    torch.testing.assert_close(fast.links[trusted], slow.links[trusted], rtol=0, atol=1e-10)


@pytest.mark.parametrize("vertices", [True, False])
@pytest.mark.parametrize(("tokens", "size"), [(1, 1), (1, 5), (2, 2), (4, 4), (5, 20), (9, 300), (30, 140)])
@pytest.mark.parametrize("scale", [0.1, 1.0, 8.0, 40.0])
def test_one_sample_on_a_cpu_equals_the_log_space_pass(tokens: int, size: int, scale: float, vertices: bool) -> None:
    """Whatever lies below the diagonal; states that fall fast, and those that no scaling holds."""
    match, links, targets, graphs = random_graph(1, tokens, size, tokens + size, scale=scale)
    last, ends = targets - 1, graphs - 1
    slow = dag.log_space_scan(*dag.mask_inputs(match, links, last, ends), last, ends)
    rubbish = torch.where(torch.ones(size, size, dtype=torch.bool).tril(), INF * torch.randn(size, size), links[0])
    fast = dag_scan_cpu.scan(match[0], rubbish, vertices=vertices, counts=vertices)
    if fast is None:
        assert scale > 1 or slow.log_prob.isinf()
        return
    assert fast.log_prob == pytest.approx(float(slow.log_prob), rel=1e-12, abs=1e-12)
    if vertices:
        assert fast.vertices is not None
        assert fast.links is not None
        torch.testing.assert_close(fast.vertices, slow.vertices[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(fast.links, slow.links[0], rtol=0, atol=1e-10)


def test_underflow_between_two_peaks_is_scanned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emissions on a path that every other one avoids: a state loses e^-50 at each step."""
    match, _links, targets, graphs = random_graph(1, 12, 12, 3)
    match = match - 50 * torch.eye(12, dtype=torch.float64)
    match[0, :, 11] = 0.0
    seen, run = list[int](), dag_scan_cpu._run

    def listen(
        windows: Tensor, emission: Tensor, arrivals: Tensor | None, every: int = dag_scan_cpu.STEPS_PER_RESCALE
    ) -> object:
        seen.append(every)
        return run(windows, emission, arrivals, every)

    monkeypatch.setattr(dag_scan_cpu, "_run", listen)
    wide = torch.cat([match, match.new_full((1, 12, 4), 0.0)], 2)
    wide_links = torch.full((1, 16, 16), -40.0, dtype=torch.float64)
    last, ends = targets - 1, graphs + 3
    slow = dag.log_space_scan(*dag.mask_inputs(wide, wide_links, last, ends), last, ends)
    fast = dag_scan_cpu.scan(wide[0], wide_links[0], vertices=True, counts=True)
    assert seen.count(1) == 2
    assert fast is not None
    assert fast.log_prob == pytest.approx(float(slow.log_prob), rel=1e-12)
    torch.testing.assert_close(fast.vertices, slow.vertices[0], rtol=0, atol=1e-10)


def test_best_alignment_is_a_path_and_no_sampled_path_beats_it() -> None:
    match, links, targets, graphs = random_graph(4, 12, 40, seed=5)
    graphs = graphs.clamp(min=20)
    targets = targets.clamp(min=2)
    alignment = dag_best_alignment(match, links, targets, graphs)
    generator = torch.Generator().manual_seed(0)
    for b, (m, n) in enumerate(zip(targets.tolist(), graphs.tolist(), strict=True)):
        path = (alignment[b] >= 0).nonzero().squeeze(1).tolist()
        assert path[0] == 0
        assert path[-1] == n - 1
        assert alignment[b, path].tolist() == list(range(m))
        best = path_score(tuple(path), match[b], links[b])
        for _ in range(200):
            inner = (torch.randperm(n - 2, generator=generator)[: m - 2] + 1).sort().values.tolist()
            assert path_score((0, *inner, n - 1), match[b], links[b]) <= best + 1e-12


def test_expected_states_carry_gradient_to_the_hidden_states_alone() -> None:
    match, links, targets, graphs = random_graph(3, 4, 7)
    graphs = graphs.clamp(min=4)
    match.requires_grad_()
    hidden = torch.randn(3, 7, 5, requires_grad=True)
    states = expected_states(dag_posterior(match, links, targets, graphs), hidden)
    assert states.shape == (3, 4, 5)
    assert states.dtype == torch.float32
    states.sum().backward()
    assert hidden.grad is not None
    assert match.grad is None
    with pytest.raises(InputError, match="`posterior` and `hidden` must be"):
        expected_states(torch.zeros(3, 4, 7), torch.zeros(3, 6, 5))


def test_wrong_inputs_are_named() -> None:
    match, links, targets, graphs = random_graph(3, 4, 7)
    cases = {
        r"`match` must be .* shape \(4, 7\)": (match[0], links, targets, graphs),
        r"`match` must be .* torch.int64": (match.long(), links, targets, graphs),
        r"`links` must have shape \(3, 7, 7\), but has \(3, 7, 6\)": (match, links[:, :, :6], targets, graphs),
        r"`links` must hold floating-point": (match, links.isfinite(), targets, graphs),
        r"`target_lengths` must be 3 integers": (match, links, targets[:2], graphs),
        r"`graph_lengths` must be 3 integers, but is torch.float32": (match, links, targets, graphs.float()),
        r"`target_lengths` must be between 1 and 4, but ranges from 5 to 5": (match, links, targets * 0 + 5, graphs),
        r"`graph_lengths` must be between 1 and 7, but ranges from 0 to 0": (match, links, targets, graphs * 0),
    }
    for message, arguments in cases.items():
        for operation in (dag_marginal, dag_posterior, dag_best_alignment):
            with pytest.raises(InputError, match=message):
                operation(*arguments)
    with pytest.raises(InputError, match='`variant` must be "paper" or "released"'):
        dag_posterior(match, links, targets, graphs, variant="both")  # pyright: ignore[reportArgumentType]
