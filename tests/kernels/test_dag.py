"""Compares the DAG's kernels with the torch implementation in float64, which other tests compare with enumeration."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreter import DEVICE  # before the kernels

from mmdec.kernels import dag_triton  # isort: skip
from tests.kernels.dag_cases import CASES, NEAR, difference, graph


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name: str) -> None:
    case = CASES[name]
    assert difference(dag_triton, case, seed=1) < NEAR[case.dtype]


def test_an_infinite_gradient_of_an_impossible_sample_is_dropped() -> None:
    match, links, last, ends = (part.to(DEVICE) for part in graph(CASES["one token of two vertices is impossible"]))
    match.requires_grad_()
    score = dag_triton.marginal_triton(match, links, last, ends)
    score.backward(torch.tensor([torch.inf, 1.0], device=DEVICE))
    assert match.grad is not None
    assert not match.grad[0].any()
    assert match.grad[1].any()


def test_best_alignment_takes_the_first_of_equal_paths() -> None:
    match, links = torch.zeros(1, 3, 5).to(DEVICE), torch.zeros(1, 5, 5).to(DEVICE)
    last, ends = torch.tensor([2]).to(DEVICE), torch.tensor([4]).to(DEVICE)
    path = dag_triton.best_alignment_triton(match, links, last, ends)
    assert path.tolist() == [[0, 1, -1, -1, 2]]
