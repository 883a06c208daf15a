"""Tests what EAGLE-3 alone has: its vocabulary, the states it reads, pictures, chats, and heads that are wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import mmdec
from mmdec.compat import CACHE_ARGUMENT
from mmdec.errors import InputError
from mmdec.targets.media import MediaTarget
from mmdec.targets.text import TextTarget
from mmdec.types import Needs, Plan, Verdict
from tests.support.draft_networks import (
    FORMS_OF,
    PROMPTS,
    Watched,
    scatter_vocabulary,
    start_drafter,
    tree_growing,
)
from tests.support.draft_warps import warp_at
from tests.support.tiny_text import VOCABULARY, language_model, prompts
from tests.support.tiny_vlm import Picture, batch_of, vision_model
from tests.support.vision_drafters import eagle3

FORMS = FORMS_OF["eagle3"]
MODEL: Any = language_model(num_hidden_layers=5)


@torch.no_grad()
def test_drafts_are_mapped_to_the_targets_tokens_with_their_distribution() -> None:
    """Residual sampling accepts by p / q: q has no mass on tokens that cannot be drafted, and sums to 1."""
    drafter = scatter_vocabulary(tree_growing("eagle3", MODEL, **FORMS["part"]))
    memory = start_drafter(MODEL, drafter, PROMPTS[:2], [7, 9])
    plan = Plan(6, 3, warp_at(1.0), generator=torch.Generator().manual_seed(0))
    draft = drafter.propose(memory, torch.tensor([7, 9]), plan)
    ids = drafter.network.draft_vocabulary.token_ids(torch.arange(40))
    assert draft.probs is not None
    assert draft.probs.shape[2] == VOCABULARY
    outside = torch.ones(VOCABULARY, dtype=torch.bool).index_fill(0, ids, False)
    assert float(draft.probs[..., outside].abs().max()) == 0
    torch.testing.assert_close(draft.probs[:, 0].sum(-1), torch.ones(2))
    for row in range(2):
        assert set(draft.tokens[row, 1 : int(draft.size[row])].tolist()) <= set(ids.tolist())


def test_states_are_read_before_the_final_norm() -> None:
    """Boundary n, after the last layer: transformers' own last hidden states have passed the norm."""
    seen: dict[int, Any] = {}
    hook = MODEL.model.norm.register_forward_pre_hook(lambda module, args: seen.update({4: args[0]}))
    context = TextTarget(MODEL).prefill(prompts(2), Needs(layers=(4, 1, -1))).context
    hook.remove()
    assert torch.equal(context.features[4], seen[4])
    assert torch.equal(context.features[-1], MODEL.model.norm(seen[4]))
    with pytest.raises(InputError, match=r"must be from 0 to 4"):
        TextTarget(MODEL).prefill(prompts(2), Needs(layers=(5,)))


