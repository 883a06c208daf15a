"""Tests copies of a model with fewer layers: the same weights, and the logits of the layers that stay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, MistralConfig, MistralForCausalLM, PreTrainedModel

from mmdec.compat import CACHE_ARGUMENT
from mmdec.errors import InputError
from mmdec.targets.smaller import smaller_copy
from tests.support.families import model_of
from tests.support.tiny_text import SIZES, language_model

IDS = torch.tensor([[5, 6, 7, 8, 9, 5, 6]])


def deep(kind: str) -> Any:
    return language_model(kind, num_hidden_layers=5)


class Skip(nn.Module):
    """A decoder layer that returns its input."""

    def forward(self, states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return states


def without(model: PreTrainedModel, kept: tuple[int, ...]) -> torch.Tensor:
    """Return the logits of a model whose other layers do nothing."""
    other: Any = copy.deepcopy(model)
    layers = other.transformer.h if hasattr(other, "transformer") else other.model.layers
    for index in range(len(layers)):
        if index not in kept:
            skip: Any = Skip()
            skip.attention_type = getattr(layers[index], "attention_type", None)
            layers[index] = skip
    return other(input_ids=IDS, use_cache=False).logits


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("kept", [(0,), (0, 1, 2), (0, 2, 4), (4,)])
def test_the_logits_are_those_of_the_kept_layers(kind: str, kept: tuple[int, ...]) -> None:
    model = deep(kind)
    before = model(input_ids=IDS).logits
    smaller: Any = smaller_copy(model, kept)
    assert torch.equal(smaller(input_ids=IDS, use_cache=False).logits, without(model, kept))
    cache = DynamicCache(config=smaller.config)
    smaller(input_ids=IDS[:, :4], **{CACHE_ARGUMENT: cache})
    assert len(cache.layers) == len(kept)
    rest = smaller(input_ids=IDS[:, 4:], **{CACHE_ARGUMENT: cache})
    torch.testing.assert_close(rest.logits, without(model, kept)[:, 4:])
    assert torch.equal(model(input_ids=IDS).logits, before)
    assert model.config.num_hidden_layers == 5


def test_the_weights_are_shared() -> None:
    model = deep("llama")
    theirs = {weight.data_ptr() for weight in model.parameters()}
    assert {weight.data_ptr() for weight in smaller_copy(model, (0, 3)).parameters()} < theirs


@torch.no_grad()
def test_windows_of_the_kept_layers_stay() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    torch.manual_seed(0)
    model: Any = language_model(
        "qwen2", num_hidden_layers=4, layer_types=kinds, use_sliding_window=True, sliding_window=3
    )
    smaller: Any = smaller_copy(model, (0, 1, 3))
    assert smaller.config.layer_types == [kinds[0], kinds[1], kinds[3]]
    assert torch.equal(smaller(input_ids=IDS, use_cache=False).logits, without(model, (0, 1, 3)))


@pytest.mark.parametrize("family", ["Mamba2ForCausalLM", "Lfm2ForCausalLM"])
def test_layers_with_states_are_refused(family: str) -> None:
    with pytest.raises(InputError, match="must be another one than early_exit"):
        smaller_copy(model_of(family), (0,))


def test_layers_with_hooks_are_refused() -> None:
    model: Any = MistralForCausalLM(MistralConfig(**SIZES))
    smaller_copy(model, (0,))
    model.model.layers[1].register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match="its layers have hooks"):
        smaller_copy(model, (0,))
