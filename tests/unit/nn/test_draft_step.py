"""A draft network's step in NumPy against the network itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmdec.nn.draft_network import DraftNetwork
from mmdec.nn.draft_step import DraftStep
from tests.support.small_networks import WIDTH, network


def step_of(net: DraftNetwork, carry: Tensor | None = None, bias: bool = True) -> tuple[Any, nn.Embedding, nn.Linear]:
    torch.manual_seed(1)
    embedding, output = nn.Embedding(31, 24), nn.Linear(24, 31, bias=bias)
    return DraftStep.of(net, net.packed(), carry, embedding, output), embedding, output


@pytest.mark.parametrize(
    ("system", "changes"),
    [
        ("eagle", {}),
        ("eagle", {"layers": (0, 2, -1), "attention_bias": True, "fc_bias": False}),
        ("eagle", {"num_key_value_heads": 4, "input_norm": True, "rope_theta": 500.0}),
        ("msd", {"input_norm": True}),
        ("specvlm", {"input_norm": True}),
        ("vispec", {}),
        ("vispec", {"fc_bias": False}),
    ],
)
@torch.inference_mode()
def test_steps_are_the_networks(system: str, changes: dict[str, Any]) -> None:
    net = network(system, **changes)
    carry = torch.randn(1, 1, 24) if system == "vispec" else None
    step, embedding, output = step_of(net, carry, bias="layers" in changes)
    kept = [torch.randn(1, net.config.num_key_value_heads, WIDTH + 4, 8) for _ in range(2)]
    keys, values = (part.clone() for part in kept)
    feature = torch.randn(24)
    hidden = feature[None, None]
    for index, token in enumerate([5, 30, 0, 5]):
        position, end = WIDTH + index, WIDTH + index + 1
        states = net.fuse(embedding(torch.tensor([[token]])), net.feature(hidden), carry)
        queries, *own = net.project(states, position)
        for whole, column in zip(kept, own, strict=True):
            whole[:, :, position] = column[:, :, 0]
        hidden = net.attend(states, queries, kept[0][:, :, :end], kept[1][:, :, :end], None)
        feature = step(token, feature, position, keys[:, :, :end], values[:, :, :end]).copy()
        torch.testing.assert_close(torch.from_numpy(feature), hidden[0, 0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(torch.from_numpy(step.logits(feature)), output(hidden[0, 0]), rtol=1e-4, atol=1e-4)
        feature = torch.from_numpy(feature)
    torch.testing.assert_close((keys, values), tuple(kept), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_huge_numbers_are_no_warning() -> None:
    """Warnings are errors in the tests: an overflow of the exponential would be one."""
    net = network("eagle")
    net.layers[0].mlp.gate_proj.weight.mul_(1e4)  # type: ignore[union-attr, operator]
    step, _, _ = step_of(net)
    keys = torch.zeros(1, 2, 1, 8)
    assert torch.from_numpy(step(3, torch.randn(24), 0, keys, keys.clone())).isfinite().all()


@pytest.mark.parametrize("case", ["fc_norm", "flash", "double", "large", "scaled"])
def test_what_it_cannot_do_is_left_to_torch(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network("flash" if case == "flash" else "eagle", fc_norm=case == "fc_norm")
    embedding, output = nn.Embedding(31, 24), nn.Linear(24, 31, bias=False)
    if case == "double":
        for module in (net, embedding, output):
            module.double()
    if case == "large":
        monkeypatch.setattr("mmdec.nn.draft_network.SMALL", 100)
    if case == "scaled":

        class Scaled(nn.Embedding):
            """As of Gemma."""

        embedding = Scaled(31, 24)
    assert DraftStep.of(net, net.packed(), None, embedding, output) is None
