"""Tests that a small model whose chains are drafted, or that reads a part of the prompt, changes no output."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM

import mmdec
from mmdec.errors import InputError
from mmdec.generation.speculation import DecodingOptions, Speculation
from tests.exactness.pairwise import cover, each_value
from tests.exactness.text_models import MODELS, SMALL
from tests.support.grid import WHOLE, slow_but
from tests.support.tiny_text import VOCABULARY, language_model, prompts

OPTIONS: dict[str, Any] = {"max_new_tokens": 25, "do_sample": False}
GRID: dict[str, Sequence[Any]] = {
    "model": list(MODELS),
    "inner": [None, "lookup", "recycling"],
    "prompt": [None, 16, "last two"],
    "nodes": [None, 1, 6, (12, 3)],
    "batch": [1, 4],
}
CASES = cover(GRID, WHOLE)


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
@pytest.mark.parametrize("case", slow_but(CASES, each_value(CASES)), ids=lambda case: "-".join(map(str, case.values())))
def test_greedy_output_is_the_models_own(case: dict[str, Any]) -> None:
    model, inputs = MODELS[case["model"]], prompts(case["batch"])
    prompt = (lambda ids: ids[-2:]) if case["prompt"] == "last two" else case["prompt"]
    drafter = mmdec.small_model(SMALL, inner=case["inner"], prompt=prompt)
    expected = model.generate(**inputs, **OPTIONS)  # type: ignore[operator]
    result = mmdec.generate(model, inputs, drafter, num_speculative_tokens=case["nodes"], **OPTIONS)
    assert torch.equal(result.sequences, expected)
    assert case["nodes"] is None or sum(sum(round_.drafted) for round_ in result.rounds)


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("rule", ["sampled", "residual"])
def test_sampled_output_does_not_depend_on_the_inner_drafter(rule: Any, batch: int) -> None:
    inputs, options = prompts(batch), {**OPTIONS, "do_sample": True}
    results = [
        mmdec.generate(MODELS["llama"], inputs, drafter, rule=rule, num_speculative_tokens=6, seed=3, **options)
        for drafter in (SMALL, mmdec.small_model(SMALL, inner="lookup"))
    ]
    assert torch.equal(results[0].sequences, results[1].sequences)
    assert [round_.drafted for round_ in results[0].rounds] == [round_.drafted for round_ in results[1].rounds]


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
@pytest.mark.parametrize("inner", ["lookup", "recycling"])
def test_a_model_drafts_for_itself_in_fewer_passes(inner: str) -> None:
    """The whole chain is accepted, and the small model's passes, counted in its first layer, are fewer."""
    model, inputs, counts = language_model("llama"), prompts(1), list[int]()
    options = {**OPTIONS, "eos_token_id": None}
    for drafter in (language_model("llama"), mmdec.small_model(small := language_model("llama"), inner=inner)):
        network: Any = drafter if not counts else small
        passes: list[int] = []
        handle = network.model.layers[0].register_forward_pre_hook(lambda *_, seen=passes: seen.append(1))
        result = mmdec.generate(model, inputs, drafter, num_speculative_tokens=5, **options)
        handle.remove()
        assert all(round_.accepted == round_.drafted for round_ in result.rounds)
        counts.append(len(passes))
    assert counts[1] < counts[0]


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
@pytest.mark.parametrize(("kind", "batch"), [("gpt2", 1), ("gpt2", 4), ("gpt_neo", 1)])
def test_the_small_model_stays_within_its_positions(kind: str, batch: int) -> None:
    torch.manual_seed(4)
    if kind == "gpt2":
        small = language_model("gpt2", 4, num_hidden_layers=1, max_position_embeddings=24)
    else:
        sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48}
        layers: dict[str, Any] = {"num_layers": 2, "attention_types": [[["global"], 2]]}
        small = GPTNeoForCausalLM(GPTNeoConfig(max_position_embeddings=24, **sizes, **layers)).eval()
    model, inputs = MODELS["llama"], prompts(batch)
    expected = model.generate(**inputs, **OPTIONS)  # type: ignore[operator]
    for nodes in (1, 4, 9):
        drafter = mmdec.small_model(small, inner="lookup")
        result = mmdec.generate(model, inputs, drafter, num_speculative_tokens=nodes, **OPTIONS)
        assert torch.equal(result.sequences, expected)
        assert sum(sum(round_.drafted) for round_ in result.rounds)


def test_it_is_made_once_for_each_target_and_copied_as_its_arguments() -> None:
    source = mmdec.small_model(SMALL, inner="lookup", prompt=32)
    drafter = source.drafter_for(MODELS["llama"])
    assert drafter is source.drafter_for(MODELS["llama"])
    assert drafter is not source.drafter_for(MODELS["qwen2"])
    assert drafter is not None
    assert drafter.name.startswith("small-model-10-lookup-1-3-prompt-32")
    loop = pickle.loads(pickle.dumps(Speculation(DecodingOptions(source))))
    copy = loop.drafter_for(MODELS["llama"])
    assert copy.name.startswith("small-model-10-lookup-1-3-prompt-32")
    assert loop.networks


@pytest.mark.parametrize("model", ["lookup", "/nowhere", 3, None, b"x", "a\0b"])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(InputError, match=r"`model` must be .* Hugging Face id, but is"):
        mmdec.small_model(model)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    source = mmdec.small_model(tmp_path, inner="lookup")
    with pytest.raises(InputError, match="must be a language model"):
        mmdec.generate(MODELS["llama"], prompts(1), source, **OPTIONS)
