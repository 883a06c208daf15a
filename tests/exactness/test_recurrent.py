"""Tests models with recurrent or convolutional states: with every kind of draft, texts equal those of `generate`, also
in batches of different lengths; and a pass over a chain gives the scores of single steps."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

import mmdec
from mmdec.compat import CACHE_ARGUMENT
from mmdec.errors import InputError
from mmdec.targets.families import FAMILIES
from mmdec.targets.probe import MAX_DIFFERENCE, PROBE_VOCABULARY, tree_path_difference
from mmdec.targets.recurrent_cache import MAX_BACKLOG, STATE_CACHE
from mmdec.targets.registry import make_target
from mmdec.targets.text import text_scorer
from mmdec.types import Draft, Needs, Verdict
from tests.exactness.pairwise import cover, each_value
from tests.exactness.quantised import weights_alone
from tests.support.grid import WHOLE, slow_but
from tests.support.random_drafter import RandomDrafter
from tests.support.recurrent import OWN, recurrent_config, recurrent_model

TRIED = sorted(name.removesuffix("ForCausalLM") for name in FAMILIES if name.removesuffix("ForCausalLM") in OWN)
KINDS_OF_STATES = ("FalconH1", "Lfm2", "Mamba2", "Qwen3Next")  # each with attention, convolutions or delta rules

GRID = {"family": TRIED, "drafter": ["lookup", "recycling", "wild"], "batch": [1, 4]}
CASES = cover(GRID, WHOLE)


@pytest.fixture(autouse=True)
def fresh() -> None:
    mmdec.default_statistics().clear()


def batch_of(family: str, rows: int, width: int = 21) -> dict[str, torch.Tensor]:
    """Return repetitive prompts, longer than any chunk, padded on the left."""
    rng = random.Random(family)
    ids = torch.tensor([([rng.randrange(3, PROBE_VOCABULARY) for _ in range(5)] * width)[:width] for _ in range(rows)])
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 4 * row] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


@pytest.mark.parametrize("family", slow_but(TRIED, KINDS_OF_STATES))
def test_a_pass_scores_a_chain_as_single_steps(family: str) -> None:
    kind: Any = getattr(transformers, f"{family}ForCausalLM")
    attention = "sdpa" if kind._supports_sdpa else "eager"
    assert tree_path_difference(kind, recurrent_config(family), attention, text_scorer) < MAX_DIFFERENCE / 50


@pytest.mark.parametrize("case", slow_but(CASES, each_value(CASES)), ids=lambda case: "-".join(map(str, case.values())))
def test_drafts_change_no_text(case: dict[str, Any]) -> None:
    family, drafter, batch = case["family"], case["drafter"], case["batch"]
    model, inputs = recurrent_model(family), batch_of(family, batch)
    options: dict[str, Any] = {"max_new_tokens": 26, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(**inputs, **options)  # type: ignore[operator]
    given: Any = RandomDrafter(0.5, expected.tolist(), 0.8) if drafter == "wild" else drafter
    result = mmdec.generate(model, inputs, given, num_speculative_tokens=(12, 6), **options)
    assert torch.equal(result.sequences, expected)
    if drafter == "wild":
        assert result.tokens_per_round > 1.2


@pytest.mark.parametrize("family", slow_but(TRIED, KINDS_OF_STATES))
def test_sampled_texts_are_those_of_the_same_seed(family: str) -> None:
    model, inputs = recurrent_model(family), batch_of(family, 1)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.7, "eos_token_id": None}
    torch.manual_seed(3)
    expected = model.generate(**inputs, pad_token_id=0, **options)  # type: ignore[operator]
    torch.manual_seed(3)
    drafter: Any = RandomDrafter(0.1, expected.tolist(), 0.8)
    result = mmdec.generate(model, inputs, drafter, num_speculative_tokens=5, pad_token_id=0, **options)
    assert torch.equal(result.sequences, expected)


@pytest.mark.parametrize("family", slow_but(TRIED, KINDS_OF_STATES))
def test_padding_on_the_left_changes_no_row(family: str) -> None:
    """Else a batch of transformers itself would be wrong, and would have to be refused."""
    model, inputs = recurrent_model(family), batch_of(family, 3)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    together = model.generate(**inputs, **options)  # type: ignore[operator]
    for row, mask in enumerate(inputs["attention_mask"]):
        single = model.generate(inputs["input_ids"][row : row + 1, mask.bool()], **options)  # type: ignore[operator]
        assert torch.equal(together[row, -12:], single[0, -12:])


@pytest.mark.parametrize("family", ["FalconH1", "Lfm2", "Mamba2", "Qwen3Next"])
def test_a_small_model_with_states_drafts(family: str) -> None:
    small, large = recurrent_model(family), recurrent_model("Qwen3_5")
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    inputs = batch_of(family, 2)
    for model in (small, large):
        expected = model.generate(**inputs, **options)  # type: ignore[operator]
        for drafter in (small, mmdec.small_model(small, inner="lookup")):
            result = mmdec.generate(model, inputs, drafter, num_speculative_tokens=(8, 4), **options)
            assert torch.equal(result.sequences, expected)
            assert result.tokens_per_round > 3 or model is large  # it knows its own text


@pytest.mark.parametrize("family", ["Bamba", "Lfm2", "Qwen3Next"])
def test_quantised_weights_are_drafted(family: str) -> None:
    model, inputs = weights_alone(recurrent_model(family)), batch_of(family, 1)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(**inputs, **options)
    drafter: Any = RandomDrafter(0.5, expected.tolist(), 0.9)
    result = mmdec.generate(model, inputs, drafter, num_speculative_tokens=5, **options)
    assert torch.equal(result.sequences, expected)
    assert result.tokens_per_round > 1.2


@pytest.mark.parametrize("family", ["Jamba", "Lfm2", "Mamba2", "OlmoHybrid", "Qwen3Next", "Zamba2"])
def test_a_cache_is_left_as_generate_leaves_it(family: str) -> None:
    model, inputs = recurrent_model(family), batch_of(family, 1)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    name = STATE_CACHE if family == "Mamba2" and CACHE_ARGUMENT != "cache" else CACHE_ARGUMENT
    options: dict[str, Any] = {"max_new_tokens": 15, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(**inputs, **{name: caches[0]}, **options)  # type: ignore[operator]
    drafter: Any = RandomDrafter(0.5, expected.tolist(), 0.7)
    plug = mmdec.speculate(drafter, num_speculative_tokens=4)
    result = model.generate(**inputs, **{name: caches[1]}, **options, custom_generate=plug)  # type: ignore[operator]
    assert torch.equal(result, expected)
    for stock, own in zip(caches[0].layers, caches[1].layers, strict=True):
        for states in ("conv_states", "recurrent_states"):
            for index, state in getattr(stock, states, {}).items():
                if state is not None:
                    torch.testing.assert_close(getattr(own, states)[index], state, rtol=1e-3, atol=1e-4)
        if getattr(stock, "keys", None) is not None:
            torch.testing.assert_close(own.keys, stock.keys, rtol=1e-3, atol=1e-4)
    if family != "Mamba2":  # its cache does not say how many tokens it has read
        more = {"input_ids": expected, "attention_mask": torch.ones_like(expected)}
        turns = [model.generate(**more, **{CACHE_ARGUMENT: cache}, **options) for cache in caches]  # type: ignore[operator]
        assert torch.equal(*turns)


def test_without_recurrent_states_nothing_is_read_twice() -> None:
    """A convolution's inputs are cut at any column; a recurrent state is kept whole, and its tokens are a backlog."""
    backlogs = {}
    for family in ("Lfm2", "Qwen3Next"):
        target = make_target(recurrent_model(family))
        session = target.prefill({"input_ids": torch.arange(3, 12)[None]}, Needs()).session
        ones, passes = torch.ones(1, dtype=torch.long), 0
        for _ in range(MAX_BACKLOG + 2):
            draft = Draft(torch.tensor([[5, 6, 7]]), torch.tensor([[-1, 0, 1]]), ones * 3)
            target.score(session, draft)
            accepted = Verdict(torch.tensor([[0]]), ones, ones == 0, ones[:, None], ones)
            target.commit(session, accepted)
            passes = max(passes, len(session.store.backlogs[0]))
        backlogs[family] = passes, session.store.passes
    assert backlogs == {"Lfm2": (0, 0), "Qwen3Next": (MAX_BACKLOG + 1, 1)}


