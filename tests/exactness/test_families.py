"""Tests each supported family: drafts do not change its texts, and a tree's scores equal those of its paths. Other
classes are probed. A share of the families; all with MMDEC_ALL=1 (`make test-all`)."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    DogeConfig,
    DogeForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import mmdec
from mmdec.errors import InputError
from mmdec.pretrained.early_exit import EarlyExitDrafter
from mmdec.targets.families import FAMILIES
from mmdec.targets.probe import MAX_DIFFERENCE, PROBE_VOCABULARY, PROBE_WINDOW, tiny_config, tree_path_difference
from mmdec.targets.recurrent_cache import has_states
from mmdec.targets.text import TextTarget
from tests.support.families import attention_of, config_of, model_of
from tests.support.grid import WHOLE
from tests.support.random_drafter import RandomDrafter

ALWAYS = {"GPT2LMHeadModel", "GPTNeoXForCausalLM", "LlamaForCausalLM", "XGLMForCausalLM", "BertLMHeadModel"}
SHARE = 4
TRIED = sorted(FAMILIES if WHOLE else ALWAYS | set(random.Random(1).sample(sorted(FAMILIES), SHARE)))
SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}


@pytest.fixture(autouse=True)
def fresh() -> None:
    mmdec.default_statistics().clear()


@pytest.mark.parametrize("family", TRIED)
def test_a_familys_texts_equal_stock_and_its_trees_equal_their_paths(family: str) -> None:
    scorer = lambda model: TextTarget(model, checked=True)  # noqa: E731
    assert (
        tree_path_difference(getattr(transformers, family), config_of(family), attention_of(family), scorer)
        < MAX_DIFFERENCE / 100
    )
    model, rng = model_of(family), random.Random(family)
    for batch in (1, 3):
        ids = torch.tensor([[rng.randrange(3, PROBE_VOCABULARY) for _ in range(4)] * 3 for _ in range(batch)])
        mask = torch.ones_like(ids)
        for row in range(1, batch):
            mask[row, : 4 * row - 1] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
        options: dict[str, Any] = {"max_new_tokens": 18, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
        expected = model.generate(**inputs, **options)  # type: ignore[operator]
        texts = [expected[row].tolist() for row in range(batch)]
        for drafter in ("lookup", "recycling", RandomDrafter(rng.random(), texts)):
            result = mmdec.generate(model, inputs, drafter, num_speculative_tokens=(7, 3), **options)
            assert torch.equal(result.sequences, expected)


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
@pytest.mark.parametrize("family", TRIED)
def test_a_familys_first_layer_drafts_for_it(family: str) -> None:
    model = model_of(family)
    ids = torch.tensor([[5, 6, 7, 8, 5, 6], [9, 3, 4, 9, 3, 4]])
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
    expected = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
    if has_states(model.config) or model.config.num_hidden_layers != 2:
        with pytest.raises(InputError, match="another one than early_exit"):
            EarlyExitDrafter(model)
        return
    for nodes in (4, (7, 3)):
        result = mmdec.generate(model, ids, "early_exit", num_speculative_tokens=nodes, **options)
        assert torch.equal(result.sequences, expected)
        assert sum(sum(round_.drafted) for round_ in result.rounds)


@pytest.mark.filterwarnings("error", "ignore:drafter .* brought:UserWarning")
@pytest.mark.parametrize("drafter", ["recycling", "small"])
def test_a_table_by_column_holds_a_tree(drafter: str) -> None:
    """GPT-Neo's mask is a table: near its end a tree's nodes would be beyond it, deep or not."""
    shape = tiny_config(config_of("GPTNeoForCausalLM"), max_position_embeddings=24)
    torch.manual_seed(0)
    small = transformers.GPTNeoForCausalLM(shape).eval()
    large = small if drafter == "recycling" else model_of("LlamaForCausalLM")
    ids = torch.tensor([[5, 6, 7, 8] * 4])
    more = 8 if drafter == "recycling" else 20
    options: dict[str, Any] = {"max_new_tokens": more, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = large.generate(ids, **options)  # type: ignore[operator]
    given = small if drafter == "small" else drafter
    result = mmdec.generate(large, ids, given, num_speculative_tokens=(12, 3), **options)
    assert torch.equal(result.sequences, expected)


def test_a_window_that_no_check_knows_is_found() -> None:
    """Doge attends to `keep_window_size` columns, chosen anew for each pass; its cache keeps all."""
    torch.manual_seed(0)
    with pytest.raises(InputError, match=r"DogeForCausalLM differs by .* These families work: .*GPTNeoX.*Llama"):
        TextTarget(DogeForCausalLM(DogeConfig(**SIZES)))


def test_no_config_field_refuses_a_working_family() -> None:
    TextTarget(GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, is_decoder=False)))


class Bounded(LlamaForCausalLM):
    """Sees no token before the last eight columns of a pass: a window of which no field and no cache knows."""

    @property
    def span(self) -> int:
        return PROBE_WINDOW

    def forward(  # type: ignore[override]
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,  # its name before transformers 5.24
        cache: Any = None,
        logits_to_keep: Any = 0,
        **given: Any,
    ) -> Any:
        if attention_mask is not None and attention_mask.ndim == 4:
            attention_mask = attention_mask.clone()
            attention_mask[..., : -self.span] = torch.finfo(attention_mask.dtype).min
        held = past_key_values if cache is None else cache
        return super().forward(input_ids, attention_mask, position_ids, held, logits_to_keep=logits_to_keep, **given)


class Spanned(Bounded):
    """Sees the last `attention_span` columns of a pass: a window that its configuration calls otherwise."""

    @property
    def span(self) -> int:
        return int(self.config.attention_span)


def test_a_window_of_any_name_is_found() -> None:
    with pytest.raises(InputError, match="Spanned differs"):
        TextTarget(Spanned(LlamaConfig(**SIZES, attention_span=64, another_number=64)))


class Renamed(LlamaForCausalLM):
    """Has another name and is the same otherwise."""


class Closed(LlamaForCausalLM):
    """Cannot be built from its configuration."""

    def __init__(self, config: LlamaConfig, key: str) -> None:
        super().__init__(config)


def test_other_classes_are_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from mmdec.targets import families

    asked = []

    def record_difference(*args: Any) -> float:
        asked.append(args)
        return tree_path_difference(*args)

    monkeypatch.setattr(families, "tree_path_difference", record_difference)
    for _ in range(3):
        TextTarget(Renamed(LlamaConfig(**SIZES, rope_theta=1234.0)))
        with pytest.raises(InputError, match="Bounded differs"):
            TextTarget(Bounded(LlamaConfig(**SIZES, rope_theta=1234.0)))
        with pytest.raises(InputError, match="Closed is not known, and could not be tried: two layers"):
            TextTarget(Closed(LlamaConfig(**SIZES, rope_theta=1234.0), "open"))
    assert len(asked) == 3
    TextTarget(Renamed(LlamaConfig(**SIZES, rope_theta=4321.0)))
    assert len(asked) == 4


def test_a_probe_leaves_random_numbers_and_the_model_alone() -> None:
    model = Renamed(LlamaConfig(**SIZES, rope_theta=99.0))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    shape = model.config.to_dict()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    TextTarget(model)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config.to_dict() == shape


def test_large_configurations_are_probed_in_small() -> None:
    """Every kind of layer stays in, every size and window shrinks, whatever is off stays off."""
    shape: Any = tiny_config(
        transformers.Gemma3TextConfig(
            sliding_window=4096, num_hidden_layers=24, num_key_value_heads=1, eos_token_id=[1, 7]
        )
    )
    assert (shape.num_hidden_layers, shape.sliding_window, shape.vocab_size) == (2, PROBE_WINDOW, PROBE_VOCABULARY)
    assert set(shape.layer_types) == {"sliding_attention", "full_attention"}
    assert (shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads) == (32, 4, 1)
    other: Any = tiny_config(transformers.Qwen2Config())
    assert other.sliding_window is None
    assert other.use_sliding_window is False
