"""Tests the unrolled training steps: they give the states of drafting from each root alone, and their masks equal those
of a simple loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mmdec.drafters.networks.draft_network import DraftNetwork
from mmdec.drafters.networks.training.module import LossWeights, losses
from mmdec.drafters.networks.training.teacher import TargetFeatures
from mmdec.drafters.networks.training.unroll import (
    additive_mask,
    causal_mask,
    diagonal_attention,
    unroll_inputs,
    unroll_steps,
)
from mmdec.errors import InputError
from tests.support.draft_networks import draft_network
from tests.support.random_texts import TEXTS, WIDE
from tests.support.tiny_vlm import vision_model

SYSTEMS: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {}),
    ("msd", {"visual_token": "next"}),
    ("msd", {"visual_token": "own"}),
    ("specvlm", {}),
    ("vispec", {}),
    ("eagle3", {}),
    ("eagle3", {"num_hidden_layers": 2, "qk_norm": True, "norm_output": True}),
    ("eagle3", {"pictures": "dropped"}),
]


def drafted(network: DraftNetwork, text: TargetFeatures, root: int, steps: int) -> list[Tensor]:
    """Features (H,) that a draft from one root gives, each by a pass over the whole row."""
    begin = text.prompt
    prompt = network.prompt(text.embeds[:begin], text.features[:begin], text.visual[:begin])
    conditioned = network.condition_on(prompt.condition)
    known = conditioned.fuse(text.embeds[begin : begin + root + 1], text.features[begin - 1 : begin + root])
    states = torch.cat([prompt.states, known])
    start = begin - 1 if prompt.end is None else prompt.end
    positions = torch.cat([prompt.positions, torch.arange(start, start + root + 1)])
    result: list[Tensor] = []
    for step in range(steps):
        if step:
            own = conditioned.fuse_drafted(text.embeds[begin + root + step], result[-1])
            states = torch.cat([states, own[None]])
            positions = torch.cat([positions, torch.tensor([start + root + step])])
        hidden, _ = network(states[None], positions[None])
        result.append(hidden[0, -1])
    return result


@pytest.mark.parametrize(("system", "changes"), SYSTEMS)
def test_every_root_is_drafted_from_as_decoding_would(system: str, changes: dict[str, Any]) -> None:
    network = draft_network(system, vision_model("llava"), **changes).double()
    read = WIDE if system == "eagle3" else TEXTS
    outputs = unroll_steps(network, unroll_inputs(network, read), 4)
    assert [out.shape[1] for out in outputs] == [8, 7, 6, 5]
    for row, text in enumerate(read):
        columns = len(text.answer) - 1
        for root in range(columns):
            steps = min(4, columns - root)
            for step, expected in enumerate(drafted(network, text, root, steps)):
                torch.testing.assert_close(outputs[step][row, root], expected)


def whole_mask(prompts: Tensor, length: int, step: int) -> Tensor:
    """Return (B, n, M + N + step * n), n = N - step: what the roots' newest columns see of the prompt, the N columns of
    step
    0, and the first n of each later step."""
    count, rows = length - step, []
    for prompt in prompts.tolist():
        rows.append(
            [
                [*prompt, *(column <= root for column in range(length))]
                + [column == root for _ in range(step) for column in range(count)]
                for root in range(count)
            ]
        )
    return torch.tensor(rows)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("step", [1, 3])
def test_diagonal_attention_equals_the_full_mask(heads: int, groups: int, step: int) -> None:
    """Forward, and the gradients of queries, keys and values."""
    draw = torch.Generator().manual_seed(step)
    prompts, length = torch.tensor([[True] * 3, [True, False, False]]), 6
    count = length - step

    def random_states(groups: int, columns: int) -> Tensor:
        return torch.randn(2, groups, columns, 8, generator=draw, dtype=torch.float64).requires_grad_()

    queries, context = (
        random_states(heads, count),
        (random_states(groups, 3 + length), random_states(groups, 3 + length)),
    )
    own = [(random_states(groups, length - done), random_states(groups, length - done)) for done in range(1, step + 1)]
    mask = additive_mask(causal_mask(prompts, length), torch.float64)[:, :, :count]
    expected = scaled_dot_product_attention(
        queries,
        *(torch.cat([context[n], *(pair[n][:, :, :count] for pair in own)], 2) for n in range(2)),
        attn_mask=whole_mask(prompts, length, step)[:, None],
        enable_gqa=True,
    )
    result = diagonal_attention(queries, context, own, mask)
    torch.testing.assert_close(result, expected)
    inputs = [queries, *context, *(part for pair in own for part in pair)]
    weight = torch.randn(result.shape, generator=draw, dtype=torch.float64)
    for gradient, expected_gradient in zip(
        torch.autograd.grad((result * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(gradient, expected_gradient)


def test_gradients_stop_between_steps_when_detached() -> None:
    network = draft_network("eagle", vision_model("llava")).double()
    columns = unroll_inputs(network, TEXTS[:1])
    gradients = []
    for through in (True, False):
        network.zero_grad()
        unroll_steps(network, columns, 2, through)[1].square().sum().backward()
        gradients.append(network.layers[0].mlp.down_proj.weight.grad.clone())  # type: ignore[union-attr, operator]
        columns = unroll_inputs(network, TEXTS[:1])
    assert not torch.allclose(*gradients)


def test_noise_follows_eagle() -> None:
    network = draft_network("eagle", vision_model("llava")).double()
    torch.manual_seed(0)
    plain, noisy = unroll_inputs(network, TEXTS), unroll_inputs(network, TEXTS, 0.1)
    for row, text in enumerate(TEXTS):
        moved = (noisy.features - plain.features)[row][noisy.mask[row]].abs()
        bound = 0.1 * 512 / len(text.features)
        assert 0.8 * bound < float(moved.max()) <= bound


ALL = LossWeights(1.0, 0.1, 10.0, 0.1)


def naive(states: Tensor, expected: Tensor, head: Tensor) -> dict[str, float]:
    """Place by place, token by token."""
    sums = dict.fromkeys(("features", "tokens", "distribution", "ranks", "right"), 0.0)
    for a, b in zip(states.tolist(), expected.tolist(), strict=True):
        gaps = [abs(x - y) for x, y in zip(a, b, strict=True)]
        sums["features"] += sum(0.5 * g * g if g < 1 else g - 0.5 for g in gaps) / len(gaps)
        own, theirs = (
            [sum(w * x for w, x in zip(row, place, strict=True)) for row in head.tolist()] for place in (a, b)
        )
        q, p = ([math.exp(x) / sum(map(math.exp, row)) for x in row] for row in (own, theirs))
        sums["tokens"] -= sum(y * math.log(x) for x, y in zip(q, p, strict=True))
        sums["distribution"] += sum(abs(x - y) for x, y in zip(q, p, strict=True))
        best = sorted(range(len(theirs)), key=lambda token: -theirs[token])[:10]
        for place, token in enumerate(best):
            sums["ranks"] -= own[token] - math.log(sum(math.exp(own[other]) for other in best[place:]))
        sums["right"] += own.index(max(own)) == best[0]
    return {name: value / len(states) for name, value in sums.items()}


@pytest.mark.parametrize("cells", [1 << 20, 40])
def test_losses_equal_naive_ones(cells: int) -> None:
    torch.manual_seed(0)
    drafted_states, expected, head = torch.randn(7, 6).requires_grad_(), torch.randn(7, 6), torch.randn(20, 6)
    result = losses(drafted_states, expected, lambda states: states @ head.T, ALL, cells)
    reference = naive(drafted_states, expected, head)
    for name, value in reference.items():
        assert float(result[name].detach()) == pytest.approx(value, rel=1e-4), name
    total = sum(getattr(ALL, name) * reference[name] for name in vars(ALL))
    assert float(result["loss"].detach()) == pytest.approx(total, rel=1e-4)


def test_chunked_gradients_equal_the_whole() -> None:
    torch.manual_seed(1)
    expected, head = torch.randn(9, 6).double(), torch.randn(20, 6).double()
    gradients = []
    for cells in (1 << 20, 60):
        torch.manual_seed(2)
        drafted_states = torch.randn(9, 6).double().requires_grad_()
        losses(drafted_states, expected, lambda states: states @ head.T, ALL, cells)["loss"].backward()
        gradients.append(drafted_states.grad)
    torch.testing.assert_close(*gradients)


def test_losses_of_zero_weight_are_not_logged() -> None:
    drafted_states = torch.randn(3, 4)
    result = losses(drafted_states, drafted_states, lambda states: states @ torch.eye(4), LossWeights())
    assert set(result) == {"loss", "features", "tokens", "right"}
    assert float(result["features"]) == 0.0
    assert float(result["right"]) == 1.0


@pytest.mark.parametrize("wrong", [{"features": -1.0}, {"features": 0.0, "tokens": 0.0}])
def test_loss_weights_that_train_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="`weights` must be"):
        LossWeights(**wrong)