def test_a_tree_is_refused_by_the_target() -> None:
    target = make_target(recurrent_model("Mamba2"))
    session = target.prefill({"input_ids": torch.arange(3, 12)[None]}, Needs()).session
    with pytest.raises(InputError, match="must be a chain"):
        target.score(session, Draft(torch.tensor([[5, 6, 7]]), torch.tensor([[-1, 0, 0]]), torch.tensor([3])))


STRANGE = [
    (
        "RecurrentGemma",
        f"must keep its states in `{CACHE_ARGUMENT}`, but RecurrentGemmaForCausalLM keeps them elsewhere",
    ),
    ("MiniMax", "MiniMaxForCausalLM .*of its own"),
]


@pytest.mark.parametrize(("family", "reason"), STRANGE)
def test_states_outside_the_cache_are_refused_by_name(family: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        make_target(recurrent_model(family))


@pytest.mark.parametrize("family", ["Rwkv", "xLSTM"])
def test_other_kinds_of_states_are_refused_by_name(family: str) -> None:
    kind: Any = getattr(transformers, f"{family}ForCausalLM")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": PROBE_VOCABULARY, "num_heads": 2, "num_blocks": 2}
    with pytest.raises(InputError, match=f"{family}ForCausalLM"):
        make_target(kind(kind.config_class(**sizes)))
