"""Tests DFlash: each draft equals one recomputed from scratch, and texts equal plain decoding, also with pictures."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import mmdec
from mmdec.compat import CACHE_ARGUMENT
from mmdec.errors import InputError
from mmdec.types import Plan
from tests.support.draft_networks import (
    PROMPTS,
    Checked,
    dflash_scores,
    paths,
    rounds_of,
    start_drafter,
    texts,
    tree_growing,
)
from tests.support.tiny_text import language_model, prompts
from tests.support.toy_target import Changing

BASE: dict[str, Any] = {"block_size": 5, "mask_token": 3, "num_hidden_layers": 2}
FORMS: dict[str, dict[str, Any]] = {
    "plain": BASE,
    "one-layer": {**BASE, "num_hidden_layers": 1, "block_size": 2},
    "part": {**BASE, "draft_vocab_size": 40, "own_head": True, "own_embedding": True},
    "anchor": {**BASE, "from_anchor": True, "layers": (3, -1, 0)},
    "bias": {**BASE, "attention_bias": True, "num_hidden_layers": 3},
}
MODEL: Any = language_model(num_hidden_layers=5)


def mapped(drafter: Any) -> Any:
    """Gives a part of the vocabulary tables that are not the first tokens."""
    if drafter.network.config.has_draft_vocabulary:
        ids = torch.arange(40) + torch.arange(40).div(2, rounding_mode="floor")
        drafter.network.d2t.copy_(ids - torch.arange(40))
    return drafter


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 4])
def test_the_cache_equals_recomputing_everything(form: str, rows: int) -> None:
    """Through rejections, plain rounds, ragged rows and rows that end: every draft, in float64."""
    model: Any = language_model(num_hidden_layers=5).double()
    checked = Checked(mapped(tree_growing("dflash", model, width=3, **FORMS[form])), model)
    rounds = rounds_of(model, checked, Changing(Random(rows)), PROMPTS[:rows], 12)
    plain = rounds_of(model, None, Changing(Random(rows), 0), PROMPTS[:rows], 12)
    assert checked.compared > 5
    assert texts(rounds, rows) == texts(plain, rows)


@pytest.mark.parametrize("form", ["plain", "part", "anchor"])
@pytest.mark.parametrize("batch", [1, 4])
def test_greedy_and_sampled_texts_equal_plain_decoding(form: str, batch: int) -> None:
    drafter, inputs = mapped(tree_growing("dflash", MODEL, **FORMS[form])), prompts(batch)
    wanted = MODEL.generate(**inputs, max_new_tokens=16, do_sample=False)
    sampling: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "top_k": 20, "seed": 3}
    drawn = mmdec.generate(MODEL, inputs, None, **sampling).sequences
    for nodes in (3, (9, 3)):
        found = mmdec.generate(MODEL, inputs, drafter, num_speculative_tokens=nodes, max_new_tokens=16, do_sample=False)
        assert torch.equal(found.sequences, wanted)
        found = mmdec.generate(MODEL, inputs, drafter, num_speculative_tokens=nodes, **sampling)
        assert torch.equal(found.sequences, drawn)
    options: dict[str, Any] = {"rule": "residual", "seed": 2, "num_speculative_tokens": 6, "max_new_tokens": 12}
    assert mmdec.generate(MODEL, inputs, drafter, **options).lossless


@torch.no_grad()
@pytest.mark.parametrize("form", ["plain", "part"])
def test_drawn_children_have_the_marginals_they_were_drawn_from(form: str) -> None:
    """Residual sampling accepts by p / q: q of each node is the naive reading's distribution of its depth."""
    model: Any = language_model(num_hidden_layers=5).double()
    drafter = mapped(tree_growing("dflash", model, **FORMS[form]))
    memory = start_drafter(model, drafter, [PROMPTS[0]], [7])
    draft = drafter.propose(memory, torch.tensor([7]), Plan(9, 3, 1.0, torch.Generator().manual_seed(0)))
    assert draft.probs is not None
    text = [*PROMPTS[0], 7]
    states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    features = torch.cat([states[n if n < 0 else n + 1][0, :-1] for n in drafter.needs.layers], -1)
    wanted = dflash_scores(drafter, features, 7).exp()
    depth_of = {0: 0} | {node: len(path) for node, path in enumerate(paths(draft, 0), 1)}
    inner = {int(parent) for parent in draft.parents[0, 1 : int(draft.size[0])]}
    assert len(inner) > 1
    for node in inner:
        torch.testing.assert_close(draft.probs[0, node].double(), wanted[depth_of[node]], rtol=1e-5, atol=1e-7)


def test_a_tree_holds_the_chain_and_goes_no_deeper_than_the_block() -> None:
    drafter = tree_growing("dflash", MODEL, **BASE)
    chain, tree = (
        drafter.propose(start_drafter(MODEL, drafter, PROMPTS[:2], [7, 9]), torch.tensor([7, 9]), plan)
        for plan in (Plan(9, 9), Plan(30, 9))
    )
    for row in range(2):
        assert len(paths(chain, row)) == 4
        assert len(paths(tree, row)) == 30
        assert max(map(len, paths(tree, row))) <= 4
        assert paths(tree, row)[0] == paths(chain, row)[0]  # the likeliest path comes first


def test_a_chat_continues_the_memory() -> None:
    """The second turn over the first one's cache: the text of the whole chat, and no prompt read twice."""
    drafter, cache = tree_growing("dflash", MODEL, **BASE), DynamicCache()
    turn = {name: value[:, :9] for name, value in prompts(1).items()}
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "num_speculative_tokens": 4}
    first = mmdec.generate(MODEL, turn, drafter, **{CACHE_ARGUMENT: cache}, **options).sequences
    ids = torch.cat([first, torch.tensor([[7, 11, 12]])], 1)
    second = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    found = mmdec.generate(MODEL, second, drafter, **{CACHE_ARGUMENT: cache}, **options).sequences
    assert torch.equal(found, MODEL.generate(**second, max_new_tokens=8, do_sample=False))


def test_another_models_drafter_is_refused() -> None:
    drafter = tree_growing("dflash", MODEL, **BASE)
    with pytest.raises(InputError, match="must fit a model"):
        mmdec.generate(language_model(num_hidden_layers=5, vocab_size=70), prompts(1), drafter, max_new_tokens=4)
