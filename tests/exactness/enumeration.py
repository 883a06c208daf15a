"""Enumerates all outcomes of a random procedure with their probabilities, and the distribution that they must have."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from math import sqrt
from typing import TypeVar

import torch
from torch import Tensor

from mmdec.core.sampling import Processor, Rng
from tests.support.toy_target import Toy

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
Distribution = dict[tuple[int, ...], float]  # text -> probability


class EnumeratedChoices:
    """Runs a random procedure once for each outcome. Each run takes the next branch at the last draw that has one."""

    def __init__(self) -> None:
        self.script: list[tuple[int, list[float]]] = []  # the branch taken at each draw, and the probabilities there
        self.place = 0

    def draw(self, weights: Sequence[float]) -> int:
        if self.place == len(self.script):
            total = sum(weights)
            self.script.append((next(i for i, w in enumerate(weights) if w > 0), [w / total for w in weights]))
        self.place += 1
        return self.script[self.place - 1][0]

    def outcomes(self, procedure: Callable[[], T]) -> Iterator[tuple[float, T]]:
        """Yield each outcome with its probability."""
        while True:
            self.place = 0
            result = procedure()
            assert self.place == len(self.script), "the procedure depends on something else than its throws"
            probability = 1.0
            for branch, weights in self.script:
                probability *= weights[branch]
            yield probability, result
            while self.script:
                branch, weights = self.script.pop()
                left = [i for i in range(branch + 1, len(weights)) if weights[i] > 0]
                if left:
                    self.script.append((left[0], weights))
                    break
            else:
                return


class EnumeratedRng(Rng):
    """Makes the choices of `EnumeratedChoices`."""

    def __init__(self, choices: EnumeratedChoices) -> None:
        self.choices = choices

    def happens(self, probability: float) -> bool:
        return self.choices.draw([max(1.0 - probability, 0.0), min(max(probability, 0.0), 1.0)]) == 1

    def draw(self, weights: Tensor) -> int:
        return self.choices.draw(weights.tolist())


def plain_distribution(
    target: Toy, prefix: list[int], length: int, eos: frozenset[int] = frozenset(), processors: Sequence[Processor] = ()
) -> Distribution:
    """Compute the distribution of autoregressive sampling: of `length` tokens after `prefix`, or up to an end token."""
    distribution: Distribution = {(): 1.0}
    for _ in range(length):
        longer: Distribution = {}
        for tokens, probability in distribution.items():
            if tokens and tokens[-1] in eos:
                longer[tokens] = probability
                continue
            ids = torch.tensor([[*prefix, *tokens]])
            scores = target.logits(ids[0].tolist())[None]
            for processor in processors:
                scores = processor(ids, scores)
            for token, p in enumerate(scores[0].double().softmax(-1).tolist()):
                if p > 0:
                    longer[*tokens, token] = probability * p
        distribution = longer
    return distribution


def chi_square(counts: Mapping[K, int], distribution: Mapping[K, float]) -> float:
    """Return how many of its own deviations the statistic lies above its mean. Bins are merged to five expected at
    least."""
    trials = sum(counts.values())
    assert set(counts) <= set(distribution)
    bins, seen, expected = [], 0.0, 0.0
    for key, probability in sorted(distribution.items(), key=lambda item: item[1]):
        seen, expected = seen + counts.get(key, 0), expected + trials * probability
        if expected >= 5:
            bins.append((seen, expected))
            seen = expected = 0.0
    bins[-1] = (bins[-1][0] + seen, bins[-1][1] + expected)
    statistic = sum((count - mean) ** 2 / mean for count, mean in bins)
    return (statistic - (len(bins) - 1)) / sqrt(2 * (len(bins) - 1))
