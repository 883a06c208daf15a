"""Tests SpecVLM's gate and elastic compressor: hand-computed gradients, simple references, prompts against training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmdec.drafters.eagle.eagle import Eagle
from mmdec.drafters.eagle.specvlm import (
    ElasticCompressor,
    SpecVLM,
    SpecVLMConfig,
    choose_compressor,
    expected_token_share,
    question_mask,
)
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
LENGTH, IMAGES = 90, ((2, 66), (70, 82))  # two images, of 64 and of 12 tokens


def network(**changes: Any) -> SpecVLM:
    torch.manual_seed(0)
    return SpecVLM(SpecVLMConfig(**{**SIZES, **changes})).eval()


def test_the_gates_gradient_equals_a_hand_computation() -> None:
    torch.manual_seed(3)
    logits = torch.tensor([0.3, -0.2, 0.5], requires_grad=True)
    choice, factor = choose_compressor(logits, 0.7, training=True)
    assert factor is not None
    assert float(factor.detach()) == pytest.approx(1.0)
    factor.backward()
    torch.manual_seed(3)
    noise = -torch.empty(3).exponential_().log()
    soft = [float(x) for x in ((logits.detach() + noise) / 0.7).softmax(-1)]
    assert soft[choice] == max(soft)
    by_hand = [soft[choice] * ((i == choice) - soft[i]) / 0.7 for i in range(3)]
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx(by_hand, abs=1e-6)


def test_inference_takes_the_best_choice_without_noise() -> None:
    before = torch.random.get_rng_state()
    assert choose_compressor(torch.tensor([0.1, 0.4, 0.2]), 1.0, training=False) == (1, None)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_gumbel_samples_follow_the_softmax() -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.0, 1.0])
    share = sum(choose_compressor(logits, 1.0, training=True)[0] for _ in range(4000)) / 4000
    assert share == pytest.approx(float(logits.softmax(-1)[1]), abs=0.03)


def test_the_gate_learns_through_the_states() -> None:
    model = network(compressors=("prune", "pool", "conv")).train()
    embeds, features, visual = random_prompt(IMAGES, LENGTH)
    model.prompt(embeds, features, visual).states.square().sum().backward()
    assert model.gate is not None
    assert float(model.gate.out.weight.grad.abs().sum()) > 0  # type: ignore[union-attr] # backward has made it


@pytest.mark.parametrize("name", ["prune", "pool", "conv", "resampler", "text-only"])
@pytest.mark.parametrize("fc_norm", [False, True])
def test_one_compressor_equals_a_naive_prompt(name: str, fc_norm: bool) -> None:
    """All columns fused and then compressed; dropping, averaging and the depthwise convolution before."""
    model = network(compressors=(name,), grid=(8, 8), fc_norm=fc_norm)
    assert model.gate is None
    embeds, features, visual = random_prompt(IMAGES, LENGTH)
    result = model.prompt(embeds, features, visual)
    joined = torch.cat([embeds[1:], features[:-1]], -1)
    fused = model.fuse(embeds[1:], features[:-1])
    parts, columns = [], []
    at = 0
    for begin, end in ((b - 1, e - 1) for b, e in IMAGES):
        parts.append(fused[at:begin])
        columns += range(at, begin)
        if name == "resampler":
            one = model.compressor.parts[name](fused[begin:end])
            parts.append(one.states)
        else:
            one = model.compressor.parts[name](joined[begin:end])
            parts.append(model.fuse(one.states[:, :16], one.states[:, 16:]))
        columns += [begin + place for place in one.positions.tolist()]
        at = end
    parts.append(fused[at:])
    columns += range(at, LENGTH - 1)
    torch.testing.assert_close(result.states, torch.cat(parts))
    assert result.positions.tolist() == columns
    assert result.compressor == name
    assert result.visual_weights is not None
    assert len(result.visual_weights) == 76
    assert 0 <= float(result.visual_weights.min()) <= float(result.visual_weights.max()) <= 1


@pytest.mark.parametrize("changes", [{}, {"variant": "weighted"}, {"variant": "concat"}, {"grid": (8, 8)}])
@pytest.mark.parametrize("images", [((0, 64),), IMAGES, ((3, 5),), ((5, 90),), ((4, 5), (6, 7))])
def test_a_compressed_image_leaves_the_texts_columns_unchanged(
    changes: dict[str, Any], images: tuple[tuple[int, int], ...]
) -> None:
    model = network(**changes)
    embeds, features, visual = random_prompt(images, LENGTH)
    result = model.prompt(embeds, features, visual)
    columns = result.positions.tolist()
    assert columns == sorted(set(columns))  # each its own
    text = [column for column in range(LENGTH - 1) if not visual[column + 1]]
    assert set(text) <= set(columns)
    assert all(visual[column + 1] for column in set(columns) - set(text))
    fused = model.fuse(embeds[1:], features[:-1])
    index = [columns.index(column) for column in text]
    torch.testing.assert_close(result.states[index], fused[text])
    assert result.visual_weights is not None
    assert len(result.visual_weights) == int(visual.sum())


def test_a_full_convolution_reads_the_output_of_fc() -> None:
    model = network(compressors=("conv",), depthwise=False)
    embeds, features, visual = random_prompt(((2, 66),), LENGTH)
    fused = model.fuse(embeds[1:], features[:-1])
    expected = model.compressor.parts["conv"](fused[1:65]).states
    torch.testing.assert_close(model.prompt(embeds, features, visual).states[1:23], expected)


def test_the_gate_reads_the_question_alone() -> None:
    model = network()
    embeds, features, visual = random_prompt(((2, 66),), LENGTH)
    asked = torch.zeros(LENGTH, dtype=torch.bool)
    asked[66:70] = True
    logits = model.gate_logits(embeds, features, asked)
    assert model.gate is not None
    hidden = torch.nn.functional.silu(model.gate.hidden(torch.cat([embeds[66:70].mean(0), features[69]])))
    torch.testing.assert_close(logits, model.gate.out(hidden))
    changed = embeds.clone()
    changed[70:] += 1  # the answer
    assert torch.equal(model.gate_logits(changed, features, asked), logits)
    assert question_mask(visual).tolist() == [False] * 66 + [True] * 24
    with pytest.raises(InputError, match="there is one"):
        network(compressors=("pool",)).gate_logits(embeds, features, asked)


def test_the_weighted_variant_mixes_by_the_gate() -> None:
    compressor = ElasticCompressor((4, 4), "weighted", ratios=(3, 3, 3)).eval()
    image, weights = torch.randn(10, 4), torch.tensor([0.5, 0.3, 0.2])
    result = compressor(image, torch.nn.Identity(), weights, 0)
    parts = [compressor.parts[name](image).states for name in ("prune", "pool", "conv")]
    torch.testing.assert_close(result.states, 0.5 * parts[0] + 0.3 * parts[1] + 0.2 * parts[2])
    with pytest.raises(InputError, match="`ratios` must be equal"):
        ElasticCompressor((4, 4), "weighted", ratios=(3, 3, 2))


def test_the_concatenated_variant_holds_all_four() -> None:
    model = network(variant="concat")
    embeds, features, visual = random_prompt(((2, 66),), LENGTH)
    result = model.prompt(embeds, features, visual)
    text = LENGTH - 1 - 64
    assert len(result.states) == text + 4 + 4 + 22 + 2
    assert len(set(result.positions.tolist())) == len(result.positions)
    assert result.compressor == "concat"


def test_without_an_image_it_is_eagle_with_an_input_norm() -> None:
    model, eagle = network(), Eagle(SpecVLMConfig(**SIZES)).eval()
    eagle.load_state_dict({k: v for k, v in model.state_dict().items() if k in eagle.state_dict()})
    one, other = model.prompt(*random_prompt((), LENGTH)), eagle.prompt(*random_prompt((), LENGTH))
    torch.testing.assert_close(one.states, other.states)
    assert torch.equal(one.positions, other.positions)
    hidden, _ = model(one.states[None], one.positions[None])
    torch.testing.assert_close(hidden, eagle(one.states[None], one.positions[None])[0])


def test_the_small_models_network_is_small() -> None:
    sizes = {"hidden_size": 160, "vocab_size": 821, "intermediate_size": 432, "head_dim": 40, "num_key_value_heads": 4}
    model = network(**sizes, grid=(8, 8))
    assert sum(part.numel() for part in model.parameters()) <= 600_000


def test_the_expected_token_share_averages_the_choices() -> None:
    config = SpecVLMConfig(**SIZES)
    logits = torch.zeros(5)
    assert float(expected_token_share(logits, config, 100)) == pytest.approx((0.05 + 0.05 + 1 / 3 + 0.02) / 5)
    assert float(expected_token_share(torch.randn(3), SpecVLMConfig(**SIZES, variant="weighted"), 9)) == pytest.approx(
        1 / 3
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"variant": "all"},
        {"compressors": ("blur",)},
        {"compressors": ()},
        {"pruning": "best"},
        {"grid": (8,)},
        {"grid": (0, 8)},
        {"queries": 0},
        {"pool_ratio": 2.5},
        {"gate_temperature": 0.0},
        {"depthwise": 1},
    ],
)
def test_impossible_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"`{next(iter(wrong))}` must be"):
        SpecVLMConfig(**{**SIZES, **wrong})
