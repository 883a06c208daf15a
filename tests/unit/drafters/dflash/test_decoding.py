"""Tests what DFlash alone has: the distributions of its blocks, trees no deeper than a block, and chats."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import mmdec
from mmdec.compat import CACHE_ARGUMENT
from mmdec.types import Plan
from tests.support.draft_networks import (
    FORMS_OF,
    PROMPTS,
    dflash_scores,
    paths,
    scatter_vocabulary,
    start_drafter,
    tree_growing,
)
from tests.support.draft_warps import warp_at
from tests.support.tiny_text import language_model, prompts

FORMS = FORMS_OF["dflash"]
BASE = FORMS["plain"]
MODEL: Any = language_model(num_hidden_layers=5)


@torch.no_grad()
@pytest.mark.parametrize("form", ["plain", "part"])
def test_drawn_children_have_the_marginals_they_were_drawn_from(form: str) -> None:
    """Residual sampling accepts by p / q: q of each node is the naive reading's distribution of its depth."""
    model: Any = language_model(num_hidden_layers=5).double()
    drafter = scatter_vocabulary(tree_growing("dflash", model, **FORMS[form]))
    memory = start_drafter(model, drafter, [PROMPTS[0]], [7])
    draft = drafter.propose(memory, torch.tensor([7]), Plan(9, 3, warp_at(1.0), torch.Generator().manual_seed(0)))
    assert draft.probs is not None
    text = [*PROMPTS[0], 7]
    states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
    features = torch.cat([states[n if n < 0 else n + 1][0, :-1] for n in drafter.needs.layers], -1)
    expected = dflash_scores(drafter, features, 7).exp()
    depth_of = {0: 0} | {node: len(path) for node, path in enumerate(paths(draft, 0), 1)}
    inner = {int(parent) for parent in draft.parents[0, 1 : int(draft.size[0])]}
    assert len(inner) > 1
    for node in inner:
        torch.testing.assert_close(draft.probs[0, node].double(), expected[depth_of[node]], rtol=1e-5, atol=1e-7)


def test_a_tree_is_as_deep_as_the_chain_that_it_holds() -> None:
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
    result = mmdec.generate(MODEL, second, drafter, **{CACHE_ARGUMENT: cache}, **options).sequences
    assert torch.equal(result, MODEL.generate(**second, max_new_tokens=8, do_sample=False))