@torch.no_grad()
@pytest.mark.parametrize("positions", ["text", "temporal", "axes"])
@pytest.mark.parametrize("pictures", ["placeholder", "projected", "dropped"])
def test_pictures_stand_where_the_configuration_says(positions: str, pictures: str) -> None:
    """Two rows, one with an image: a chain against one recomputed from the target's own positions and embeddings."""
    model = vision_model("qwen2_5_vl")
    own: dict[str, Any] = {"mrope_section": (2, 1, 1)} if positions == "axes" else {}
    drafter = eagle3(model, **own, positions=positions, pictures=pictures)
    network, embedding = drafter.network, model.get_input_embeddings()
    inputs = batch_of("qwen2_5_vl", [[[7, 8], Picture.random(1, (16, 16)), [9, 10, 11]], [[12, 13, 14]]])
    target = MediaTarget(model)
    needs = Needs(layers=network.config.layers, embeds=True)
    output = target.prefill(inputs, needs)
    context, draft, scores = output.context, output.draft, output.scores
    assert context.positions.shape[0] == 3
    assert context.embeds is not None
    state = drafter.start(context if pictures == "projected" else replace(context, embeds=None))
    roots, zeros = torch.tensor([20, 21]), torch.zeros(2, dtype=torch.long)
    drafter.update(state, draft, scores, Verdict(zeros[:, None], roots, zeros.bool(), roots[:, None], zeros + 1))
    result = drafter.propose(state, roots, Plan(3, 3))
    for row in range(2):
        row_mask = context.mask[row]
        embeds = embedding(context.tokens)[row, row_mask]
        if pictures == "projected":
            embeds = context.embeds[row, row_mask]
        features = torch.cat([context.features[layer][row, row_mask] for layer in network.config.layers], -1)
        states = network.fuse(torch.cat([embeds[1:], embedding(roots[row : row + 1])]), features)[None]
        places = context.positions[:, row, row_mask]
        begin = int(context.next_position[row])
        if pictures == "dropped":
            states = states[:, torch.cat([~context.visual[row, row_mask][1:], torch.ones(1, dtype=torch.bool)])]
            places, begin = torch.arange(states.shape[1]).expand(3, -1), states.shape[1]
        elif positions == "text":
            places, begin = torch.arange(int(row_mask.sum())).expand(3, -1), int(row_mask.sum())
        elif positions == "temporal":
            places = places[:1].expand(3, -1)
        for depth in range(3):
            hidden, _ = network(states, places[:, None] if positions == "axes" else places[:1])
            token = drafter.logits(hidden[0, -1]).argmax()
            assert int(result.tokens[row, 1 + depth]) == int(token)
            states = torch.cat([states, network.fuse_drafted(embedding(token)[None, None], hidden[:, -1:])], 1)
            places = torch.cat([places, torch.full((3, 1), begin + depth)], 1)


@torch.no_grad()
def test_features_include_deepstack() -> None:
    model = vision_model("qwen3_vl")
    inputs = batch_of("qwen3_vl", [[[7, 8], Picture.random(1, (16, 16)), [9, 10, 11]]])
    seen: list[Any] = []
    layer = model.model.language_model.layers[1]
    hook = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    context = MediaTarget(model).prefill(inputs, Needs(layers=(0,))).context
    hook.remove()
    assert torch.equal(context.features[0], seen[0])
    stock = model(**inputs, output_hidden_states=True).hidden_states[1]
    differs = (context.features[0] - stock).abs().amax(-1)[0] > 0
    assert torch.equal(differs, context.visual[0])


@pytest.mark.parametrize("scale", [-1.0, 0.0])
@pytest.mark.parametrize("form", ["plain", "parallel-part"])
def test_an_adversarial_head_changes_no_text(form: str, scale: float) -> None:
    """Least likely tokens first, or all alike: texts stay, drafts are rejected."""
    drafter, inputs = scatter_vocabulary(tree_growing("eagle3", MODEL, **FORMS[form])), prompts(4)
    with torch.no_grad():
        drafter.network.lm_head.weight.mul_(scale)
    expected = MODEL.generate(**inputs, max_new_tokens=12, do_sample=False)
    for nodes in (4, (9, 3)):
        result = mmdec.generate(
            MODEL, inputs, drafter, num_speculative_tokens=nodes, max_new_tokens=12, do_sample=False
        )
        assert torch.equal(result.sequences, expected)


@torch.no_grad()
def test_turns_of_a_chat_continue_the_drafters_columns() -> None:
    """Over a cache, the second turn drafts from the first turn's columns of all layers."""
    drafter, cache = tree_growing("eagle3", MODEL, **FORMS["layers"]), DynamicCache()
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    first = mmdec.generate(
        MODEL,
        {"input_ids": ids, CACHE_ARGUMENT: cache, "attention_mask": torch.ones_like(ids)},
        drafter,
        num_speculative_tokens=3,
        max_new_tokens=8,
        do_sample=False,
    ).sequences
    whole = torch.cat([first, torch.tensor([[11, 12, 13]])], 1)
    watched = Watched(drafter)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    inputs = {"input_ids": whole, CACHE_ARGUMENT: cache, "attention_mask": torch.ones_like(whole)}
    result = mmdec.generate(MODEL, inputs, watched, num_speculative_tokens=3, **options).sequences
    assert torch.equal(result, MODEL.generate(whole, attention_mask=torch.ones_like(whole), **options))
    assert watched.previous_state[0] is not None
    assert watched.memories[0].cache.lengths[0] >= first.shape[1]
