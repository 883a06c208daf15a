"""Tests EAGLE-3's network against a simple reference for published networks, for every option, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmdec.drafters.eagle.eagle3 import Eagle3, Eagle3Config, default_layers
from mmdec.errors import InputError
from tests.unit.drafters.eagle.naive_eagle3 import naive_logits

SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "vocab_size": 31,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}
FLAGS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True},
    {"fc_norm": True},
    {"norm_before_fc": True, "norm_output": True},
    {"norm_output": True},
    {"qk_norm": True, "attention_bias": True, "output_bias": True},
    {"num_hidden_layers": 3, "norm_output": True, "norm_before_residual": True},
    {"features": 2, "target_hidden_size": 20, "own_embedding": True, "fc_bias": True, "fc_norm": True},
    {"features": 1, "draft_vocab_size": 11, "rope_theta": 500.0},
    {"mask_token": 7, "num_hidden_layers": 2, "fc_norm": True},
    {"mask_token": 7, "norm_before_fc": True, "norm_output": True, "qk_norm": True},
]


def eagle3(**changes: Any) -> Eagle3:
    torch.manual_seed(0)
    network = Eagle3(Eagle3Config(**{**SHAPE, **changes})).double().eval()
    for weight in network.parameters():
        torch.nn.init.normal_(weight, 0.5 if weight.dim() == 1 else 0.0, 0.4)
    return network


def options(config: Eagle3Config) -> dict[str, Any]:
    names = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output", "qk_norm", "features")
    return {
        **{name: getattr(config, name) for name in names},
        **{"layers": config.num_hidden_layers, "heads": config.num_attention_heads, "dim": config.head_dim},
        **{"eps": config.rms_norm_eps, "theta": config.rope_theta},
    }


def drafted_logits(network: Eagle3, embeds: Tensor, features: Tensor, drafted: Tensor) -> Tensor:
    """Ours, step by step over a cache."""
    head = torch.nn.Linear(1, 1)
    hidden, pair = network(network.fuse(embeds, features)[None], torch.arange(len(embeds))[None])
    hidden, logits = hidden[:, -1:], []
    for step, embed in enumerate([*drafted, None]):
        logits.append(network.logits(hidden[0, 0], head))
        if embed is None:
            return torch.stack(logits)
        masked = network.config.mask_token is not None
        states = network.masked_input(embed)[None, None] if masked else network.fuse_drafted(embed[None, None], hidden)
        hidden, own = network(states, torch.tensor([[len(embeds) + step]]), pair)
        pair = torch.cat([pair[0], own[0]], 2), torch.cat([pair[1], own[1]], 2)
    raise AssertionError


@torch.no_grad()
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(flags) or "plain")
def test_every_option_equals_a_naive_reading(flags: dict[str, Any]) -> None:
    network = eagle3(**flags)
    config = network.config
    embeds, features, drafted = (
        torch.randn(count, size, dtype=torch.float64)
        for count, size in ((5, 16), (5, config.features * config.target_size), (3, 16))
    )
    if config.mask_token is not None:
        drafted = drafted[:1].expand(3, -1)
    expected = naive_logits(dict(network.state_dict()), options(config), embeds, features, drafted)
    result = drafted_logits(network, embeds, features, drafted)
    assert result.shape == (4, config.vocabulary)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-10)


def test_positions_on_three_axes_turn_each_its_own_channels() -> None:
    for interleaved, expected in ((False, [0, 0, 1, 2]), (True, [0, 1, 2, 0])):
        network = eagle3(head_dim=8, positions="axes", mrope_section=(2, 1, 1), mrope_interleaved=interleaved)
        states = torch.randn(1, 3, 32, dtype=torch.float64)
        axes = torch.tensor([[[4, 4, 7]], [[1, 2, 7]], [[9, 3, 7]]])
        queries, _, _ = network.layer(0).project(states, axes)
        for channel, axis in enumerate(expected):
            single, _, _ = network.layer(0).project(states, axes[axis])
            for half in (channel, channel + 4):
                torch.testing.assert_close(queries[..., half], single[..., half])


def test_scaled_rotations_are_those_of_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    for scaling in (
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ):
        network = eagle3(head_dim=8, rope_theta=5000.0, rope_scaling=scaling)
        stock = LlamaConfig(
            hidden_size=32,
            num_attention_heads=4,
            max_position_embeddings=64,
            rope_parameters={**scaling, "rope_theta": 5000.0},
        )
        positions = torch.arange(50)[None]
        cosines, sines = LlamaRotaryEmbedding(stock)(torch.zeros(1), positions)
        result = network.layer(0).rotary(positions, torch.float32, torch.device("cpu"))
        torch.testing.assert_close(result[0][:, 0], cosines)
        torch.testing.assert_close(result[1][:, 0].abs(), sines.abs())


def test_a_draft_vocabulary_is_mapped_to_the_targets() -> None:
    network = eagle3(draft_vocab_size=4)
    network.get_buffer("d2t").copy_(torch.tensor([3, 9, 20, 30]) - torch.arange(4))
    vocabulary = network.draft_vocabulary
    assert vocabulary.token_ids(torch.tensor([[0, 3], [2, 1]])).tolist() == [[3, 30], [20, 9]]
    logits = vocabulary.target_logits(torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
    assert logits.shape == (1, 31)
    assert logits[0, [3, 9, 20, 30]].tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert int(logits.isneginf().sum()) == 27


def test_unnamed_layers_have_defaults() -> None:
    assert default_layers(32) == (1, 15, 28)  # boundaries 2, 16, 29
    assert default_layers(3) == (1, 0, 0)
    assert Eagle3Config(**SHAPE).for_depth(36).layers == (1, 17, 32)
    assert Eagle3Config(**SHAPE, layers=(0, 1, 2)).for_depth(36).layers == (0, 1, 2)
    with pytest.raises(InputError, match="only three have a default"):
        Eagle3Config(**SHAPE, features=4).for_depth(36)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (1, 2)}, "one a feature"),
        ({"fc_norm": True, "norm_before_fc": True}, "both are true"),
        ({"draft_vocab_size": 32}, "at most the target's"),
        ({"target_hidden_size": 20}, "own_embedding"),
        ({"mask_token": 31}, "token below 31"),
        ({"positions": "axes"}, "mrope_section"),
        ({"mrope_section": (1, 1, 2)}, "sum 3"),
        ({"positions": "rows"}, "text, temporal or axes"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Eagle3Config(**{**SHAPE, **changes})
