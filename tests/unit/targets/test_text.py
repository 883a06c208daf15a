"""Tests TextTarget: models and inputs that it refuses, the result of the prompt's pass, and caches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertLMHeadModel,
    DynamicCache,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

from mmdec.compat import CACHE_ARGUMENT
from mmdec.core.budget import FixedBudget
from mmdec.core.loop import decode
from mmdec.core.sampling import Sequences, Stop
from mmdec.core.tree import chain_drafts
from mmdec.core.verify import MatchRule
from mmdec.drafters.lookup import LookupDrafter
from mmdec.errors import InputError
from mmdec.targets.kv_cache import GrowingLayer, KVPool, check_cache
from mmdec.targets.text import TextTarget
from mmdec.types import Needs, Verdict
from tests.support.tiny_text import SIZES, language_model


def llama(**changes: Any) -> Any:
    return language_model("llama", **{"num_hidden_layers": 3, "eos_token_id": None, **changes})


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return llama()


def padded() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    ids, mask = torch.randint(2, 40, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    mask[1, :4] = mask[2, :1] = 0
    return ids * mask, mask


def plain(model: PreTrainedModel, ids: Tensor, mask: Tensor, new: int, cache: DynamicCache | None = None) -> Tensor:
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **{CACHE_ARGUMENT: cache})


def run(model: PreTrainedModel, ids: Tensor, new: int, nodes: int, **inputs: Any) -> Tensor:
    text = Sequences(ids, Stop(ids.shape[1] + new))
    drafter = LookupDrafter() if nodes else None
    for _ in decode(TextTarget(model), {"input_ids": ids, **inputs}, text, MatchRule(), drafter, FixedBudget(nodes)):
        pass
    return text.padded_ids(0)


def verdict(paths: list[list[int]]) -> Verdict:
    ones = torch.ones(len(paths), dtype=torch.long)
    return Verdict(torch.tensor(paths), ones, ones == 0, ones[:, None], ones)


# --- what cannot work ------------------------------------------------------------------------------------------------


def test_models_that_cannot_work_are_refused_with_what_would() -> None:
    small = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    neo: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4}
    heads = {"num_heads": 2, "d_kv": 8, "num_layers": 1, "decoder_start_token_id": 0}
    refused = [
        (T5ForConditionalGeneration(T5Config(vocab_size=40, d_model=16, d_ff=16, **heads)), "decoder-only"),
        (BertLMHeadModel(BertConfig(**small, num_attention_heads=4)), "Set `is_decoder`"),
        (GPTNeoForCausalLM(GPTNeoConfig(attention_types=[[["global", "local"], 1]], **neo)), "local layers"),
        (torch.nn.Linear(2, 2), "AutoModelForCausalLM"),
    ]
    for wrong, message in refused:
        with pytest.raises(InputError, match=message):
            TextTarget(wrong)  # type: ignore[arg-type]


def test_disabled_windows_are_ignored() -> None:
    unlimited = MistralConfig(**{**SIZES, "sliding_window": None})
    assert TextTarget(MistralForCausalLM(unlimited)).windows is None
    disabled = Qwen2Config(**{**SIZES, "use_sliding_window": False, "sliding_window": 8})
    assert TextTarget(Qwen2ForCausalLM(disabled)).windows is None


def test_a_config_of_global_layers_alone_has_no_window() -> None:
    neo: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 4}
    assert TextTarget(GPTNeoForCausalLM(GPTNeoConfig(attention_types=[[["global"], 2]], **neo))).windows is None


def test_an_attention_that_takes_no_tree_is_refused() -> None:
    model = llama(attn_implementation="flex_attention")
    with pytest.raises(InputError, match=r"sdpa, eager, mmdec_tree, but is flex_attention"):
        TextTarget(model)


def test_a_cache_that_cannot_roll_back_is_refused(model: LlamaForCausalLM) -> None:
    cache = StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(InputError, match="DynamicCache of attention layers"):
        TextTarget(model).prefill({"input_ids": torch.ones(1, 3, dtype=torch.long), CACHE_ARGUMENT: cache}, Needs())
    offloaded = DynamicCache()
    offloaded.offloading = True
    with pytest.raises(InputError, match="offloaded"):
        check_cache(offloaded)


@pytest.mark.parametrize(
    ("inputs", "needs", "message"),
    [
        ({}, Needs(), "input_ids"),
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, Needs(), "inputs_embeds"),
        ({"attention_mask": torch.tensor([[1, 1, 0]])}, Needs(), "Pad on the left"),
        ({"attention_mask": torch.ones(1, 5)}, Needs(), "5 columns for 0 cached and 3 new"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, Needs(), r"must be \(B, P\)"),
        ({"position_ids": torch.arange(2)[None]}, Needs(), "position_ids"),
        ({}, Needs(layers=(3,)), r"from 0 to 2, or -1"),
        ({}, Needs(layers=(-2,)), "-2"),
        ({}, Needs(encoder=True), "`drafter` must fit"),
    ],
)
def test_inputs_that_cannot_work_are_refused(
    model: LlamaForCausalLM, inputs: dict[str, Tensor], needs: Needs, message: str
) -> None:
    ids = {} if message == "input_ids" else {"input_ids": torch.ones(1, 3, dtype=torch.long)}
    with pytest.raises(InputError, match=message):
        TextTarget(model).prefill({**ids, **inputs}, needs)


# --- the prompt's pass -----------------------------------------------------------------------------------------------


def test_the_prompts_pass_equals_stock_bitwise(model: LlamaForCausalLM) -> None:
    ids, mask = padded()
    stock = model.generate(
        ids, attention_mask=mask, max_new_tokens=1, output_logits=True, return_dict_in_generate=True, do_sample=False
    )
    output = TextTarget(model).prefill({"input_ids": ids, "attention_mask": mask}, Needs())
    context, draft, scores = output.context, output.draft, output.scores
    assert torch.equal(scores.logits[:, 0], stock.logits[0])
    assert torch.equal(draft.tokens, ids[:, -1:])
    assert draft.size.tolist() == [1, 1, 1]
    assert context.next_position.tolist() == [9, 5, 8]
    assert context.positions.shape == (1, 3, 9)
    assert context.positions[0, 1].tolist() == [0, 0, 0, 0, 0, 1, 2, 3, 4]
    assert torch.equal(context.mask, mask.bool())
    assert context.embeds is None
    assert not context.features


@torch.inference_mode()
def test_features_are_those_of_the_layers_asked_for(model: LlamaForCausalLM) -> None:
    ids, mask = padded()
    target = TextTarget(model)
    output = target.prefill({"input_ids": ids, "attention_mask": mask}, Needs(layers=(0, 1, -1), embeds=True))
    session, context, scores = output.session, output.context, output.scores
    states = model(ids, attention_mask=mask, position_ids=context.positions[0], output_hidden_states=True).hidden_states
    for layer, expected in ((0, states[1]), (1, states[2]), (-1, states[3])):
        torch.testing.assert_close(context.features[layer], expected)
        torch.testing.assert_close(scores.features[layer], expected[:, -1:])
    assert context.embeds is not None
    assert torch.equal(context.embeds, states[0])
    torch.testing.assert_close(model.lm_head(scores.features[-1]), scores.logits)
    scores = target.score(session, chain_drafts(torch.tensor([3, 4, 5]), [[6, 7], [8], []]))
    assert sorted(scores.features) == [-1, 0, 1]
    torch.testing.assert_close(model.lm_head(scores.features[-1]), scores.logits)


def test_two_runs_share_a_target(model: LlamaForCausalLM) -> None:
    ids, mask = padded()
    target = TextTarget(model)
    roots = torch.tensor([3, 4, 5])
    one = target.prefill({"input_ids": ids, "attention_mask": mask}, Needs()).session
    expected = target.score(one, chain_drafts(roots, [[6], [7], [8]])).logits
    first = target.prefill({"input_ids": ids, "attention_mask": mask}, Needs()).session
    second = target.prefill({"input_ids": ids.flip(0), "attention_mask": mask.flip(0)}, Needs()).session
    target.score(second, chain_drafts(roots, [[6], [7], [8]]))
    assert torch.equal(target.score(first, chain_drafts(roots, [[6], [7], [8]])).logits, expected)


def test_plain_rounds_without_padding_need_no_mask(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    target = TextTarget(model)
    ids, mask = padded()
    seen: list[Any] = []
    forward = model.forward
    for even in (True, False):
        session = target.prefill({"input_ids": ids, "attention_mask": mask | even}, Needs()).session

        def spy(*args: Any, **kwargs: Any) -> Any:
            seen.append(kwargs["attention_mask"])
            return forward(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(model, "forward", spy)
            target.score(session, chain_drafts(torch.tensor([3, 4, 5]), [[], [], []]))
    assert seen[0] is None
    assert seen[1].shape == (3, 1, 1, 10)
    assert seen[1].is_floating_point()  # a bool mask is wrong under eager


# --- caches ----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_the_cache_grows_in_place_and_takes_columns_back(model: LlamaForCausalLM) -> None:
    target = TextTarget(model)
    session = target.prefill({"input_ids": torch.full((1, 5), 3)}, Needs()).session
    layer = session.cache.layers[0]
    assert isinstance(layer, GrowingLayer)
    before, pool, room = layer.keys.clone(), layer.all_keys.data_ptr(), layer.all_keys.shape[2]
    draft = chain_drafts(torch.tensor([7]), [[1, 2, 3, 4]])
    target.score(session, draft)
    assert layer.get_seq_length() == 10
    assert layer.keys.data_ptr() == pool  # nothing was copied
    target.commit(session, verdict([[0, 1, -1]]))
    assert session.cache.get_seq_length() == 7
    assert torch.equal(layer.keys[:, :, :5], before)
    for _ in range(60):
        target.score(session, draft)
        target.commit(session, verdict([[0, 1, 2]]))
    assert session.cache.get_seq_length() == 187
    assert layer.all_keys.shape[2] == 2 * room
    assert torch.equal(layer.keys[:, :, :5], before)


def test_layers_of_different_widths_live_in_pools_of_their_own() -> None:
    cache = DynamicCache()
    torch.manual_seed(0)
    states = [[torch.rand(2, heads, 6, width) for width in (4, size)] for heads, size in ((2, 4), (1, 3))]
    for layer, (keys, values) in enumerate(states):
        cache.update(keys, values, layer)
    store = KVPool(cache)
    store.commit([[2, 5], [4]], [1, 0], 3)
    for layer, pair in zip(cache.layers, states, strict=True):
        for held, given in zip((layer.keys, layer.values), pair, strict=True):
            assert held is not None
            assert torch.equal(held[0], given[0][:, [0, 2, 5]])
            assert torch.equal(held[1], given[1][:, [4, 1, 2]])
    store.select(torch.tensor([1]), 2)
    assert cache.layers[1].values is not None
    assert torch.equal(cache.layers[1].values[0], states[1][1][1][:, [4, 1]])
    more = torch.rand(1, 2, 200, 4)
    keys, _ = cache.update(more, more, 0)
    assert torch.equal(keys[:, :, 2:], more)


@pytest.mark.parametrize("nodes", [0, 4])
def test_a_given_cache_ends_as_generate_leaves_it(model: LlamaForCausalLM, nodes: int) -> None:
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    mine, stock = DynamicCache(config=model.config), DynamicCache()
    expected = plain(model, ids, torch.ones_like(ids), 12, stock)
    assert torch.equal(run(model, ids, 12, nodes, **{CACHE_ARGUMENT: mine}), expected)
    assert mine.get_seq_length() == stock.get_seq_length() == 19
    for got, held in zip(mine.layers, stock.layers, strict=True):
        torch.testing.assert_close(got.keys, held.keys)
        torch.testing.assert_close(got.values, held.values)
    # A second turn, by stock code and by ours, on the cache and on a copy of it.
    more = torch.cat([expected, torch.tensor([[9, 8]])], 1)
    full = torch.ones_like(more)
    again = plain(model, more, full, 70, copy.deepcopy(stock))
    other = copy.deepcopy(mine)
    assert torch.equal(run(model, more, 70, nodes, **{CACHE_ARGUMENT: other}, attention_mask=full), again)
    assert torch.equal(plain(model, more, full, 70, mine), again)


def test_the_cache_of_a_batch_is_only_read(model: LlamaForCausalLM) -> None:
    ids, mask = padded()
    cache = DynamicCache()
    with torch.no_grad():
        model(ids[:, :6], attention_mask=mask[:, :6], **{CACHE_ARGUMENT: cache}, use_cache=True)
    expected = plain(model, ids, mask, 10, copy.deepcopy(cache))
    before = [layer.keys for layer in cache.layers]
    got = run(model, ids, 10, 3, attention_mask=mask, **{CACHE_ARGUMENT: cache})
    assert torch.equal(got, expected)
    assert all(layer.keys is keys for layer, keys in zip(cache.layers, before, strict=True))
    short = {"input_ids": ids[:, :6], "attention_mask": mask[:, :6], CACHE_ARGUMENT: cache}
    with pytest.raises(InputError, match="6 cached and 0 new"):
        TextTarget(model).prefill(short, Needs())


@torch.inference_mode()
def test_features_over_a_given_cache_are_those_of_the_fresh_columns() -> None:
    model = llama().double()
    ids, mask = padded()
    target, needs = TextTarget(model), Needs((0, -1), embeds=True)
    whole = target.prefill({"input_ids": ids, "attention_mask": mask}, needs).context
    assert whole.past == 0
    for given in (ids, ids[:, 6:]):
        cache, places = DynamicCache(), whole.positions[0, :, :6]
        model(ids[:, :6], attention_mask=mask[:, :6], position_ids=places, **{CACHE_ARGUMENT: cache}, use_cache=True)
        inputs = {"input_ids": given, "attention_mask": mask, CACHE_ARGUMENT: cache}
        output = target.prefill(inputs, needs)
        context, scores = output.context, output.scores
        assert context.past == 6
        assert torch.equal(context.tokens, given)
        assert context.mask.shape == given.shape
        assert torch.equal(context.positions, whole.positions[:, :, 6:])
        assert torch.equal(context.next_position, whole.next_position)
        assert context.embeds is not None
        assert whole.embeds is not None
        assert torch.equal(context.embeds, whole.embeds[:, 6:])
        for layer, states in whole.features.items():
            torch.testing.assert_close(context.features[layer], states[:, 6:])
            torch.testing.assert_close(scores.features[layer], states[:, -1:])


def test_a_cache_layer_replaced_from_outside_is_a_stock_layer_again(model: LlamaForCausalLM) -> None:
    ids = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    cache = DynamicCache()
    tail = run(model, ids, 8, 3, **{CACHE_ARGUMENT: cache})
    cache.crop(-4)
    cache.batch_repeat_interleave(2)
    with torch.no_grad():
        got = model(tail[:, 11:].repeat(2, 1), **{CACHE_ARGUMENT: cache}).logits
        expected = model(tail).logits[:, 11:]
    torch.testing.assert_close(got, expected.expand(2, -1, -1))
    assert cache.get_seq_length() == 16
    cache.reset()
    assert cache.get_seq_length() == 0
