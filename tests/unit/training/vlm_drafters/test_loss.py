"""Losses agree with naive references of a few lines, in one piece and in many, gradients included."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mmdec.training.vlm_drafters.module import Weights, losses
from mmdec.types import InputError

ALL = Weights(1.0, 0.1, 10.0, 0.1)


def naive(said: Tensor, wanted: Tensor, head: Tensor) -> dict[str, float]:
    """Place by place, token by token."""
    sums = dict.fromkeys(("features", "tokens", "distribution", "ranks", "right"), 0.0)
    for a, b in zip(said.tolist(), wanted.tolist(), strict=True):
        gaps = [abs(x - y) for x, y in zip(a, b, strict=True)]
        sums["features"] += sum(0.5 * g * g if g < 1 else g - 0.5 for g in gaps) / len(gaps)
        own, theirs = (
            [sum(w * x for w, x in zip(row, place, strict=True)) for row in head.tolist()] for place in (a, b)
        )
        q, p = ([math.exp(x) / sum(map(math.exp, row)) for x in row] for row in (own, theirs))
        sums["tokens"] -= sum(y * math.log(x) for x, y in zip(q, p, strict=True))
        sums["distribution"] += sum(abs(x - y) for x, y in zip(q, p, strict=True))
        best = sorted(range(len(theirs)), key=lambda token: -theirs[token])[:10]
        for place, token in enumerate(best):
            sums["ranks"] -= own[token] - math.log(sum(math.exp(own[other]) for other in best[place:]))
        sums["right"] += own.index(max(own)) == best[0]
    return {name: value / len(said) for name, value in sums.items()}


@pytest.mark.parametrize("cells", [1 << 20, 40])
def test_losses_are_the_naive_ones(cells: int) -> None:
    torch.manual_seed(0)
    said, wanted, head = torch.randn(7, 6).requires_grad_(), torch.randn(7, 6), torch.randn(20, 6)
    found = losses(said, wanted, lambda states: states @ head.T, ALL, cells)
    reference = naive(said, wanted, head)
    for name, value in reference.items():
        assert float(found[name].detach()) == pytest.approx(value, rel=1e-4), name
    total = sum(getattr(ALL, name) * reference[name] for name in vars(ALL))
    assert float(found["loss"].detach()) == pytest.approx(total, rel=1e-4)


def test_pieces_have_the_gradient_of_the_whole() -> None:
    torch.manual_seed(1)
    wanted, head = torch.randn(9, 6).double(), torch.randn(20, 6).double()
    gradients = []
    for cells in (1 << 20, 60):
        torch.manual_seed(2)
        said = torch.randn(9, 6).double().requires_grad_()
        losses(said, wanted, lambda states: states @ head.T, ALL, cells)["loss"].backward()
        gradients.append(said.grad)
    torch.testing.assert_close(*gradients)


def test_what_weighs_nothing_is_not_shown() -> None:
    said = torch.randn(3, 4)
    found = losses(said, said, lambda states: states @ torch.eye(4), Weights())
    assert set(found) == {"loss", "features", "tokens", "right"}
    assert float(found["features"]) == 0.0
    assert float(found["right"]) == 1.0


@pytest.mark.parametrize("wrong", [{"features": -1.0}, {"features": 0.0, "tokens": 0.0}])
def test_weights_that_train_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="`weights` must be"):
        Weights(**wrong)
