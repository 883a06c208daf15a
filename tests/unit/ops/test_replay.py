"""Replays: plain calls where nothing is captured; where it is, as a graph does it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmdec.ops import replay
from mmdec.ops.replay import Replay
from tests.support.recorded_graphs import recorded_graphs


def test_a_function_is_called_where_nothing_is_captured() -> None:
    one, seen = Replay(), list[float]()

    def run(x: Tensor) -> tuple[Tensor]:
        seen.append(float(x))
        return (x + 1,)

    assert [float(one(run, (torch.tensor(value),))[0]) for value in (1.0, 2.0, 3.0, 4.0)] == [2, 3, 4, 5]
    assert seen == [1, 2, 3, 4]
    assert one.graph is None
    assert one.why_not is None


def test_a_captured_call_reads_its_inputs_and_nothing_else() -> None:
    """The stand-in's way, and a graph's: what Python decided stays, tensors are read and written where they lay."""
    held, weight = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])

    def adding(number: float) -> replay.Run:
        def run(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            held.copy_(x)
            return (x + y) * weight + number, held[:2]

        return run

    ones = torch.ones(3)
    with recorded_graphs() as graphs:
        one = Replay()
        assert one(adding(0), (ones, ones))[0].tolist() == [2, 4, 6]  # warms up
        first, view = one(adding(1), (ones, ones))
        assert first.tolist() == [3, 5, 7]
        assert one.graph is not None
        assert graphs.made == graphs.replayed == 1
        weight.mul_(2)
        again, _ = one(adding(5), (2 * ones, ones))
        assert again.tolist() == [7, 13, 19]
        assert first.tolist() == [7, 13, 19]  # the same memory
        assert view.tolist() == [2, 2]
        assert (graphs.made, graphs.replayed) == (1, 2)


def test_what_cannot_be_captured_is_called_and_says_why() -> None:
    def run(x: Tensor) -> tuple[Tensor]:
        return (x[x > float(x.sum()) / 4],)

    with recorded_graphs() as graphs:
        one = Replay()
        for _ in range(3):
            assert one(run, (torch.arange(4.0),))[0].tolist() == [2, 3]
        said = "its pass cannot be captured: operation not permitted when stream is capturing: _local_scalar_dense"
        assert one.why_not == said
        assert graphs.made == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_does_as_the_stand_in_does() -> None:
    held, weight = torch.zeros(3, device="cuda"), torch.tensor([1.0, 2.0, 3.0], device="cuda")

    def run(x: Tensor) -> tuple[Tensor, ...]:
        held.copy_(x)
        return (x * weight + 1,)

    one = Replay()
    for number in range(5):
        assert one(run, (torch.full((3,), float(number), device="cuda"),))[0].tolist() == [
            number + 1,
            2 * number + 1,
            3 * number + 1,
        ]
    assert held.tolist() == [4, 4, 4]
    assert one.graph is not None
    waiting, four = Replay(), torch.arange(4.0, device="cuda")
    for _ in range(4):
        assert waiting(lambda x: (x[x > float(x.sum()) / 4],), (four,))[0].tolist() == [2, 3]
    assert waiting.why_not is not None
