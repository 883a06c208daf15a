"""Tests `Sequences`: ids as in plain decoding, each row's logits processors, and the ends of rows."""

from __future__ import annotations

from random import Random
from threading import Lock

import pytest
import torch
from torch import Tensor, nn

from mmdec.core.sampling import (
    Criterion,
    KeyedSample,
    Rng,
    Sequences,
    Stop,
    Suppression,
    keyed_generator,
    most_probable,
    most_probable_each,
    transformers_sample,
)
from mmdec.errors import InputError

PROMPT = torch.tensor([[0, 5, 6], [7, 8, 9]])


class Counter:
    """Counts its calls: a processor with a state."""

    def __init__(self) -> None:
        self.calls = 0
        self.network = nn.Linear(1, 1)

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores + self.calls


def test_rows_grow_on_their_own() -> None:
    text = Sequences(PROMPT, Stop(200), [Counter()])
    for token in range(150):  # beyond the first buffer
        text.tokens[0].append(token)
    text.tokens[1].append(3)
    assert text.ids(0).tolist() == [[0, 5, 6, *range(150)]]
    assert text.ids(1).tolist() == [[7, 8, 9, 3]]
    assert text.ids(1).is_contiguous()
    assert (text.remaining_tokens(0), text.remaining_tokens(1)) == (47, 196)
    assert text.padded_ids(99).tolist() == [[0, 5, 6, *range(150)], [7, 8, 9, 3, *[99] * 149]]
    assert PROMPT.tolist() == [[0, 5, 6], [7, 8, 9]]


def test_a_row_kept_by_a_processor_stays_as_it_was() -> None:
    text = Sequences(PROMPT, Stop(200), [Counter()])
    row = text.ids(0)
    for token in range(1, 150):
        text.tokens[0].append(token)
    assert row.tolist() == [[0, 5, 6]]


@pytest.mark.parametrize("processors", [[], [Counter()]])
def test_a_row_is_always_its_prompt_and_tokens(processors: list[Counter]) -> None:
    """Tokens are written when a row is read: rows are read at odd times."""
    random, text = Random(0), Sequences(PROMPT, Stop(2000), processors)
    expected: list[list[int]] = [[], []]
    for _ in range(2000):
        row, move = random.randrange(2), random.random()
        if move < 0.5:
            expected[row].append(random.randrange(100))
            text.tokens[row].append(expected[row][-1])
        else:
            assert text.ids(row).tolist() == [[*PROMPT[row].tolist(), *expected[row]]]
    assert max(map(len, expected)) > 128  # beyond the first buffer
    assert PROMPT.tolist() == [[0, 5, 6], [7, 8, 9]]


