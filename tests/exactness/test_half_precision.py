"""Tests that in bfloat16 and float16 on a CPU a node's logits are those of plain decoding, bit for bit.

They do not depend on the other nodes, rows and tokens of the pass, so drafts leave the text as it is.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, MistralConfig, MistralForCausalLM
from transformers.modeling_outputs import BaseModelOutput

import mmdec
from mmdec.compat import CACHE_ARGUMENT
from mmdec.targets.text import TextTarget
from mmdec.types import Draft, Needs
from mmdec.whisper.target import WhisperTarget
from tests.support.families import model_of
from tests.support.tiny_text import SIZES, VOCABULARY, language_model, prompts
from tests.support.tiny_whisper import TEXT, sound, whisper
from tests.support.trees import random_draft, verdict_of, way

WINDOWED: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 8}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"sliding_window": 8, "head_dim": 16}),
}
FAMILIES = ("llama", "qwen2", "gpt2", *WINDOWED, "Qwen3ForCausalLM", "GPTNeoXForCausalLM", "PhiForCausalLM")
half_precision = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


def text_model(family: str, dtype: torch.dtype) -> Any:
    if family in WINDOWED:
        kind, config, more = WINDOWED[family]
        torch.manual_seed(0)
        return kind(config(**{**SIZES, **more})).eval().to(dtype)
    model: Any = model_of(family) if family.endswith("LM") else language_model(family)
    return model.to(dtype)


def padded(rng: random.Random, lengths: list[int], vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    width = max(lengths)
    ids = torch.tensor([[rng.randrange(3, vocabulary) for _ in range(width)] for _ in lengths])
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    return {"input_ids": ids, "attention_mask": mask}


def compare(target: Any, inputs: dict[str, Any], rng: random.Random, sizes: tuple[int, ...], vocabulary: int) -> None:
    """Score random trees for all rows together, and each node of their longest paths as plain decoding would."""
    count = len(inputs["input_ids"])
    together = target.prefill(inputs, Needs()).session
    alone = [target.prefill(inputs, Needs()).session for _ in range(count)]
    for row, session in enumerate(alone):
        target.select(session, torch.tensor([row]))
    for nodes in sizes:
        draft = random_draft(rng, count, nodes)
        draft = Draft(draft.tokens % vocabulary, draft.parents, draft.size)
        logits, paths = target.score(together, draft).logits, list[list[int]]()
        for row, session in enumerate(alone):
            parents = draft.parents[row].tolist()
            paths.append(max((way(parents, node) for node in range(int(draft.size[row]))), key=len))
            for node in paths[-1]:
                root = Draft(draft.tokens[row : row + 1, node : node + 1], torch.tensor([[-1]]), torch.tensor([1]))
                assert torch.equal(target.score(session, root).logits[0, 0], logits[row, node])
                target.commit(session, verdict_of([[0]]))
        target.commit(together, verdict_of(paths))


@half_precision
@pytest.mark.parametrize("lengths", [[9], [3, 7, 5], [40, 70]], ids=["one row", "short rows", "rows of two key blocks"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_each_nodes_logits_are_those_of_plain_decoding(family: str, lengths: list[int], dtype: torch.dtype) -> None:
    rng = random.Random(len(lengths))
    target = TextTarget(text_model(family, dtype))
    size = min(target.vocab_size, VOCABULARY)
    compare(target, padded(rng, lengths, size), rng, (7, 1, 12, 33, 9), size)


@half_precision
@torch.inference_mode()
def test_drafts_across_512_keys_have_the_logits_of_plain_decoding(dtype: torch.dtype) -> None:
    rng = random.Random(2)
    model: Any = language_model("llama", num_hidden_layers=3, max_position_embeddings=1024)
    compare(TextTarget(model.to(dtype)), padded(rng, [500, 530]), rng, (9, 1, 33, 90), VOCABULARY)


@half_precision
@torch.inference_mode()
def test_a_path_has_the_same_logits_at_other_places_and_beside_other_nodes(dtype: torch.dtype) -> None:
    rng = random.Random(3)
    target = TextTarget(text_model("llama", dtype))
    inputs = padded(rng, [20])
    path = [rng.randrange(3, VOCABULARY) for _ in range(5)]
    results = list[Tensor]()
    for others in (0, 3, 20, 59):
        parents, tokens, places = [-1], path[:1], [0]
        for token in path[1:]:
            for _ in range(others // 4):
                parents.append(rng.randrange(len(parents)))
                tokens.append(rng.randrange(3, VOCABULARY))
            places.append(len(parents))
            parents.append(places[-2])
            tokens.append(token)
        session = target.prefill(inputs, Needs()).session
        draft = Draft(torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([len(tokens)]))
        results.append(target.score(session, draft).logits[0, places])
    assert all(torch.equal(result, results[0]) for result in results)


@half_precision
@torch.inference_mode()
def test_each_nodes_logits_in_whisper_are_those_of_plain_decoding(dtype: torch.dtype) -> None:
    rng, batch = random.Random(4), 3
    network: Any = whisper(80, 3)
    network = network.to(dtype)
    states = network.model.encoder(sound(batch)["input_features"].to(dtype)).last_hidden_state
    given = padded(rng, [4, 2, 3], TEXT)
    inputs: dict[str, Any] = {
        "input_ids": given["input_ids"],
        "decoder_attention_mask": given["attention_mask"],
        "encoder_outputs": BaseModelOutput(last_hidden_state=states),
    }
    compare(WhisperTarget(network), inputs, rng, (7, 1, 5), TEXT)


@half_precision
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("drafter", ["lookup", "recycling"])
def test_drafts_do_not_change_the_text(drafter: str, rows: int, dtype: torch.dtype) -> None:
    model, options = text_model("llama", dtype), {"max_new_tokens": 40, "do_sample": False}
    for seed in range(4):
        inputs = prompts(rows, seed)
        plain = mmdec.generate(model, inputs, None, **options)
        for size in (3, 12, None):
            named = {} if size is None else {"num_speculative_tokens": size}
            drafted = mmdec.generate(model, inputs, drafter, **named, **options)
            assert torch.equal(drafted.sequences, plain.sequences)


@half_precision
def test_the_callers_cache_works_with_the_stock_model_afterwards(dtype: torch.dtype) -> None:
    model, cache = text_model("llama", dtype), DynamicCache()
    inputs = prompts(1)
    result = mmdec.generate(model, {**inputs, CACHE_ARGUMENT: cache}, "lookup", max_new_tokens=8, do_sample=False)
    length = cache.get_seq_length()
    assert length == result.sequences.shape[1] - 1
    with torch.no_grad():
        model(result.sequences[:, -1:], **{CACHE_ARGUMENT: cache})
    assert cache.get_seq_length() == length + 1


@half_precision
def test_weights_that_peft_merges_between_calls_are_read(dtype: torch.dtype) -> None:
    """It adds to `weight.data`, which neither moves the weight nor counts as a change of it."""
    model, inputs = text_model("llama", dtype), prompts(1)
    options: dict[str, Any] = {"num_speculative_tokens": 4, "max_new_tokens": 20, "do_sample": False}
    mmdec.generate(model, inputs, "lookup", **options)
    for layer in model.model.layers:
        weight = layer.mlp.down_proj.weight
        weight.data += (torch.randn(len(weight), 1) @ torch.randn(1, weight.shape[1])).to(dtype)
    found = mmdec.generate(model, inputs, "lookup", **options).sequences
    assert torch.equal(found, mmdec.generate(copy.deepcopy(model), inputs, None, **options).sequences)
