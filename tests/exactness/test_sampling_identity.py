"""Tests that sampling with drafts gives the same tokens as sampling without, for any drafter, batch and tree."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
import torch
from torch import Tensor

from mmdec.core.sampling import KeyedSample, Stop, most_probable, transformers_sample
from mmdec.core.verify import MatchRule
from tests.support.grid import slow_but
from tests.support.toy_target import (
    RandomBudget,
    Scripted,
    Toy,
    padded,
    plain,
    random_tree_drafts,
    rejected_drafts,
    run,
    target_drafts,
)

LENGTH = 24  # of prompt and text
STOP = Stop(LENGTH, frozenset({0}))
DRAFTERS: list[Callable[[Toy], Scripted]] = [
    lambda target: Scripted(target_drafts(target)),
    lambda target: Scripted(rejected_drafts(target)),
    lambda target: Scripted(random_tree_drafts(target, [0]), seed=1),
    lambda target: Scripted(random_tree_drafts(target, [0]), seed=2),
]


def prompts(random: Random, batch: int, vocab: int) -> list[list[int]]:
    return [[random.randrange(1, vocab) for _ in range(random.randint(1, 6))] for _ in range(batch)]


def cooler(ids: Tensor, scores: Tensor) -> Tensor:
    """Return a temperature, a ban of what was said last, and the best few alone."""
    scores = (scores / 0.8).index_fill(1, ids[0, -1:], -1.0)
    return scores.masked_fill(scores < scores.topk(4).values[:, -1:], -torch.inf)


@pytest.mark.parametrize("batch", slow_but(range(1, 9), (1, 2, 5)))
def test_keyed_sampling_ignores_drafts(batch: int) -> None:
    """12 runs of each size with four drafters: 432 sequences, 1728 times drafted."""
    random = Random(batch)
    accepted = 0
    for seed in range(12):
        vocab = random.choice([6, 12, 40])
        target = Toy(vocab, seed)
        given = prompts(random, batch, vocab)
        processors = [cooler] if seed % 2 else []
        rule = MatchRule(KeyedSample(seed))
        expected, rounds = run(target, given, STOP, rule, None, None, processors)
        assert len(rounds) == max(map(len, expected.tokens))
        for make in DRAFTERS:
            budget = RandomBudget(Random(seed))
            got, _ = run(target, given, STOP, rule, make(target), budget, processors)
            assert got.tokens == expected.tokens
            accepted += sum(map(sum, budget.seen))
    assert accepted > 50 * batch  # else nothing was shown


def test_keyed_sampling_is_plain_decoding_with_noise_of_a_place() -> None:
    """A row's token depends on seed, row, place and the text before it alone: as in a loop over that row."""
    target, rule = Toy(12), MatchRule(KeyedSample(5))
    given = prompts(Random(0), 8, 12)
    text, _ = run(target, given, STOP, rule, Scripted(random_tree_drafts(target)))
    ids = padded(given)["input_ids"]
    for row, prompt in enumerate(given):
        tokens = text.tokens[row]

        def choose(scores: Tensor, index: int, row: int = row, tokens: list[int] = tokens) -> int:
            text.tokens[row] = tokens[:index]
            return KeyedSample(5)(scores, text, row)

        assert plain(target, ids[row : row + 1], ids.shape[1] - len(prompt), STOP, choose) == tokens


@pytest.mark.parametrize("drafted", [False, True])
def test_equal_prompts_get_different_texts(drafted: bool) -> None:
    target = Toy(40)
    rule = MatchRule(KeyedSample(3))
    text, _ = run(target, [[7, 8]] * 8, Stop(LENGTH), rule, Scripted(random_tree_drafts(target)) if drafted else None)
    assert len(set(map(tuple, text.tokens))) == 8
    again, _ = run(target, [[7, 8]] * 8, Stop(LENGTH), rule)
    assert again.tokens == text.tokens
    assert len({row[0] for row in text.tokens}) > 2  # the first tokens differ already: equal texts, other noise
    fewer, _ = run(target, [[7, 8]] * 3, Stop(LENGTH), rule)
    assert fewer.tokens == text.tokens[:3]
    other_text, _ = run(target, [[7, 8]] * 8, Stop(LENGTH), MatchRule(KeyedSample(4)))
    assert all(other_row != row for other_row, row in zip(other_text.tokens, text.tokens, strict=True))


def test_sampling_at_batch_one_equals_stock() -> None:
    """100 sequences and four drafters call `torch.multinomial` once a token on torch's own generator, and no more."""
    random = Random(0)
    rule = MatchRule(transformers_sample)
    for seed in range(100):
        target = Toy(random.choice([6, 12, 40]), seed % 10)
        given = prompts(random, 1, target.vocab_size)
        processors = [cooler] if seed % 2 else []
        torch.manual_seed(seed)
        expected = plain(
            target,
            torch.tensor(given),
            0,
            STOP,
            lambda scores, index: int(torch.multinomial(scores.softmax(-1), 1)),
            processors,
        )
        left = torch.rand(())
        for make in DRAFTERS:
            torch.manual_seed(seed)
            got, _ = run(target, given, STOP, rule, make(target), RandomBudget(Random(seed)), processors)
            assert got.tokens == [expected]
            assert torch.rand(()) == left  # the generator stands where plain decoding leaves it


def test_a_shared_generator_fails_the_comparison() -> None:
    """Noise keyed by the number of draws, as by a shared generator, depends on other rows and on drafts."""
    target = Toy(12)
    given = prompts(Random(1), 4, 12)

    def texts(drafter: Scripted | None) -> list[list[int]]:
        shared = torch.Generator().manual_seed(0)
        rule = MatchRule(lambda scores, text, row: int(torch.multinomial(scores.softmax(-1), 1, generator=shared)))
        return run(target, given, STOP, rule, drafter)[0].tokens

    assert texts(None) == texts(None)
    assert texts(None) != texts(Scripted(target_drafts(target)))
    greedy, _ = run(target, given, STOP, MatchRule(most_probable))
    assert greedy.tokens != texts(None)
