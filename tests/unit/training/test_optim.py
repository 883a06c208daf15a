"""Tests Muon and AdamW as one optimiser: each parameter is updated once, with one learning rate, and the state can be
restored."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from mmdec.training.optim import MuonAdamW, Schedule


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def optimizer(model: nn.Module) -> MuonAdamW:
    return MuonAdamW.for_parameters(model.named_parameters(), lambda name, weight: True, lr=0.01, weight_decay=0.0)


def test_muon_takes_inner_matrices_and_frozen_ones_are_left_out():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 4))
    model[2].requires_grad_(False)
    both = MuonAdamW.for_parameters(model.named_parameters(), lambda name, weight: name.startswith("0"), 0.01, 0.1)
    (first, second, third) = both.param_groups
    assert [id(p) for p in first["params"]] == [id(model[0].weight)]
    assert [id(p) for p in second["params"]] == [id(model[1].weight)]
    assert [id(p) for p in third["params"]] == [id(model[0].bias), id(model[1].bias)]
    assert (first["weight_decay"], second["weight_decay"], third["weight_decay"]) == (0.1, 0.1, 0.0)


def step(model: nn.Module, optimizer: MuonAdamW, seed: int) -> None:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_both_groups_move_and_a_rate_of_zero_stops_them():
    model = network()
    both = optimizer(model)
    falling = LambdaLR(both, lambda at: 1.0 if at == 0 else 0.0)
    before = [p.detach().clone() for p in model.parameters()]
    step(model, both, 0)
    falling.step()
    moved = [p.detach().clone() for p in model.parameters()]
    assert all(not torch.equal(a, b) for a, b in zip(before, moved, strict=True))
    step(model, both, 1)
    assert all(torch.equal(a, b) for a, b in zip(moved, model.parameters(), strict=True))


def test_a_matrix_moves_as_far_in_each_direction():
    model = network()
    before = model[0].weight.detach().clone()
    step(model, optimizer(model), 0)
    sizes = torch.linalg.svdvals(model[0].weight.detach() - before) / (0.01 * 0.2 * 8**0.5)
    assert 0.6 < float(sizes[3]) <= float(sizes[0]) < 1.3  # the gradient has the rank of the outputs, four


def test_a_restored_optimizer_continues_identically():
    model = network()
    both = optimizer(model)
    for seed in range(3):
        step(model, both, seed)
    again = network()
    again.load_state_dict(model.state_dict())
    restored = optimizer(again)
    restored.load_state_dict(deepcopy(both.state_dict()))
    for seed in (7, 8):
        step(model, both, seed)
        step(again, restored, seed)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_the_rate_falls_by_the_inverse_square_root():
    rate = Schedule("inverse-sqrt", warmup=100)
    assert rate(0) == pytest.approx(0.01)
    assert rate(49) == pytest.approx(0.5)
    assert rate(99) == pytest.approx(1.0)
    assert rate(399) == pytest.approx(0.5)
    assert rate(9999) == pytest.approx(0.1)
    values = [rate(step) for step in range(500)]
    assert max(values) == values[99]


def test_trapezoid_is_flat_until_it_falls():
    rate = Schedule("trapezoid", warmup=10, decay_from=100, decay_steps=50)
    assert [rate(step) for step in (4, 9, 50, 100)] == pytest.approx([0.5, 1.0, 1.0, 1.0])
    assert rate(125) == pytest.approx(0.5)
    assert [rate(150), rate(10_000)] == [0.0, 0.0]
    assert Schedule("trapezoid", warmup=10)(1_000_000) == 1.0


def test_trapezoid_without_a_flat_part_falls_after_the_warm_up():
    rate = Schedule("trapezoid", warmup=5, decay_from=0, decay_steps=20)
    assert rate(0) == pytest.approx(0.2)
    assert rate(10) == pytest.approx(0.5)
    assert rate(20) == 0.0


def test_cosine_falls_from_the_end_of_the_warm_up():
    rate = Schedule("cosine", warmup=10, decay_steps=40)
    assert [rate(step) for step in (4, 9, 10, 20, 30, 50, 90)] == pytest.approx(
        [0.5, 1.0, 1.0, 0.5 + 0.5**1.5, 0.5, 0.0, 0.0]
    )


@pytest.mark.parametrize("kind", ["inverse-sqrt", "trapezoid", "cosine"])
def test_without_warm_up_the_rate_begins_at_one(kind: str):
    assert Schedule(kind, warmup=0)(0) == 1.0  # type: ignore[arg-type]


def test_a_trapezoid_ends_at_a_given_time():
    rate = Schedule("trapezoid", warmup=10).ending_at(40, 60)
    assert [rate(step) for step in (39, 40, 50, 60)] == pytest.approx([1.0, 1.0, 0.5, 0.0])
    later = rate.ending_at(50, 90)  # there is more time than was thought
    assert [later(step) for step in (50, 70, 90)] == pytest.approx([0.5, 0.25, 0.0])
    sooner = rate.ending_at(50, 55)
    assert [sooner(step) for step in (50, 55)] == pytest.approx([0.5, 0.0])
    assert rate.ending_at(60, 100) == rate
    assert rate.ending_at(45, 45) == rate
