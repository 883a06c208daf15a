"""Tests EAGLE's network against transformers' layer, against a simple reference, and run in several ways."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from mmdec.drafters.eagle.eagle import Eagle
from mmdec.drafters.networks.config import DraftConfig
from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.drafters.registry import network_class
from mmdec.errors import InputError
from tests.unit.drafters.networks.small_networks import SHAPE


def network(**changes: Any) -> DraftNetwork:
    torch.manual_seed(0)
    made = Eagle(DraftConfig(**{**SHAPE, **changes})).double().eval()
    for name, weight in made.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return made


def inputs(batch: int = 2, length: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    embeds, features = torch.randn(2, batch, length, 24, generator=generator, dtype=torch.float64)
    return embeds, features


def rows(net: DraftNetwork, embeds: Tensor, features: Tensor) -> Tensor:
    """Return whole texts at once: (B, L - 1, H)."""
    states = net.fuse(embeds[:, 1:], features[:, :-1])
    return net(states, torch.arange(states.shape[1]).expand(len(states), -1))[0]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_the_layer_equals_llamas(bias: bool, packed: bool) -> None:
    net = network(input_norm=True, attention_bias=bias, rope_theta=500.0)
    config = LlamaConfig(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 500.0}, attention_bias=bias)
    config._attn_implementation = "eager"
    theirs = LlamaDecoderLayer(config, 0).double().eval()
    state = net.layers[0].state_dict()
    if bias:
        state["self_attn.o_proj.bias"] = torch.zeros(24, dtype=torch.float64)
    theirs.load_state_dict(state)
    states, positions = inputs()[0], torch.arange(3, 12).expand(2, -1)
    wave = LlamaRotaryEmbedding(config)(states, positions)
    mask = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        expected: Any = theirs(states, attention_mask=mask, position_embeddings=wave)
        weights = net.pack_weights() if packed else None
        queries, keys, values = net.layer(0).project(states, positions, weights)
        result = net.layer(0).attend(states, queries, keys, values, None, weights)
    torch.testing.assert_close(result, expected[0] if isinstance(expected, tuple) else expected)


def test_a_step_equals_eagle_written_out() -> None:
    """fc([embedding of t + 1; feature of t]), attention with no norm before it, MLP behind one, no norm at the end."""
    net = network(num_key_value_heads=4)
    embeds, features = inputs(1)
    weights: Any = net.layers[0]
    x = torch.cat([embeds[0, 1:], features[0, :-1]], -1) @ net.fc.weight.T + net.fc.bias

    def heads(name: str) -> Tensor:
        return (x @ getattr(weights.self_attn, name).weight.T).view(8, 4, 8).transpose(0, 1)

    def rotate(states: Tensor) -> Tensor:
        angles = torch.arange(8)[:, None] * 10000.0 ** -(torch.arange(4) / 4)
        first, second = states[..., :4], states[..., 4:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        )

    scores = rotate(heads("q_proj")) @ rotate(heads("k_proj")).transpose(1, 2) / 8**0.5
    scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf)
    mixed = (scores.softmax(-1) @ heads("v_proj")).transpose(0, 1).reshape(8, 32)
    x = x + mixed @ weights.self_attn.o_proj.weight.T
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights.post_attention_layernorm.weight
    gate, up = normed @ weights.mlp.gate_proj.weight.T, normed @ weights.mlp.up_proj.weight.T
    expected = x + (gate * gate.sigmoid() * up) @ weights.mlp.down_proj.weight.T
    torch.testing.assert_close(rows(net, embeds, features)[0], expected, atol=1e-6, rtol=1e-6)


def test_batched_columns_equal_sequential_columns() -> None:
    net = network(fc_norm=True)
    embeds, features = inputs()
    whole = rows(net, embeds, features)
    states, past = net.fuse(embeds[:, 1:], features[:, :-1]), None
    for begin, end in ((0, 3), (3, 4), (4, 8)):
        hidden, pair = net(states[:, begin:end], torch.arange(begin, end).expand(2, -1), past)
        past = pair if past is None else (torch.cat([past[0], pair[0]], 2), torch.cat([past[1], pair[1]], 2))
        torch.testing.assert_close(hidden, whole[:, begin:end])


def test_training_reaches_every_weight() -> None:
    net = network(fc_norm=True, input_norm=True)
    embeds, features = inputs()
    with torch.inference_mode():
        rows(net, embeds, features)  # what decoding leaves behind must not disturb
    rows(net, embeds, features).square().sum().backward()
    for name, weight in net.named_parameters():
        assert weight.grad is not None, name
        assert bool(weight.grad.any()), name


def test_products_in_bfloat16_leave_weights_and_norms_in_float32() -> None:
    """Lightning's "bf16-mixed" does this; a warning of torch about mixed precisions would be an error here."""
    model = network().float().train()
    embeds, features = (part.float() for part in inputs())
    plain = model(model.fuse(embeds[:, 1:], features[:, :-1]), torch.arange(8).expand(2, -1))[0]
    with torch.autocast("cpu", torch.bfloat16):
        mixed = model(model.fuse(embeds[:, 1:], features[:, :-1]), torch.arange(8).expand(2, -1))[0]
    assert not torch.equal(mixed.float(), plain)
    torch.testing.assert_close(mixed.float(), plain, rtol=0.05, atol=0.05)
    mixed.float().square().sum().backward()
    assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in model.parameters())


def test_features_of_several_layers_are_joined() -> None:
    net = network(layers=(0, 2, -1))
    assert net.fc.in_features == 4 * 24
    embeds = hidden = inputs()[0]
    assert torch.equal(net.fuse_drafted(embeds, hidden), net.fuse(embeds, torch.cat([hidden] * 3, -1)))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 0},
        {"vocab_size": 2**40},
        {"head_dim": 7},
        {"num_key_value_heads": 3},
        {"rope_theta": float("inf")},
        {"rms_norm_eps": "small"},
        {"layers": ()},
        {"layers": ("last",)},
        {"input_norm": 1},
        {"base": None},
        {"hidden_size": True},
    ],
)
def test_odd_settings_are_one_clear_error(changes: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="must"):
        DraftConfig(**{**SHAPE, **changes})


def test_unknown_systems_are_refused() -> None:
    with pytest.raises(InputError, match="`system` must be one of eagle3, eagle"):
        network_class("hawk")
