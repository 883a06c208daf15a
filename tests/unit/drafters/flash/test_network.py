"""Tests FLASH's network: fusion, compressed prompts, slots and refiners, against hand-computed values and loops.
tests/unit/drafters/networks/test_compressing_drafters.py tests its drafter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from mmdec.drafters.flash.network import FlashConfig, FlashNetwork
from mmdec.errors import InputError
from tests.support.compressing_drafters import random_prompt

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "vocab_size": 31,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "slots": 3,
    "latents": 4,
}


def network(**changes: Any) -> FlashNetwork:
    torch.manual_seed(0)
    model = FlashNetwork(FlashConfig(**{**SIZES, **changes})).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


def test_fusion_equals_a_hand_computation() -> None:
    model = network()
    embeds, features = torch.randn(16), torch.randn(16)
    x = torch.cat([embeds, features])
    by_hand = silu(model.fc_gate.weight @ x + model.fc_gate.bias) * (model.fc_up.weight @ x + model.fc_up.bias)
    torch.testing.assert_close(model.fuse(embeds, features), by_hand)
    assert "fc.weight" not in model.state_dict()


@pytest.mark.parametrize("plain_prefix", [False, True])
@pytest.mark.parametrize("images", [(), ((3, 13),), ((0, 9), (12, 20)), ((5, 7),)])
def test_prompts_equal_a_naive_reading(images: tuple[tuple[int, int], ...], plain_prefix: bool) -> None:
    model = network(plain_prefix=plain_prefix)
    embeds, features, visual = random_prompt(images)
    result = model.prompt(embeds, features, visual)
    states: dict[int, torch.Tensor] = {}
    first = min((begin for begin, _ in images), default=0)
    for column in range(23):
        if not visual[column + 1]:
            fused = model.fuse(embeds[column + 1], features[column])
            states[column] = features[column] if plain_prefix and images and column < first - 1 else fused
    for begin, end in images:
        image = features[max(begin, 1) : end]
        latents = model.compressor.latents[: len(image)]
        out = torch.softmax(latents @ image.T, -1) @ image
        for index, compressed in enumerate(out):
            states[max(begin, 1) - 1 + (2 * index + 1) * len(image) // (2 * len(out))] = compressed
    assert result.positions.tolist() == sorted(states)
    torch.testing.assert_close(result.states, torch.stack([states[column] for column in sorted(states)]))


def test_slots_equal_loops() -> None:
    """Slot (t, i) sees slot 0 of every earlier column and the slots up to i of its own, at RoPE positions t + i."""
    model, columns, count = network(), 5, 3
    states, features = torch.randn(columns, 16), torch.randn(16)
    slots = [model.slot_states(states[t]) for t in range(columns)]  # (k, H) each
    for t in range(columns):
        assert torch.equal(slots[t][0], states[t])  # slot 0 has no embedding
        torch.testing.assert_close(slots[t][2], states[t] + model.slot_embeddings[1])

    def project(state: torch.Tensor, place: int) -> tuple[torch.Tensor, ...]:
        result = model.layer(0).project(state[None, None], torch.tensor([[place]]))
        return tuple(part[0, :, 0] for part in result)  # (heads, d)

    t, expected = columns - 1, []
    for i in range(count):
        query, _, _ = project(slots[t][i], t + i)
        seen = [project(slots[u][0], u) for u in range(t)] + [project(slots[t][j], t + j) for j in range(i + 1)]
        heads = []
        for head in range(4):
            scores = torch.stack([query[head] @ key[head // 2] / math.sqrt(4) for _, key, _ in seen]).softmax(0)
            heads.append(sum(w * value[head // 2] for w, (_, _, value) in zip(scores, seen, strict=True)))
        layer: Any = model.layers[0]
        state = slots[t][i] + layer.self_attn.o_proj(torch.cat(heads))  # type: ignore[arg-type] # sums of tensors
        normed, mlp = layer.post_attention_layernorm(state), layer.mlp
        state = state + mlp.down_proj(silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))
        expected.append(state + model.residual_gate[i] * features)
    order = torch.cat([states, slots[t][1:]])[None]  # slots 0 of the columns, then the last one's others: causal
    places = torch.cat([torch.arange(columns), t + torch.arange(1, count)])[None]
    hidden, _ = model(order, places)
    torch.testing.assert_close(model.finish(hidden[0, -count:], features), torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_refiners_equal_a_hand_computation() -> None:
    model = network()
    slot, embedded = torch.randn(16), torch.randn(16)
    refiner: Any = model.refiners[1]
    assert refiner.down.out_features == 2
    by_hand = slot + refiner.up(silu(refiner.down(torch.cat([embedded, slot]))))
    torch.testing.assert_close(model.refine_slot(slot, embedded, 2), by_hand)
    assert torch.equal(model.refine_slot(slot, embedded, 0), slot)
    assert torch.equal(network(refine=False).refine_slot(slot, embedded, 2), slot)


def test_new_refiners_correct_nothing() -> None:
    fresh = FlashNetwork(FlashConfig(**SIZES))
    slot = torch.randn(16)
    assert torch.equal(fresh.refine_slot(slot, torch.randn(16), 1), slot)


def test_the_small_models_network_is_small() -> None:
    sizes = {"hidden_size": 160, "vocab_size": 821, "intermediate_size": 432, "head_dim": 40, "num_key_value_heads": 4}
    assert sum(part.numel() for part in network(**sizes, latents=8, slots=4).parameters()) <= 600_000


@pytest.mark.parametrize(
    "wrong", [{"slots": 0}, {"slots": 33}, {"latents": 0}, {"bottleneck": 17}, {"tree": 1}, {"layers": (0, -1)}]
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"`{next(iter(wrong))}` must"):
        FlashConfig(**{**SIZES, **wrong})
