"""Policies against plain references, and FreeDave: the policy's own text, for any predictions."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from mmdec.core.canvas import (
    POLICIES,
    EntropyBound,
    LearnedFilter,
    Policy,
    Predictions,
    ProgressSchedule,
    RevealFilter,
    Threshold,
    TopK,
    make_policy,
    reveal_block,
)
from mmdec.errors import InputError

VOCABULARY, MASK = 12, 11


def random_predictions(seed: int, length: int = 9, scale: float = 4.0) -> tuple[Predictions, Tensor]:
    """Return the predictions for one canvas, and its masked positions, at least one."""
    draws = torch.Generator().manual_seed(seed)
    logits = torch.randn(1, length, VOCABULARY, generator=draws, dtype=torch.float64) * scale
    logits[..., MASK] = -math.inf
    masked = torch.rand(1, length, generator=draws) < 0.6
    masked[0, seed % length] = True
    return Predictions(logits), masked


def by_confidence(predictions: Predictions, masked: Tensor) -> list[tuple[float, int]]:
    """Return (probability of the best token, position) of the masked positions, the most confident first."""
    best = [max(row) for row in predictions.logits[0].softmax(-1).tolist()]
    return sorted(((best[at], at) for at in range(len(best)) if masked[0, at]), key=lambda pair: (-pair[0], pair[1]))


def revealed(policy: Policy, predictions: Predictions, masked: Tensor) -> set[int]:
    return set(policy.reveal(predictions, masked)[0].nonzero()[:, 0].tolist())


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.9, 1.0])
def test_threshold_reveals_the_confident_or_the_best(seed: int, threshold: float) -> None:
    predictions, masked = random_predictions(seed)
    order = by_confidence(predictions, masked)
    expected = {at for best, at in order if best >= threshold} or {order[0][1]}
    assert revealed(Threshold(threshold), predictions, masked) == expected


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("tokens", [1, 2, 5, 100])
def test_top_k_reveals_the_most_confident(seed: int, tokens: int) -> None:
    predictions, masked = random_predictions(seed)
    expected = {at for _, at in by_confidence(predictions, masked)[:tokens]}
    assert revealed(TopK(tokens), predictions, masked) == expected


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("bound", [0.0, 0.1, 1.0, 100.0])
def test_entropy_bound_adds_entropies_until_the_bound(seed: int, bound: float) -> None:
    predictions, masked = random_predictions(seed)
    entropies = []
    for at, row in enumerate(predictions.logits[0].softmax(-1).tolist()):
        if masked[0, at]:
            entropies.append((-sum(p * math.log(p) for p in row if p > 0), at))
    expected, total = set[int](), 0.0
    for entropy, at in sorted(entropies):
        total += entropy
        if total - entropy > bound:  # the sum without the largest so far
            break
        expected.add(at)
    assert revealed(EntropyBound(bound), predictions, masked) == expected


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", ["linear", "cosine", "exponential"])
def test_schedule_ends_when_the_mean_margin_is_large_enough(seed: int, kind: str) -> None:
    predictions, masked = random_predictions(seed)
    policy = ProgressSchedule(4.0, 1.0, kind)  # type: ignore[arg-type] # parametrised
    margins = []
    for row in predictions.logits[0].tolist():
        first, second = sorted(row, reverse=True)[:2]
        margins.append(first - second)
    progress = 1 - int(masked.sum()) / masked.shape[1]
    falling = {
        "linear": 1 - progress,
        "cosine": 0.5 + 0.5 * math.cos(math.pi * progress),
        "exponential": math.exp(-4 * progress),
    }
    ends = sum(margins) / len(margins) >= 1 + 3 * falling[kind]
    order = [at for _, at in by_confidence(predictions, masked)]
    assert revealed(policy, predictions, masked) == set(order if ends else order[:1])


@pytest.mark.parametrize("kind", ["linear", "cosine", "exponential"])
def test_schedule_falls_from_high_to_low(kind: str) -> None:
    thresholds = ProgressSchedule(8.0, 2.0, kind).threshold(torch.linspace(0, 1, 11)).tolist()  # type: ignore[arg-type]
    assert thresholds[0] == pytest.approx(8.0)
    assert thresholds[-1] == pytest.approx(2.0, abs=0.2)
    assert all(later < earlier for earlier, later in pairwise(thresholds))


@pytest.mark.parametrize("seed", range(20))
def test_learned_filter_reveals_what_its_network_takes_for_final(seed: int) -> None:
    predictions, masked = random_predictions(seed)
    torch.manual_seed(seed)
    network = RevealFilter(masked.shape[1])
    first, _, second = cast(Any, network.layers)
    confidence = predictions.confidence[0].float()
    probabilities = torch.sigmoid(
        second.weight @ torch.relu(first.weight @ confidence + first.bias) + second.bias
    ).tolist()
    order = by_confidence(predictions, masked)
    expected = {at for _, at in order if probabilities[at] >= 0.5} | {order[0][1]}
    assert revealed(LearnedFilter(network, 0.5), predictions, masked) == expected


def test_the_papers_filter_has_2112_weights() -> None:
    assert sum(weight.numel() for weight in RevealFilter(32).parameters()) == 2112


class Oracle:
    """A session whose logits at each position are random, but follow from the whole canvas.

    Args:
        steady: The share of the logits that does not depend on the canvas: at 1 all drafts are right.
    """

    def __init__(self, seed: int, length: int, steady: float) -> None:
        self.seed, self.steady = seed, steady
        self.canvas = torch.full((length,), MASK)
        self.text = torch.zeros(0, dtype=torch.int64)
        self.scored = 0

    def score(self, canvases: Tensor) -> Tensor:
        self.scored += 1
        base = self._noise(self.seed)
        return torch.stack(
            [
                6 * (self.steady * base + (1 - self.steady) * self._noise(hash((self.seed, *canvas.tolist()))))
                for canvas in canvases
            ]
        )

    def _noise(self, seed: int) -> Tensor:
        draws = torch.Generator().manual_seed(seed % 2**62)
        return torch.randn(len(self.canvas), VOCABULARY, generator=draws, dtype=torch.float64)

    def commit(self, block: Tensor) -> None:
        self.text = torch.cat([self.text, block])


def plain_text(oracle: Oracle, policy: Policy) -> tuple[list[int], int]:
    """Apply a policy pass by pass. Returns the text, and the number of passes."""
    canvas, passes = oracle.canvas, 0
    while bool((canvas == MASK).any()):
        logits = oracle.score(canvas[None])
        logits[..., MASK] = -math.inf
        positions = policy.reveal(Predictions(logits), (canvas == MASK)[None])[0]
        canvas, passes = torch.where(positions, logits[0].argmax(-1), canvas), passes + 1
    return canvas.tolist(), passes


def some_policies(seed: int, length: int) -> list[Policy]:
    torch.manual_seed(seed)
    return [
        Threshold((0.5, 0.9, 0.99)[seed % 3]),
        TopK(1 + seed % 3),
        EntropyBound((0.1, 1.0)[seed % 2]),
        ProgressSchedule(9.0, 3.0, ("linear", "cosine", "exponential")[seed % 3]),
        LearnedFilter(RevealFilter(length), 0.5),
    ]


@pytest.mark.parametrize("seed", range(60))
def test_drafts_keep_the_policys_text(seed: int) -> None:
    length, steady = 4 + seed % 9, (0.0, 0.5, 0.8, 0.95)[seed % 4]
    for policy in some_policies(seed, length):
        expected, steps = plain_text(Oracle(seed, length, steady), policy)
        for drafts in (1, 2, 3, 8):
            oracle = Oracle(seed, length, steady)
            passes = list(reveal_block(oracle, MASK, policy, drafts))
            assert oracle.text.tolist() == expected
            assert sum(pass_.steps for pass_ in passes) == steps
            assert sum(pass_.revealed for pass_ in passes) == length
            assert len(passes) == oracle.scored <= steps
            assert drafts > 1 or len(passes) == steps
            assert max(pass_.scored for pass_ in passes) <= drafts


def test_drafts_of_a_steady_model_are_all_right() -> None:
    oracle = Oracle(3, 9, steady=1.0)
    passes = list(reveal_block(oracle, MASK, TopK(), drafts=4))
    assert [pass_.steps for pass_ in passes] == [1, 4, 4]  # the first pass has nothing to draft from


def test_given_tokens_of_a_canvas_stay() -> None:
    oracle = Oracle(5, 6, steady=0.5)
    oracle.canvas[:3] = torch.tensor([1, 2, 3])
    passes = list(reveal_block(oracle, MASK, Threshold(), drafts=2))
    assert oracle.text[:3].tolist() == [1, 2, 3]
    assert sum(pass_.revealed for pass_ in passes) == 3


def test_the_mask_token_is_never_revealed() -> None:
    class Masks(Oracle):
        def score(self, canvases: Tensor) -> Tensor:
            logits = super().score(canvases)
            logits[..., MASK] = 100.0
            return logits

    oracle = Masks(1, 6, steady=0.5)
    list(reveal_block(oracle, MASK, TopK(2)))
    assert MASK not in oracle.text.tolist()


def test_a_policy_that_reveals_nothing_is_refused() -> None:
    class Shy(Policy):
        def reveal(self, predictions: Predictions, masked: Tensor) -> Tensor:
            return torch.zeros_like(masked)

    with pytest.raises(InputError, match=r"at least one masked position.*Shy revealed none"):
        list(reveal_block(Oracle(1, 4, 0.5), MASK, Shy()))


def test_registered_policies_are_made_by_name() -> None:
    assert {name: type(make_policy(name)) for name in POLICIES} == POLICIES
    assert set(POLICIES) == {"threshold", "top_k", "entropy_bound", "schedule"}


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("treshold", r"but is 'treshold'\. Did you mean 'threshold'"),
        (3, r"but is 3\.$"),
        (None, r"but is None\.$"),
        (Threshold, r"but is the class Threshold\.$"),
    ],
)
def test_an_unknown_policy_is_refused(choice: object, message: str) -> None:
    with pytest.raises(InputError, match=rf"`policy` must be one of threshold.*{message}"):
        make_policy(choice)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Threshold(1.5),
        lambda: Threshold(True),
        lambda: Threshold("0.9"),  # type: ignore[arg-type] # wrong on purpose
        lambda: TopK(0),
        lambda: EntropyBound(-0.1),
        lambda: EntropyBound(math.nan),
        lambda: ProgressSchedule(kind="quadratic"),  # type: ignore[arg-type] # wrong on purpose
        lambda: RevealFilter(0),
        lambda: LearnedFilter(torch.nn.Linear(2, 2)),  # type: ignore[arg-type] # wrong on purpose
    ],
)
def test_wrong_settings_of_policies_are_refused(make: object) -> None:
    with pytest.raises(InputError, match="must be"):
        make()  # type: ignore[operator] # a function


def test_a_filter_refuses_canvases_of_another_length() -> None:
    predictions, masked = random_predictions(1)
    with pytest.raises(InputError, match="`block_length` must be 5, the length of the filter's canvases, but is 9"):
        LearnedFilter(RevealFilter(5)).reveal(predictions, masked)
