"""Tests that a tree's nodes after images get the scores of their paths alone: in float64, over several rounds, in
batches of different lengths."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from mmdec.targets.attention import TREE_ATTENTION
from mmdec.targets.media import MediaTarget
from mmdec.types import Draft, Needs
from tests.support.grid import sample
from tests.support.tiny_vlm import AXES, IMAGE, KINDS, VIDEO, Picture, Row, batch_of, row_of, vision_model
from tests.support.trees import random_draft, verdict_of, way

BOUND = {"sdpa": 1e-11, TREE_ATTENTION: 1e-11, "eager": 2e-5}  # of the largest logit; eager rounds to float32


def in_float64(kind: str, attention: str) -> Any:
    model = copy.deepcopy(vision_model(kind)).double()
    model.set_attn_implementation(attention)
    return model


def doubled(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}


def logits_of_text(model: Any, kind: str, row: Row, more: list[int]) -> Tensor:
    """Return the logits after one row and these tokens, in a pass without a cache: the model finds its own
    positions."""
    inputs = doubled(batch_of(kind, [[*row, more]]))
    del inputs["attention_mask"]
    with torch.no_grad():
        return model(**inputs, use_cache=False).logits[0, -1]


def furthest(model: Any, kind: str, rows: list[Row], texts: list[list[int]], draft: Draft, logits: Tensor) -> float:
    worst = 0.0
    for row, (parts, text) in enumerate(zip(rows, texts, strict=True)):
        tokens, parents = draft.tokens[row].tolist(), draft.parents[row].tolist()
        for node in range(int(draft.size[row])):
            expected = logits_of_text(model, kind, parts, text + [tokens[step] for step in way(parents, node)])
            worst = max(worst, float((logits[row, node] - expected).abs().max() / expected.abs().max()))
    return worst


WAYS = [(kind, attention) for kind in KINDS for attention in BOUND]
EACH = [*zip(KINDS, ("eager", TREE_ATTENTION, "sdpa", "eager", TREE_ATTENTION), strict=True), ("qwen3_vl", "sdpa")]


@pytest.mark.parametrize(("kind", "attention"), sample(WAYS, EACH))
@torch.inference_mode()
def test_each_node_is_scored_as_the_end_of_its_path(kind: str, attention: str) -> None:
    model, rng = in_float64(kind, attention), random.Random(kind)
    target = MediaTarget(model)
    rows_of = [[row_of(rng, content) for content in batch] for batch in (["three"], ["three", "none", "video"])]
    if attention == "eager":  # whose own pass over a float64 prompt with padding is NaN
        rows_of[1] = [row_of(rng, "one")] * 2
    for rows in rows_of:
        texts: list[list[int]] = [[] for _ in rows]
        output = target.prefill(doubled(batch_of(kind, rows)), Needs())
        session, scores = output.session, output.scores
        for row, parts in enumerate(rows):
            expected = logits_of_text(model, kind, parts, [])
            assert float((scores.logits[row, 0] - expected).abs().max() / expected.abs().max()) < BOUND[attention]
        target.commit(session, verdict_of([[0]] * len(rows)))
        for nodes in (6, 1, 5):
            draft = random_draft(rng, len(rows), nodes)
            logits = target.score(session, draft).logits
            assert furthest(model, kind, rows, texts, draft, logits) < BOUND[attention]
            paths = [way(draft.parents[row].tolist(), rng.randrange(int(draft.size[row]))) for row in range(len(rows))]
            for row, path in enumerate(paths):
                texts[row] += draft.tokens[row, path].tolist()
            target.commit(session, verdict_of(paths))
        if len(rows) > 1:
            target.select(session, torch.tensor([1]))
            draft = random_draft(rng, 1, 5)
            logits = target.score(session, draft).logits
            assert furthest(model, kind, rows[1:2], texts[1:2], draft, logits) < BOUND[attention]


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_prompt_that_ends_in_an_image_goes_on_as_generate_does(kind: str) -> None:
    """The axes then differ: each goes on from its own last position."""
    model, rng = in_float64(kind, "sdpa"), random.Random(4)
    inputs = doubled(batch_of(kind, [[[9, 10, 11], Picture.random(5, (24, 16))]]))
    cut = inputs["input_ids"].shape[1] - (kind in AXES)  # the token that closes an image
    for name in {"input_ids", "attention_mask", "mm_token_type_ids"} & inputs.keys():
        inputs[name] = inputs[name][:, :cut]
    assert int(inputs["input_ids"][0, -1]) == IMAGE
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "suppress_tokens": [IMAGE, VIDEO]}
    out = model.generate(**inputs, **options, output_logits=True, return_dict_in_generate=True)
    ids = out.sequences[0, cut:].tolist()
    target = MediaTarget(model)
    output = target.prefill(inputs, Needs())
    session, scores = output.session, output.scores
    target.commit(session, verdict_of([[0]]))
    torch.testing.assert_close(scores.logits[0, 0].float(), out.logits[0][0])
    wrong = rng.randrange(6, 50)
    draft = Draft(torch.tensor([[ids[0], wrong, ids[1], ids[2]]]), torch.tensor([[-1, 0, 0, 2]]), torch.tensor([4]))
    logits = target.score(session, draft).logits[0].float()
    for node, step in ((0, 1), (2, 2), (3, 3)):
        torch.testing.assert_close(logits[node], out.logits[step][0])
