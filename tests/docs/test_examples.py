"""Tests the target and the rule of docs/examples in mmdec's decoding loop, and that they stay short."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import mmdec
from docs.examples.toy_drafter import ToyDrafter
from docs.examples.toy_rule import AmongBest
from docs.examples.toy_target import PairTarget
from mmdec.core.budget import Budget, FixedBudget
from mmdec.core.loop import decode
from mmdec.core.sampling import Choice, Sequences, Stop, most_probable
from mmdec.core.verify import RULES, MatchRule, Rule
from mmdec.errors import InputError
from mmdec.pretrained.vlm import load_vlm
from mmdec.types import Drafter, Round, Target
from tests.support.tiny_text import language_model
from tests.support.tiny_vlm_folder import write
from tests.support.toy_target import Scripted, Toy, random_tree_drafts

ROOT = Path(__file__).parents[2]
VOCABULARY, LENGTH = 7, 40


@pytest.fixture(scope="module")
def target() -> PairTarget:
    random = Random(0)
    return PairTarget([random.randrange(1, VOCABULARY) for _ in range(300)], VOCABULARY)


@pytest.fixture(scope="module")
def prompt() -> Tensor:
    return torch.tensor([[5, 6, 1], [1, 2, 3], [2, 2, 2]])


def run(
    target: Target, prompt: Tensor, rule: Rule, drafter: Drafter | None, budget: Budget
) -> tuple[list[list[int]], list[Round]]:
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    text = Sequences(prompt, Stop(LENGTH, frozenset({0})))
    rounds = list(decode(target, inputs, text, rule, drafter, budget))
    return text.tokens, rounds


def plain(target: PairTarget, row: list[int]) -> list[int]:
    """Return greedy decoding by hand."""
    text = list(row)
    while len(text) < LENGTH and text[-1] != 0:
        text.append(int(target.counts[text[-2], text[-1]].argmax()))
    return text[len(row) :]


def test_the_target_decodes_as_by_hand(target: PairTarget, prompt: Tensor) -> None:
    expected = [plain(target, row) for row in prompt.tolist()]
    assert run(target, prompt, MatchRule(), None, FixedBudget(0))[0] == expected
    drafted, rounds = run(target, prompt, MatchRule(), ToyDrafter(), FixedBudget(5))
    assert drafted == expected
    assert sum(sum(round_.accepted) for round_ in rounds) > 0


@pytest.mark.parametrize("seed", range(5))
def test_the_target_scores_trees_of_any_shape(target: PairTarget, prompt: Tensor, seed: int) -> None:
    """Branches, twins, empty drafts; rows that end before others."""
    guesses = random_tree_drafts(Toy(VOCABULARY, seed))
    expected = [plain(target, row) for row in prompt.tolist()]
    assert run(target, prompt, MatchRule(), Scripted(guesses, seed), FixedBudget(6, 3))[0] == expected


def test_the_rule_with_k_1_is_greedy(prompt: Tensor) -> None:
    target = Toy(VOCABULARY, 3)
    drafter = Scripted(random_tree_drafts(target), 0)
    greedy = run(target, prompt, MatchRule(), None, FixedBudget(0))[0]
    assert run(target, prompt, AmongBest(1), drafter, FixedBudget(6, 3))[0] == greedy


def test_the_rule_takes_drafts_among_the_best_and_no_others(prompt: Tensor) -> None:
    target = Toy(VOCABULARY, 3)
    greedy = run(target, prompt, MatchRule(), None, FixedBudget(0))[0]
    tokens, rounds = run(target, prompt, AmongBest(2), Scripted(random_tree_drafts(target), 1), FixedBudget(6, 3))
    assert tokens != greedy  # it is lossy
    assert sum(sum(round_.accepted) for round_ in rounds) > 0
    for row, own in zip(prompt.tolist(), tokens, strict=True):
        for index, token in enumerate(own):
            assert token in target.logits([*row, *own[:index]]).topk(2).indices.tolist()


def test_a_registered_rule_has_a_name_in_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "among-best", RULES["greedy"])  # so that other tests do not see the rule
    made = list[Choice]()

    @mmdec.register_rule("among-best", lossless=False, samples=False)
    def among_best(choice: Choice) -> Rule:
        made.append(choice)
        return AmongBest(1)

    rule: Any = "among-best"
    model, ids = language_model(eos_token_id=None), torch.tensor([[5, 6, 7, 8, 5, 6]])
    options: dict[str, Any] = {"num_speculative_tokens": 4, "max_length": LENGTH}
    found = mmdec.generate(model, ids, rule=rule, **options)
    assert not found.lossless
    assert torch.equal(found.sequences, mmdec.generate(model, ids, rule="greedy", **options).sequences)
    with pytest.raises(InputError, match="`rule` must fit `do_sample`, but is 'among-best' with do_sample=True"):
        mmdec.generate(model, ids, rule=rule, do_sample=True, **options)
    vlm = load_vlm(write(tmp_path / "tiny"), "cpu")
    picture = torch.zeros(24, 40, 3, dtype=torch.uint8).numpy()
    assert not mmdec.describe(picture, model=vlm, rule=rule, max_new_tokens=3).lossless
    assert made == [most_probable, most_probable]  # once for each call


@pytest.mark.parametrize("name", ["toy_target", "toy_rule"])
def test_examples_are_short(name: str) -> None:
    lines = (ROOT / "docs" / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith("@dataclass"))
    assert len([line for line in lines[begin:] if line.strip()]) <= 40
