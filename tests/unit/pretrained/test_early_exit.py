"""Tests early exit: the copy that drafts is found while decoding, and texts stay the model's own."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest
import torch

import mmdec
from mmdec.errors import InputError
from mmdec.pretrained import early_exit as module
from mmdec.pretrained.early_exit import EarlyExitDrafter
from tests.support.families import model_of
from tests.support.tiny_text import language_model, prompts

OPTIONS: dict[str, Any] = {"max_new_tokens": 80, "do_sample": False, "eos_token_id": None}


def with_idle_layers(*idle: int, layers: int = 6) -> Any:
    """Return a model in which some layers do nothing."""
    model: Any = language_model("llama", num_hidden_layers=layers, initializer_range=0.25)
    for index in idle:
        model.model.layers[index].self_attn.o_proj.weight.data.zero_()
        model.model.layers[index].mlp.down_proj.weight.data.zero_()
    return model


def decode(model: Any, drafter: Any, batch: int = 1, **options: Any) -> Any:
    inputs = prompts(batch)
    given = {**OPTIONS, **options}
    nodes = given.pop("nodes", 5)
    expected = mmdec.generate(model, inputs, None, **given)
    result = mmdec.generate(model, inputs, drafter, num_speculative_tokens=nodes, **given)
    assert torch.equal(result.sequences, expected.sequences)
    return result


@pytest.mark.filterwarnings("error")
def test_a_model_whose_last_layers_do_nothing_drafts_for_itself() -> None:
    model = with_idle_layers(3, 4, 5)
    result = decode(model, EarlyExitDrafter(model, 3))
    assert all(round_.accepted == round_.drafted for round_ in result.rounds)
    assert result.tokens_per_round > 4


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
def test_the_best_exit_is_found() -> None:
    model = with_idle_layers(2, 3, 4, 5, layers=8)
    for index in (6, 7):
        model.model.layers[index].self_attn.o_proj.weight.data.zero_()
        model.model.layers[index].mlp.down_proj.weight.data.zero_()
    drafter = EarlyExitDrafter(model)
    assert drafter.layers == (0, 1, 2, 3)
    decode(model, drafter)
    assert drafter.layers == (0, 1)  # a quarter of the layers predicts as much as a half


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
def test_a_set_of_skipped_layers_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRIAL_ROUNDS", 1)
    model = with_idle_layers(1, 3, 4)
    drafter = EarlyExitDrafter(model)
    for _ in range(3):
        result = decode(model, drafter)
    assert {0, 2, 5} <= {*drafter.layers}
    assert len(drafter.layers) < 6
    assert result.tokens_per_round > 2


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
@pytest.mark.parametrize("nodes", [4, (9, 3)])
def test_the_copy_may_change_while_rows_end(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TRIAL_ROUNDS", 1)
    monkeypatch.setattr(module, "TRIAL_TOKENS", 4)
    changes = list[int]()
    change = EarlyExitDrafter._change

    def record_change(self: EarlyExitDrafter, state: Any) -> None:
        changes.append(len(state.live))
        change(self, state)

    monkeypatch.setattr(EarlyExitDrafter, "_change", record_change)
    for seed in range(3):
        model = language_model("llama", seed, num_hidden_layers=5, initializer_range=0.3)
        decode(model, EarlyExitDrafter(model), batch=4, nodes=nodes, max_new_tokens=40, eos_token_id=[2, 7, 11, 19, 30])
    assert changes
    assert any(rows < 4 for rows in changes)


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
def test_the_name_gives_one_drafter_for_all_calls() -> None:
    model = language_model("llama", num_hidden_layers=4)
    assert EarlyExitDrafter.from_model(model) is EarlyExitDrafter.from_model(model)
    decode(model, "early_exit", max_new_tokens=20)
    assert EarlyExitDrafter.from_model(model).name.startswith("early-exit(")
    assert EarlyExitDrafter(model, [0, 2]).name.startswith("early-exit-0.2(")


def test_early_exit_does_not_keep_the_model_alive() -> None:
    model = language_model("llama")
    EarlyExitDrafter.from_model(model)
    gone = ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
def test_early_exit_follows_the_models_attention_implementation() -> None:
    model = language_model("llama", num_hidden_layers=4)
    for attention in ("sdpa", "eager", "mmdec_tree"):
        model.set_attn_implementation(attention)
        decode(model, "early_exit", max_new_tokens=20, nodes=(6, 3))


@pytest.mark.parametrize("layers", [0, 2, -1, True, [], [1, 0], [0, 0], [2], [0, 1], "0", 1.5, {0}])
def test_wrong_layers_are_refused(layers: Any) -> None:
    with pytest.raises(InputError, match="`layers` must be a number from 1 to 1, or ascending indices"):
        EarlyExitDrafter(language_model("llama"), layers)


def test_another_model_is_refused() -> None:
    model = language_model("llama")
    with pytest.raises(InputError, match="early exit is another's"):
        mmdec.generate(language_model("llama", 3), prompts(1), EarlyExitDrafter(model), **OPTIONS)
    with pytest.raises(InputError, match="has one layer"):
        EarlyExitDrafter(language_model("llama", num_hidden_layers=1))
    with pytest.raises(InputError, match="another one than early_exit"):
        mmdec.generate(model_of("Mamba2ForCausalLM"), torch.tensor([[5, 6]]), "early_exit", max_new_tokens=2)
