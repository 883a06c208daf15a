"""Tests that drafts of a float32 model are read from half-precision copies of its weights, with the same scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import mmdec
from mmdec.kernels.float16_linear import HalfWeights, half_precision_copies
from mmdec.targets import float32_copy
from mmdec.targets.float32_copy import DraftReader, HalfStoredLinear
from mmdec.targets.text import TextTarget
from mmdec.types import Needs, Scores
from tests.support.half_kernel import needs_half_kernel
from tests.support.tiny_text import language_model, prompts
from tests.support.trees import random_chains

pytestmark = needs_half_kernel


@pytest.fixture(autouse=True)
def every_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy weights of models of every size, after the first pass."""
    monkeypatch.setattr(float32_copy, "MIN_COPIED_BYTES", 0)
    monkeypatch.setattr(float32_copy, "MIN_COPIED_ELEMENTS", 1)
    monkeypatch.setattr(float32_copy, "MIN_PASSES", 1)


def stored_in(dtype: torch.dtype, kind: str = "llama") -> Any:
    """Return a float32 model whose weights were stored in `dtype`."""
    model: Any = language_model(kind)
    return model.to(dtype).float()


def copied_layers(model: Any) -> int:
    return sum(type(layer) is HalfStoredLinear for layer in DraftReader(model).model().modules())


def scores_of(model: Any, lengths: list[int]) -> Scores:
    torch.manual_seed(1)
    ids = torch.randint(2, 40, (len(lengths), 9))
    target = TextTarget(model)
    session = target.prefill({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, Needs(layers=(1,))).session
    return target.score(session, random_chains(lengths))


@pytest.mark.parametrize("lengths", [[1], [6], [1, 12, 3, 1], [40]], ids=["one", "few", "ragged", "many"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scores_are_those_of_the_model(lengths: list[int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model, products = stored_in(dtype), list[int]()
    product = HalfWeights.__call__
    monkeypatch.setattr(
        HalfWeights, "__call__", lambda self, x: products.append(x.shape[:-1].numel()) or product(self, x)
    )
    read = scores_of(model, lengths)
    assert set(products) == ({sum(lengths)} if sum(lengths) <= float32_copy.MAX_ROWS else set())
    monkeypatch.setattr(float32_copy, "MIN_PASSES", 1000)
    own = scores_of(stored_in(dtype), lengths)
    for row, length in enumerate(lengths):
        assert torch.allclose(read.logits[row, :length], own.logits[row, :length], atol=1e-4)
        assert torch.allclose(read.features[1][row, :length], own.features[1][row, :length], atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("drafter", [None, "lookup"])
def test_texts_are_those_of_transformers(kind: str, drafter: str | None) -> None:
    model, inputs = stored_in(torch.bfloat16, kind), prompts(3)
    found = mmdec.generate(model, inputs, drafter, max_new_tokens=20, do_sample=False)
    assert copied_layers(model) == 7 * 2 + 1  # of two layers, and the LM head
    assert torch.equal(found.sequences, model.generate(**inputs, max_new_tokens=20, do_sample=False))


def test_changed_weights_are_read() -> None:
    model = stored_in(torch.float16)
    assert copied_layers(model)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(2)
    assert half_precision_copies(model).passes == 0
    assert copied_layers(model)


def test_weights_that_peft_merges_are_read() -> None:
    """It adds to `weight.data`, which neither moves the weight nor counts as a change of it."""
    model, inputs = stored_in(torch.float16), prompts(2)
    assert copied_layers(model)
    for layer in model.model.layers:
        weight = layer.mlp.down_proj.weight
        weight.data += torch.randn(len(weight), 1) @ torch.randn(1, weight.shape[1])
    assert half_precision_copies(model).passes == 0
    found = mmdec.generate(model, inputs, "lookup", max_new_tokens=20, do_sample=False)
    assert torch.equal(found.sequences, model.generate(**inputs, max_new_tokens=20, do_sample=False))


def test_weights_that_would_change_are_not_copied() -> None:
    assert not copied_layers(language_model())


@pytest.mark.parametrize(("name", "limit"), [("MAX_COPIED_BYTES", 1000), ("MIN_COPIED_BYTES", 2**26)])
def test_too_large_and_too_small_models_are_not_copied(name: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert copied_layers(stored_in(torch.float16))
    monkeypatch.setattr(float32_copy, name, limit)
    assert not copied_layers(stored_in(torch.float16))


def test_layers_with_hooks_are_called() -> None:
    model, heard = stored_in(torch.float16), list[int]()
    model.get_output_embeddings().register_forward_hook(lambda *_: heard.append(1))
    assert copied_layers(model) == 7 * 2
    scores_of(model, [4])
    assert heard


def test_autocast_reads_the_model() -> None:
    model = stored_in(torch.float16)
    assert copied_layers(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert not copied_layers(model)


def test_a_pass_waits_for_few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_copy, "MAX_COPIED_AT_ONCE", 1)
    model = stored_in(torch.float16)
    layers = 7 * 2 + 1
    assert [copied_layers(model) for _ in range(layers)] == [0] * (layers - 1) + [layers]  # one layer a pass
