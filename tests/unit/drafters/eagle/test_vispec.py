"""Tests ViSpec's network against a simple reference for the published one, and against hand-computed values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmdec.drafters.eagle.eagle import Eagle
from mmdec.drafters.eagle.vispec import ViSpec, ViSpecConfig
from mmdec.drafters.networks.config import DraftConfig
from mmdec.errors import InputError
from tests.support.compressing_drafters import random_prompt

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "vocab_size": 31,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}


def network(**changes: Any) -> ViSpec:
    torch.manual_seed(0)
    model = ViSpec(ViSpecConfig(**{**SIZES, **changes})).eval()
    torch.nn.init.normal_(model.img_fc.weight, std=0.2)
    return model


def naive(model: ViSpec, embeds: torch.Tensor, features: torch.Tensor, visual: torch.Tensor) -> tuple[Any, ...]:
    """Columns one by one, as the published code reads them: embeddings shifted by one, features not."""
    latest = torch.zeros(16)
    states, positions, column = [], [], 0
    following, seen = embeds[1:], visual[1:].tolist()
    while column < len(following):
        if not seen[column]:
            mixed = model.img_fc(torch.cat([features[column], latest]))
            states.append(model.fc(torch.cat([following[column], mixed])))
            positions.append(column)
            column += 1
            continue
        end = column
        while end < len(seen) and seen[end]:
            end += 1
        out = model.imadpt(following[column:end]).states
        for index in range(len(out) - 1):
            states.append(out[index])
            positions.append(end - (len(out) - 1) + index)
        latest, column = out[-1], end
    return torch.stack(states), positions, latest


@pytest.mark.parametrize("queries", [1, 2, 3])
@pytest.mark.parametrize("images", [(), ((2, 12),), ((0, 9), (12, 20)), ((5, 24),)])
def test_prompts_equal_a_naive_reading(queries: int, images: tuple[tuple[int, int], ...]) -> None:
    model = network(queries=queries)
    embeds, features, visual = random_prompt(images)
    result = model.prompt(embeds, features, visual)
    states, positions, latest = naive(model, embeds, features, visual)
    torch.testing.assert_close(result.states, states)
    assert result.positions.tolist() == positions
    if images:
        torch.testing.assert_close(result.condition, latest)
        assert result.visual_weights is not None
        assert len(result.visual_weights) == int(visual.sum())
    else:
        assert result.condition is None
    # a text column of later rounds, in a batch
    later = model.condition_on(result.condition).fuse(embeds[:1], features[:1])
    by_hand = model.fc(torch.cat([embeds[0], model.img_fc(torch.cat([features[0], latest]))]))
    torch.testing.assert_close(later[0], by_hand)


def test_mixing_equals_a_hand_computation() -> None:
    """img_fc begins as [I | 0]; with [I | 2 I] the global vector counts double."""
    model = ViSpec(ViSpecConfig(**SIZES))
    embeds, features = torch.randn(3, 16), torch.randn(3, 16)
    vector = torch.randn(16)
    plain = Eagle(DraftConfig(**SIZES))
    plain.fc = model.fc
    torch.testing.assert_close(model.condition_on(vector).fuse(embeds, features), plain.fuse(embeds, features))
    with torch.no_grad():
        model.img_fc.weight[:, 16:] = 2 * torch.eye(16)
    torch.testing.assert_close(
        model.condition_on(vector).fuse(embeds, features), plain.fuse(embeds, features + 2 * vector)
    )


def test_an_image_smaller_than_the_outputs() -> None:
    model = network(queries=4)
    embeds, features, visual = random_prompt(((3, 5),))
    result = model.prompt(embeds, features, visual)
    assert result.positions.tolist() == list(range(23))
    out = model.imadpt(embeds[3:5]).states
    torch.testing.assert_close(result.states[2:4], out[1:3])
    torch.testing.assert_close(result.condition, out[3])


def test_the_global_vector_goes_on_to_the_next_turn() -> None:
    model = network()
    earlier = torch.randn(16)
    embeds, features, visual = random_prompt(())
    result = model.condition_on(earlier).prompt(embeds, features, visual)
    assert result.condition is earlier
    torch.testing.assert_close(result.states, model.condition_on(earlier).fuse(embeds[1:], features[:-1]))
    embeds, features, visual = random_prompt(((6, 12),))
    result = model.condition_on(earlier).prompt(embeds, features, visual)
    torch.testing.assert_close(result.states[:5], model.condition_on(earlier).fuse(embeds[1:6], features[:5]))
    torch.testing.assert_close(
        result.states[6:], model.condition_on(result.condition).fuse(embeds[12:], features[11:-1])
    )


def test_the_small_models_network_is_small() -> None:
    sizes = {"hidden_size": 160, "vocab_size": 821, "intermediate_size": 432, "head_dim": 40, "num_key_value_heads": 4}
    assert sum(part.numel() for part in network(**sizes).parameters()) <= 600_000


@pytest.mark.parametrize(
    "wrong", [{"queries": 0}, {"num_attention_heads": 3, "num_key_value_heads": 3}, {"layers": (0, -1)}]
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"`{next(iter(wrong))}` must"):
        ViSpecConfig(**{**SIZES, **wrong})
