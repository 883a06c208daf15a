"""Tests models with ALiBi: a draft's columns have the bias of their positions, so that texts equal those of
transformers' `generate`, with trees and chains."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import mmdec
from mmdec.ops.tree_attention import TreeMask
from mmdec.targets import alibi
from mmdec.targets.fast_pass import fast_pass
from mmdec.targets.probe import BOUND, VOCABULARY, difference, small_model
from mmdec.targets.text import text_scorer
from tests.support.recorded_graphs import recorded_graphs
from tests.support.wild import Wild

LONGEST = 40  # positions of the small MPT
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bloom": ("BloomForCausalLM", "eager", {}),
    "bloom of 6 heads": ("BloomForCausalLM", "eager", {"n_head": 6, "hidden_size": 48}),
    "mpt": ("MptForCausalLM", "eager", {"use_cache": True, "max_seq_len": LONGEST}),
    "falcon": ("FalconForCausalLM", "sdpa", {"alibi": True}),
    "falcon, eager": ("FalconForCausalLM", "eager", {"alibi": True, "new_decoder_architecture": True}),
}


def model_of(name: str) -> Any:
    family, attention, given = KINDS[name]
    kind = getattr(transformers, family)
    if "6" not in name:
        return small_model(kind, kind.config_class(**given), attention)
    torch.manual_seed(0)
    return kind(kind.config_class(vocab_size=VOCABULARY, n_layer=2, initializer_range=0.3, **given)).eval()


def batch(rows: int, columns: int) -> dict[str, Tensor]:
    """Repetitive ids, padded on the left."""
    rng = random.Random(rows)
    ids = torch.tensor([([rng.randrange(3, VOCABULARY) for _ in range(5)] * columns)[:columns] for _ in range(rows)])
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 3 * row - 1] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("choice", [{"do_sample": False}, {"do_sample": True, "top_k": 20}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_stocks(kind: str, rows: int, choice: dict[str, Any]) -> None:
    model, inputs = model_of(kind), batch(rows, 13)
    options: dict[str, Any] = {**choice, "max_new_tokens": LONGEST - 13, "pad_token_id": 0, "eos_token_id": 2}
    more: dict[str, Any] = {"seed": 3} if choice["do_sample"] else {}
    wanted = mmdec.generate(model, inputs, None, **options, **more).sequences
    if not more:
        assert torch.equal(wanted, model.generate(**inputs, **options))
    for drafter in ("lookup", "recycling", Wild(0.5, wanted.tolist(), 0.8)):
        for nodes in (8, (9, 3)):
            found = mmdec.generate(model, inputs, drafter, num_speculative_tokens=nodes, **options, **more)
            assert torch.equal(found.sequences, wanted)
            assert any(sum(round_.drafted) for round_ in found.rounds)


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_hold_it(kind: str) -> None:
    model, inputs = model_of(kind), batch(3, 13)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = model.generate(**inputs, **options)
    with recorded_graphs():
        fast_pass(model).enabled = True
        for drafter in ("recycling", Wild(0.5, wanted.tolist(), 0.8)):
            found = mmdec.generate(model, inputs, drafter, num_speculative_tokens=(9, 3), **options)
            assert torch.equal(found.sequences, wanted)
        assert fast_pass(model).bytes


@pytest.mark.parametrize("kind", KINDS)
def test_padding_within_a_row_is_stocks_loop(kind: str) -> None:
    model, inputs = model_of(kind), batch(2, 12)
    inputs["attention_mask"][0, 4:6] = 0
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = model.generate(**inputs, **options)
    with pytest.warns(RuntimeWarning, match="ALiBi may count"):
        assert torch.equal(mmdec.generate(model, inputs, "lookup", **options).sequences, wanted)


@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon"])
def test_a_bias_by_column_is_found(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, attention, given = KINDS[kind]
    model = getattr(transformers, family)
    assert difference(model, model.config_class(**given), attention, text_scorer) < BOUND / 100

    def columns(tree: TreeMask) -> Tensor:
        rows, _, _, width = tree.additive.shape
        return torch.arange(width).expand(rows, -1)

    monkeypatch.setattr(alibi, "_places", columns)
    assert difference(model, model.config_class(**given), attention, text_scorer) > 0.01
