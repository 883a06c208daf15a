"""Compares the DAG's scan by vertices with the log-space pass: over several blocks, with rescaling, and with values
outside the range of a scale."""

import numpy as np
import pytest
import torch
from torch import Tensor

from mmdec.ops import dag, dag_scan_cpu
from mmdec.ops.dag_scan_cpu import Sample
from tests.support.naive_dag import random_graph

SHAPES = [(1, 1), (1, 4), (2, 2), (2, 5), (5, 5), (5, 20), (3, 120), (40, 41), (40, 130), (100, 101), (60, 200)]


def both(tokens: int, size: int, scale: float, holes: float, vertices: bool) -> tuple[Sample | None, dag.Posterior]:
    """By vertices, with rubbish below the diagonal, and in log space."""
    match, links, targets, graphs = random_graph(1, tokens, size, tokens + size, scale=scale, holes=holes)
    last, ends = targets - 1, graphs - 1
    slow = dag.exact(*dag.masked_inputs(match, links, last, ends), last, ends)
    below = torch.ones(size, size, dtype=torch.bool).tril()
    rubbish = torch.where(below, torch.inf * torch.randn(size, size), links[0])
    weights, link_top = dag_scan_cpu._exponentiated(rubbish)
    with np.errstate(all="ignore"):
        fast = dag_scan_cpu.scan_vertices(match[0], weights, link_top, vertices=vertices, counted=vertices)
    return fast, slow


def agree(fast: Sample, slow: dag.Posterior) -> None:
    assert fast.log_prob == pytest.approx(float(slow.log_prob), rel=1e-12, abs=1e-12)
    if fast.vertices is not None:
        assert fast.links is not None
        torch.testing.assert_close(fast.vertices, slow.vertices[0], rtol=0, atol=1e-10)
        torch.testing.assert_close(fast.links, slow.links[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("block", [dag_scan_cpu.BLOCK, 7])
@pytest.mark.parametrize("vertices", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_trusted_equals_the_log_space_pass(
    shape: tuple[int, int], vertices: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dag_scan_cpu, "BLOCK", block)
    for scale, holes in ((0.1, 0.0), (1.0, 0.0), (1.0, 0.2), (3.0, 0.0), (20.0, 0.0), (20.0, 0.2), (40.0, 0.0)):
        fast, slow = both(*shape, scale, holes, vertices)
        possible = bool(slow.log_prob.isfinite())
        assert fast is not None or not possible or scale > 1
        assert fast is None or possible
        if fast is not None:
            assert (fast.vertices is not None) == vertices
            agree(fast, slow)


@pytest.mark.parametrize("scale", [3.0, 8.0])
def test_units_change_on_the_way(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    found, units = list[float](), dag_scan_cpu._units

    def listen(peaks: np.ndarray) -> np.ndarray:
        found.append(float(peaks.max()))
        return units(peaks)

    monkeypatch.setattr(dag_scan_cpu, "_units", listen)
    monkeypatch.setattr(dag_scan_cpu, "BLOCK", 16)
    fast, slow = both(60, 300, scale, 0.0, True)
    assert len(found) > 2
    assert fast is not None
    agree(fast, slow)


def test_what_was_lost_before_a_change_of_units_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """States that fall below every number within the first block, and units that suit them afterwards."""
    monkeypatch.setattr(dag_scan_cpu, "BLOCK", 96)
    fast, slow = both(40, 130, 20.0, 0.0, True)
    assert fast is None
    last, ends = torch.tensor([39]), torch.tensor([129])
    match, links, _, _ = random_graph(1, 40, 130, 170, scale=20.0)
    whole = dag.forward_backward(match, links, last, ends)
    torch.testing.assert_close(whole.log_prob, slow.log_prob, rtol=1e-12, atol=0)
    torch.testing.assert_close(whole.vertices, slow.vertices, rtol=0, atol=1e-10)
    torch.testing.assert_close(whole.links, slow.links, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("tokens", "size", "by_tokens"), [(5, 300, True), (20, 60, True), (60, 480, False)])
def test_the_cheaper_order_is_taken_and_both_agree(
    tokens: int, size: int, by_tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    match, links, _, _ = random_graph(1, tokens, size)
    taken = list[str]()
    for name in ("scan_vertices", "_scan_tokens"):

        def listen(
            *inputs: Tensor, name: str = name, run: object = getattr(dag_scan_cpu, name), **wanted: bool
        ) -> object:
            taken.append(name)
            assert callable(run)
            return run(*inputs, **wanted)

        monkeypatch.setattr(dag_scan_cpu, name, listen)
    first = dag_scan_cpu.scan(match[0], links[0], vertices=True, counted=True)
    assert taken == ["_scan_tokens" if by_tokens else "scan_vertices"]
    monkeypatch.setattr(dag_scan_cpu, "_few_tokens", lambda *_shape: not by_tokens)
    second = dag_scan_cpu.scan(match[0], links[0], vertices=True, counted=True)
    assert len(set(taken)) == 2
    assert first is not None
    assert second is not None
    assert first.vertices is not None
    assert first.links is not None
    assert first.log_prob == pytest.approx(second.log_prob, rel=1e-13)
    torch.testing.assert_close(first.vertices, second.vertices, rtol=0, atol=1e-12)
    torch.testing.assert_close(first.links, second.links, rtol=0, atol=1e-12)
