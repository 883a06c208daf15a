"""A draft network's step in NumPy against the network itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from mmdec.drafters.flash.cpu_step import SlotStep
from mmdec.drafters.flash.network import FlashNetwork
from mmdec.drafters.networks.draft_network import DraftNetwork
from tests.unit.drafters.networks.small_networks import WIDTH, network


def step_of(net: DraftNetwork, bias: bool = True) -> tuple[Any, nn.Embedding, nn.Linear]:
    torch.manual_seed(1)
    embedding, output = nn.Embedding(31, 24), nn.Linear(24, 31, bias=bias)
    return net.cpu_step(net.pack_weights(), embedding, output), embedding, output


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
        ("eagle3", {}),
        ("eagle3", {"norm_output": True, "attention_bias": True}),
        ("eagle3", {"norm_before_residual": True, "draft_vocab_size": 20, "fc_norm": True}),
    ],
)
@torch.inference_mode()
def test_cpu_steps_equal_the_network(system: str, changes: dict[str, Any]) -> None:
    net = network(system, **changes)
    if system == "vispec":
        net = net.condition_on(torch.randn(1, 1, 24))
    step, embedding, output = step_of(net, bias="layers" in changes)
    cache = [torch.randn(1, net.config.num_key_value_heads, WIDTH + 4, 8) for _ in range(2)]
    keys, values = (part.clone() for part in cache)
    feature = torch.randn(24)
    hidden = feature[None, None]
    for index, token in enumerate([5, 30, 0, 5]):
        position, end = WIDTH + index, WIDTH + index + 1
        states = net.fuse_drafted(embedding(torch.tensor([[token]])), hidden)
        queries, *own = net.layer(0).project(states, position)
        for whole, column in zip(cache, own, strict=True):
            whole[:, :, position] = column[:, :, 0]
        hidden = net.output_norm(net.layer(0).attend(states, queries, cache[0][:, :, :end], cache[1][:, :, :end]))
        feature = step(token, feature, position, keys[:, :, :end], values[:, :, :end]).copy()
        torch.testing.assert_close(torch.from_numpy(feature), hidden[0, 0], rtol=1e-4, atol=1e-4)
        logits = net.logits(hidden[0, 0], output)
        torch.testing.assert_close(torch.from_numpy(step.logits(feature)), logits, rtol=1e-4, atol=1e-4)
        assert step.token(7) == int(net.draft_vocabulary.token_ids(torch.tensor(7)))
        feature = torch.from_numpy(feature)
    torch.testing.assert_close((keys, values), tuple(cache), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_huge_numbers_do_not_warn() -> None:
    """Warnings are errors in the tests: an overflow of the exponential would be one."""
    net = network("eagle")
    net.layers[0].mlp.gate_proj.weight.mul_(1e4)  # type: ignore[union-attr, operator]
    step, _, _ = step_of(net)
    keys = torch.zeros(1, 2, 1, 8)
    assert torch.from_numpy(step(3, torch.randn(24), 0, keys, keys.clone())).isfinite().all()


@pytest.mark.parametrize(
    "changes", [{"qk_norm": True}, {"output_bias": True}, {"mask_token": 3}, {"num_hidden_layers": 2}]
)
def test_unsupported_eagle3_networks_have_no_cpu_step(changes: dict[str, Any]) -> None:
    assert step_of(network("eagle3", **changes))[0] is None


def odd_layers(case: str, net: DraftNetwork, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Embedding, nn.Linear]:
    """Return an embedding and an LM head with what neither step can do."""
    embedding, output = nn.Embedding(31, 24), nn.Linear(24, 31, bias=False)
    if case == "double":
        for module in (net, embedding, output):
            module.double()
    if case == "large":
        monkeypatch.setattr("mmdec.drafters.networks.layers.MAX_PACKED_WEIGHTS", 100)
    if case == "scaled":

        class Scaled(nn.Embedding):
            """Scales its embeddings, as Gemma does."""

        embedding = Scaled(31, 24)
    return embedding, output


@pytest.mark.parametrize("case", ["fc_norm", "flash", "double", "large", "scaled"])
def test_unsupported_networks_have_no_cpu_step(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network("flash" if case == "flash" else "eagle", fc_norm=case == "fc_norm")
    embedding, output = odd_layers(case, net, monkeypatch)
    assert net.cpu_step(net.pack_weights(), embedding, output) is None


CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4}


def slots_of(net: FlashNetwork, bias: bool = True) -> tuple[SlotStep | None, nn.Embedding, nn.Linear]:
    torch.manual_seed(1)
    embedding, output = nn.Embedding(31, 24), nn.Linear(24, 31, bias=bias)
    return SlotStep.for_network(net, net.pack_weights(), embedding, output), embedding, output


def flash(**changes: Any) -> FlashNetwork:
    net = network("flash", **changes)
    assert isinstance(net, FlashNetwork)
    return net


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "fc_bias": False},
        {"num_key_value_heads": 4, "input_norm": False, "rope_theta": 500.0},
        {"fc_norm": True, "slots": 1},
        {"slots": 7, "refine": False, "bottleneck": 3},
    ],
)
@pytest.mark.parametrize(("tokens", "begin"), [([5], 0), ([5, 30, 0, 5], 40), ([7, 7], WIDTH)])
@torch.inference_mode()
def test_cpu_blocks_equal_the_network(changes: dict[str, Any], tokens: list[int], begin: int) -> None:
    """At any number of slots; what lies in the cache before the new columns stays."""
    net = flash(**changes)
    step, embedding, output = slots_of(net, bias="slots" in changes)
    assert step is not None
    features = torch.randn(len(tokens), 24)
    states = net.fuse(embedding(torch.tensor(tokens)), features)
    for count in {1, 2, net.slots} - set(range(net.slots + 1, 3)):
        order = torch.cat([states, net.slot_states(states[-1])[1:count]])[None]  # each sees what stands before it
        own = len(tokens) + count - 1
        queries, *pair = net.layer(0).project(order, torch.arange(begin, begin + own)[None])
        past = [torch.randn(1, net.config.num_key_value_heads, begin, 8) for _ in range(2)]
        expected = tuple(torch.cat(parts, 2) for parts in zip(past, pair, strict=True))
        hidden = net.layer(0).attend(order, queries, *expected, None)[0, -count:]
        room = [torch.cat([part, torch.full_like(new, torch.nan)], 2) for part, new in zip(past, pair, strict=True)]
        result = step.block(tokens, features.numpy(), begin, count, room[0], room[1])
        torch.testing.assert_close(torch.from_numpy(result), net.finish(hidden, features[-1]), **CLOSE)
        torch.testing.assert_close(tuple(room), expected, **CLOSE)
        logits = torch.from_numpy(step.logits(result[-1]))
        torch.testing.assert_close(logits, output(torch.from_numpy(result[-1])), **CLOSE)


@pytest.mark.parametrize("refine", [True, False])
@torch.inference_mode()
def test_cpu_refiners_equal_the_network(refine: bool) -> None:
    net = flash(refine=refine)
    step, _, _ = slots_of(net)
    assert step is not None
    slots, embedded = torch.randn(4, 24), torch.randn(4, 24)
    result = [step.refine_slot(slots[i].numpy(), embedded[i].numpy(), i) for i in range(1, 4)]
    for i in range(1, 4):  # a later one leaves the earlier ones as they were
        torch.testing.assert_close(torch.from_numpy(result[i - 1]), net.refine_slot(slots[i], embedded[i], i), **CLOSE)


@torch.inference_mode()
def test_a_longer_text_has_a_longer_mask_and_more_rotations() -> None:
    net = flash()
    step, again = slots_of(net)[0], slots_of(net)[0]
    assert step is not None
    assert again is not None
    features = np.random.default_rng(0).standard_normal((1, 24), np.float32)
    for begin in (3, 600, 5000, 3):
        keys, values = torch.randn(2, 1, 2, begin + 4, 8, generator=torch.Generator().manual_seed(begin))
        result = step.block([9], features, begin, 4, keys, values)
        fresh = again.block([9], features, begin, 4, keys.clone(), values.clone())
        assert np.isfinite(result).all()
        assert np.array_equal(result, fresh)
        again = slots_of(net)[0]
        assert again is not None


@torch.inference_mode()
def test_huge_numbers_in_slots_do_not_warn() -> None:
    """Warnings are errors in the tests."""
    net = flash()
    net.layers[0].mlp.gate_proj.weight.mul_(1e4)  # type: ignore[union-attr, operator]
    net.fc_gate.weight.mul_(1e4)
    step, _, _ = slots_of(net)
    assert step is not None
    keys = torch.zeros(1, 2, 4, 8)
    assert np.isfinite(step.block([3], np.ones((1, 24), np.float32), 0, 4, keys, keys.clone())).all()


@pytest.mark.parametrize("case", ["double", "large", "scaled"])
def test_unsupported_slots_have_no_cpu_step(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = flash()
    embedding, output = odd_layers(case, net, monkeypatch)
    assert SlotStep.for_network(net, net.pack_weights(), embedding, output) is None


def test_gradients_and_autocast_are_left_to_torch() -> None:
    step, _, _ = slots_of(flash())
    assert step is not None
    features = torch.randn(1, 1, 24)
    assert not step.can_read(features)
    with torch.no_grad():
        assert step.can_read(features)
        assert not step.can_read(features.double())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert not step.can_read(features)
