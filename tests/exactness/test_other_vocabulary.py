"""Tests that drafts of a small model with another vocabulary change no output: greedy and sampled, in batches of
different lengths, with and without pictures."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

import mmdec
from mmdec.core.budget import FixedBudget
from mmdec.core.loop import decode
from mmdec.core.sampling import Sequences, Stop
from mmdec.core.verify import ResidualRule, SamplingState
from mmdec.drafters.small_model.other_vocabulary import OtherVocabularyDrafter
from mmdec.targets.text import TextTarget
from tests.exactness.letter_tokenizer import Letters, alphabet, renamed, shuffled
from tests.exactness.pairwise import cover, each_value
from tests.exactness.text_models import MODELS
from tests.support.blended_toy import Toy
from tests.support.draft_networks import texts
from tests.support.grid import WHOLE, slow_but
from tests.support.tiny_text import VOCABULARY, language_model, prompts
from tests.support.tiny_vlm import KINDS, WORDS, Picture, batch_of, vision_model
from tests.support.tiny_vlm import VOCABULARY as SEEN

OWN = Letters(alphabet(VOCABULARY - 3))
PAIRED = Letters([*alphabet(40), *(a + b for a, b in zip(alphabet(18), alphabet(40)[20:38], strict=True))])
OTHER = shuffled(VOCABULARY - 3, 30, 1)


def small(kind: str = "llama", tokenizer: Letters = OTHER, **sizes: Any) -> Any:
    return language_model(kind, 3, vocab_size=len(tokenizer), num_hidden_layers=1, **sizes)


def drafter(target_tokenizer: Letters, kind: str = "llama", positions: int | None = None, size: int = 2**31) -> Any:
    return OtherVocabularyDrafter(TextTarget(small(kind)), OTHER, target_tokenizer, positions, size)


GRID: dict[str, Sequence[Any]] = {
    "tokenizer": ["letters", "pairs"],
    "models": [("llama", "gpt2"), ("qwen2", "llama")],  # the target and the drafter
    "nodes": [None, 1, 5, (12, 3)],
    "batch": [1, 4],
}
CASES = cover(GRID, WHOLE)


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
@pytest.mark.parametrize("case", slow_but(CASES, each_value(CASES)), ids=lambda case: "-".join(map(str, case.values())))
def test_greedy_output_is_the_models_own(case: dict[str, Any]) -> None:
    """With pairs the text goes back by other tokens than the model chose."""
    tokenizer = OWN if case["tokenizer"] == "letters" else PAIRED
    (target, kind), nodes = case["models"], case["nodes"]
    model, inputs = MODELS[target], prompts(case["batch"])
    options: dict[str, Any] = {"max_new_tokens": 25, "do_sample": False}
    expected = model.generate(**inputs, **options)  # type: ignore[operator]
    result = mmdec.generate(model, inputs, drafter(tokenizer, kind), num_speculative_tokens=nodes, **options)
    assert torch.equal(result.sequences, expected)
    assert nodes is None or sum(sum(round_.drafted) for round_ in result.rounds)


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
@pytest.mark.parametrize("batch", [1, 4])
def test_the_model_itself_under_other_ids_is_always_right(batch: int) -> None:
    sizes: dict[str, Any] = {"eos_token_id": None}
    model: Any = language_model("llama", 5, **sizes)
    other = shuffled(VOCABULARY - 3, 0, 2)
    twin = renamed(model, lambda: language_model("llama", 5, **sizes), OWN, other)
    drafts = OtherVocabularyDrafter(TextTarget(twin), other, OWN)
    inputs = prompts(batch)
    suppressed: dict[str, Any] = {"suppress_tokens": [0, 1, 2], "max_new_tokens": 25, "do_sample": False}
    expected = model.generate(**inputs, **suppressed)
    result = mmdec.generate(model, inputs, drafts, num_speculative_tokens=3, **suppressed)
    assert torch.equal(result.sequences, expected)
    assert result.tokens_per_round > 3


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
@pytest.mark.parametrize("seed", range(3))
def test_sampling_at_batch_one_is_the_models_own(seed: int) -> None:
    model, inputs, drafts = MODELS["llama"], prompts(1, seed), drafter(OWN)  # made before: it sets the seed
    options: dict[str, Any] = {"max_new_tokens": 30, "do_sample": True, "temperature": 0.7, "top_k": 20}
    torch.manual_seed(seed)
    expected = model.generate(**inputs, **options)  # type: ignore[operator]
    torch.manual_seed(seed)
    result = mmdec.generate(model, inputs, drafts, num_speculative_tokens=4, **options)
    assert torch.equal(result.sequences, expected)


def test_residual_sampling_keeps_the_targets_distribution() -> None:
    """Texts of three tokens by rule "residual" against their probabilities, chi-square."""
    toy = Toy(3, seed=12)
    target, letters = Toy(3, seed=13, blend=toy, share=0.5), Letters(["a", "b", "c"], ())
    rows = 1200
    ids = torch.tensor([[1, 2]] * rows)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    text, rule = Sequences(ids, Stop(5, frozenset())), ResidualRule(SamplingState(4))
    drafts = OtherVocabularyDrafter(toy, letters, letters)
    rounds = list(decode(target, inputs, text, rule, drafts, FixedBudget(2)))
    accepted = sum(sum(round_.accepted) for round_ in rounds)
    seen = Counter(tuple(row) for row in texts(rounds, rows))
    chi = 0.0
    for outcome in product(range(3), repeat=3):
        probability = 1.0
        for place, token in enumerate(outcome):
            probability *= float(target.logits([1, 2, *outcome[:place]]).softmax(-1)[token])
        chi += (seen[outcome] - rows * probability) ** 2 / (rows * probability)
    assert chi < 55  # 26 degrees of freedom: one in a thousand
    assert accepted > rows / 4


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
@pytest.mark.parametrize("pictures", [(1,), (1, 0, 2, 3)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_model_drafts_for_one_that_sees(kind: str, pictures: tuple[int, ...]) -> None:
    """The pictures' columns are dropped, and special tokens are no text."""
    letters = Letters(alphabet(SEEN - 10), tuple(f"<{number}>" for number in range(6)))
    letters.words += ["<58>", "<59>", "<60>", "<61>", "<62>", "<63>"]
    letters.all_special_ids += range(SEEN - 4, len(letters.words))
    model, rng = vision_model(kind), random.Random(3)
    rows = [
        [rng.choices(WORDS, k=4), *(Picture.random(number + row) for number in range(count)), rng.choices(WORDS, k=3)]
        for row, count in enumerate(pictures)
    ]
    inputs = batch_of(kind, rows)
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    expected = model.generate(**inputs, **options)
    result = mmdec.generate(model, inputs, drafter(letters, size=SEEN), num_speculative_tokens=4, **options)
    assert torch.equal(result.sequences, expected)
    assert sum(sum(round_.drafted) for round_ in result.rounds)


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
def test_nothing_is_drafted_beyond_its_positions() -> None:
    model, inputs = MODELS["llama"], prompts(4)
    options: dict[str, Any] = {"max_new_tokens": 25, "do_sample": False}
    expected = model.generate(**inputs, **options)  # type: ignore[operator]
    drafts = OtherVocabularyDrafter(TextTarget(small("gpt2", max_position_embeddings=20)), OTHER, OWN, 20)
    result = mmdec.generate(model, inputs, drafts, num_speculative_tokens=4, **options)
    assert torch.equal(result.sequences, expected)
