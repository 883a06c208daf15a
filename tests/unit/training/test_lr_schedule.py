"""Learning-rate schedules as functions of the step; a prolonged run takes the new numbers."""

import pytest

from mmdec.training.optim import Schedule


def test_inverse_square_root():
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


def test_trapezoid_without_a_flat_part():
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
def test_no_warm_up(kind: str):
    assert Schedule(kind, warmup=0)(0) == 1.0  # type: ignore[arg-type]


def test_a_trapezoid_may_be_told_when_to_end():
    rate = Schedule("trapezoid", warmup=10).ending(40, 60)
    assert [rate(step) for step in (39, 40, 50, 60)] == pytest.approx([1.0, 1.0, 0.5, 0.0])
    later = rate.ending(50, 90)  # there is more time than was thought
    assert [later(step) for step in (50, 70, 90)] == pytest.approx([0.5, 0.25, 0.0])
    sooner = rate.ending(50, 55)
    assert [sooner(step) for step in (50, 55)] == pytest.approx([0.5, 0.0])
    assert rate.ending(60, 100) == rate
    assert rate.ending(45, 45) == rate