def test_suppressing_all_positions_at_once_equals_one_by_one() -> None:
    tokens = torch.tensor([1, 2])
    text = Sequences(PROMPT, Stop(99), [Suppression(tokens), Suppression(torch.tensor([3]), only_at=3)])
    logits = torch.tensor([0.0, 5.0, 4.0, 3.0, 2.0], dtype=torch.bfloat16)
    assert text.processed_logits(0, logits).tolist() == [[0, -torch.inf, -torch.inf, -torch.inf, 2]]
    assert (text.only_suppresses(0), text.only_suppresses(1)) == (False, False)  # the first position is another
    text.tokens[0].append(4)
    assert (text.only_suppresses(0), text.only_suppresses(1)) == (True, False)
    assert text.processed_logits(0, logits).tolist() == [[0, -torch.inf, -torch.inf, 3, 2]]
    assert torch.equal(text.suppress(logits), text.processed_logits(0, logits)[0])
    assert logits.tolist() == [0, 5, 4, 3, 2]
    mixed = Sequences(PROMPT, Stop(99), [Suppression(tokens), Counter()])
    assert not mixed.only_suppresses(0)  # somebody else is to be asked
    assert Sequences(PROMPT, Stop(99)).only_suppresses(0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_most_probable_of_all_positions_are_those_of_each(dtype: torch.dtype) -> None:
    """Ties go to the first; scores that are equal in the plain loop's float32 are ties."""
    text = Sequences(PROMPT, Stop(99))
    logits = torch.randint(-3, 4, (2, 50, 17), generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[0, 0] = 1 + 1e-12 * torch.arange(17, dtype=torch.float64)
    logits[0, 1] = -torch.inf
    logits[1, 2, 5] = torch.nan
    each = [[most_probable(text.processed_logits(0, node), text, 0) for node in row] for row in logits]
    assert most_probable_each(text.suppress(logits)) == each
    assert each[0][:2] == [0, 0]


@pytest.mark.parametrize(
    ("stop", "tokens", "ends"),
    [
        (Stop(6), [1, 2, 3], [False, False, True]),
        (Stop(99, frozenset({2, 4})), [1, 4], [False, True]),
        (Stop(99, criteria=[lambda ids, scores: ids[:, -1] == ids[:, 0]]), [1, 7], [False, True]),
    ],
)
def test_end_criteria_are_met(stop: Stop, tokens: list[int], ends: list[bool]) -> None:
    text = Sequences(PROMPT, stop)
    assert [text.append(1, token) for token in tokens] == ends


def test_all_criteria_are_asked_for_every_token() -> None:
    asked: list[str] = []

    def criterion(name: str, answer: bool) -> Criterion:
        def ask(ids: Tensor, scores: Tensor | None) -> Tensor:
            asked.append(name)
            return torch.tensor([answer])

        return ask

    text = Sequences(PROMPT, Stop(99, frozenset({1}), [criterion("a", True), criterion("b", False)]))
    assert text.append(0, 1)
    assert text.append(0, 2)
    assert asked == ["a", "b", "a", "b"]


def test_each_row_has_processors_of_its_own_that_share_networks() -> None:
    counter = Counter()
    text = Sequences(PROMPT, Stop(99), [counter])
    logits = torch.zeros(4, dtype=torch.bfloat16)
    assert [float(text.processed_logits(0, logits)[0, 0]) for _ in range(3)] == [1, 2, 3]
    assert float(text.processed_logits(1, logits)[0, 0]) == 1
    assert text.processed_logits(1, logits).dtype == torch.float32
    assert counter.calls == 3
    assert text.processors is not None
    (other,) = text.processors[1]
    assert isinstance(other, Counter)
    assert other.network is counter.network


def test_processors_may_write_into_the_logits() -> None:
    text = Sequences(PROMPT[:1], Stop(99), [lambda ids, scores: scores.fill_(9.0)])
    logits = torch.zeros(4)
    text.processed_logits(0, logits)
    assert logits.sum() == 0


def test_prompts_lengths_and_processors_that_cannot_work_are_refused() -> None:
    with pytest.raises(InputError, match="`input_ids` must hold at least one token"):
        Sequences(torch.zeros(2, 0, dtype=torch.long), Stop(9))
    with pytest.raises(InputError, match="`max_length` must be above the prompt's 3 tokens, but is 3"):
        Sequences(PROMPT, Stop(3))

    class Locked:
        def __init__(self) -> None:
            self.lock = Lock()

        def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
            return scores

    Sequences(PROMPT[:1], Stop(9), [Locked()])  # alone it need not be copied
    with pytest.raises(InputError, match=r"`logits_processor` must be copyable for a batch.*Locked.*lock"):
        Sequences(PROMPT, Stop(9), [Locked()])


def test_choices_follow_the_scores() -> None:
    text = Sequences(PROMPT, Stop(99))
    scores = torch.tensor([[0.0, 2.0, 2.0, -torch.inf]])
    assert most_probable(scores, text, 0) == 1
    torch.manual_seed(0)
    drawn = {transformers_sample(scores, text, 0) for _ in range(50)}
    assert drawn == {0, 1, 2}
    assert {KeyedSample(seed)(scores, text, 0) for seed in range(50)} == {0, 1, 2}
    assert KeyedSample(1)(torch.tensor([[-torch.inf, 0.0]]), text, 0) == 1


def test_each_key_has_random_numbers_of_its_own() -> None:
    cpu = torch.device("cpu")

    def throw(*key: int | str) -> float:
        return float(torch.rand((), generator=keyed_generator(cpu, *key), dtype=torch.float64))

    assert throw(1, "token", 2, 3) == throw(1, "token", 2, 3)
    keys = [(seed, kind, row, at) for seed in (0, 2**62) for kind in ("a", "b") for row in (0, 1, 23) for at in (0, 3)]
    assert len({throw(*key) for key in keys}) == len(keys)
    assert throw(1, "a", 12, 3) != throw(1, "a", 1, 23)


def test_dice_follow_their_probabilities() -> None:
    rng = Rng(torch.Generator().manual_seed(0))
    assert all(rng.happens(1.0) for _ in range(100))
    assert not any(rng.happens(0.0) for _ in range(100))
    assert 30 < sum(rng.happens(0.5) for _ in range(100)) < 70
    assert {rng.draw(torch.tensor([0.0, 3.0, 5.0], dtype=torch.float64)) for _ in range(50)} == {1, 2}
