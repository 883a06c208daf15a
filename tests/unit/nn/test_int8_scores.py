"""The largest score of a large vocabulary, by a product of 8-bit integers with a proven bound."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmdec.nn.int8 import levels
from mmdec.nn.int8_scores import NEAR, Int8Scores
from mmdec.types import InputError

V, H = 3000, 96


def _kernel() -> bool:
    try:
        return levels() > 0
    except InputError:
        return False


pytestmark = pytest.mark.skipif(not _kernel(), reason="this CPU has no kernel for 8 bits")


def _layer(seed: int) -> tuple[Tensor, Tensor]:
    """Weights (V, H) and states (7, H) with an outlying channel, as Whisper's have."""
    generator = torch.Generator().manual_seed(seed)
    weight, states = (torch.randn(rows, H, generator=generator) for rows in (V, 7))
    states[:, 5] *= 250
    return weight / 16, states


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("rivals", [0.0, 1e-4, 1e-2])
def test_the_largest_score_is_float32_s(seed: int, rivals: float) -> None:
    weight, states = _layer(seed)
    best = (states @ weight.t()).argmax(1)
    for at, (row, state) in enumerate(zip(best.tolist(), states, strict=True)):  # a word that is better by so little
        weight[at] = weight[row] + rivals * state / state.norm() ** 2
    nobody = torch.zeros(V, dtype=torch.bool)
    found, wanted = Int8Scores(weight)(states, nobody, slice(V, None)), states @ weight.t()
    chosen = found.argmax(1, keepdim=True)
    assert (wanted.gather(1, chosen)[:, 0] >= wanted.amax(1) - 2e-5).all()
    if rivals == 1e-2:
        assert torch.equal(chosen[:, 0], wanted.argmax(1))
    assert (found.logsumexp(1) - wanted.logsumexp(1)).abs().max() < 0.05 + V * torch.tensor(-NEAR).exp()


@pytest.mark.parametrize("seed", range(4))
def test_words_that_are_barred_do_not_hide_the_largest_of_the_others(seed: int) -> None:
    weight, states = _layer(seed)
    wanted = states @ weight.t()
    barred = torch.zeros(V, dtype=torch.bool)
    barred[wanted.topk(40, 1).indices.flatten()] = True
    exact = slice(V - 200, None)
    barred[exact] = True
    found = Int8Scores(weight)(states, barred, exact)
    free = ~barred
    assert torch.equal(found[:, free].argmax(1), wanted[:, free].argmax(1))
    assert torch.allclose(found[:, exact], wanted[:, exact], atol=2e-5)
    assert (found[:, free].amax(1) - wanted[:, free].amax(1)).abs().max() < 2e-5


def test_each_score_lies_within_its_bound() -> None:
    weight, states = _layer(9)
    scores = Int8Scores(weight)
    found, bounds = scores._estimated(states)
    exact = states.double() @ weight.double().t()
    assert ((found - exact).abs() <= bounds).all()
    assert bounds.median() < 3 * (found - exact).abs().max()


def test_where_many_words_are_as_likely_all_scores_are_float32_s() -> None:
    weight, states = _layer(2)
    found = Int8Scores(weight)(states / 100, torch.zeros(V, dtype=torch.bool), slice(V, None))
    assert torch.allclose(found, states / 100 @ weight.t(), atol=1e-6)


def test_a_state_of_zeros_has_scores_of_zero() -> None:
    weight, _ = _layer(1)
    found = Int8Scores(weight)(torch.zeros(2, H), torch.zeros(V, dtype=torch.bool), slice(V, None))
    assert torch.equal(found, torch.zeros(2, V))
