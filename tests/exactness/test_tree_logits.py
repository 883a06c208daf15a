"""Tests that a tree's logits equal those of each of its paths alone: in float64, over several rounds, with padding.

"eager" attention rounds its softmax to float32 for any dtype, so its tolerance is larger. For the same reason
transformers' eager pass over a float64 prompt with padding is NaN (the mask's least float64 is -inf in float32, in all
columns of a padding query), so this one case is in float32.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmdec.targets.attention import TREE_ATTENTION
from mmdec.targets.text import TextTarget
from mmdec.types import Draft, Needs
from tests.support.tiny_text import VOCABULARY, language_model
from tests.support.trees import random_draft, verdict_of, way

BOUND = {"sdpa": 1e-11, TREE_ATTENTION: 1e-11, "eager": 2e-5}  # of the largest logit


def model_of(family: str, attention: str) -> PreTrainedModel:
    return language_model(family, num_hidden_layers=3, attn_implementation=attention).double()


def logits_of_text(model: PreTrainedModel, text: list[int]) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]


def furthest(model: PreTrainedModel, draft: Draft, logits: Tensor, texts: list[list[int]]) -> float:
    """Return the largest difference between a node's logits and those of its path alone, over the largest logit."""
    worst = 0.0
    for row, text in enumerate(texts):
        parents, tokens = draft.parents[row].tolist(), draft.tokens[row].tolist()
        for node in range(int(draft.size[row])):
            expected = logits_of_text(model, text + [tokens[step] for step in way(parents, node)])
            worst = max(worst, float((logits[row, node] - expected).abs().max() / expected.abs().max()))
    return worst


def prompts(rng: random.Random, lengths: list[int]) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Texts and what a tokenizer would make of them; padding is on the left and holds tokens like any other."""
    width = max(lengths)
    ids = torch.tensor([[rng.randrange(VOCABULARY) for _ in range(width)] for _ in lengths])
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    texts = [row[width - length :] for row, length in zip(ids.tolist(), lengths, strict=True)]
    return texts, {"input_ids": ids, "attention_mask": mask}


def play(
    target: TextTarget,
    session: Any,
    model: PreTrainedModel,
    rng: random.Random,
    texts: list[list[int]],
    nodes: int,
    bound: float,
) -> None:
    """Return one round: a random draft, whose logits must be those of its paths, and a random path accepted."""
    draft = random_draft(rng, len(texts), nodes)
    logits = target.score(session, draft).logits
    assert furthest(model, draft, logits, texts) < bound
    paths = []
    for row, text in enumerate(texts):
        paths.append(way(draft.parents[row].tolist(), rng.randrange(int(draft.size[row]))))
        text += draft.tokens[row, paths[-1]].tolist()
    target.commit(session, verdict_of(paths))


@pytest.mark.parametrize("attention", ["sdpa", "eager", TREE_ATTENTION])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("lengths", [[6], [6, 6], [3, 7, 5]], ids=["one row", "even rows", "padded rows"])
@torch.inference_mode()
def test_each_node_is_scored_as_the_end_of_its_path(family: str, attention: str, lengths: list[int]) -> None:
    model, rng = model_of(family, attention), random.Random(len(lengths))
    if attention == "eager" and min(lengths) < max(lengths):
        model.float()
    target = TextTarget(model)
    texts, inputs = prompts(rng, lengths)
    output = target.prefill(inputs, Needs())
    session, scores = output.session, output.scores
    for row, text in enumerate(texts):
        expected = logits_of_text(model, text)
        assert float((scores.logits[row, 0] - expected).abs().max() / expected.abs().max()) < BOUND[attention]
    target.commit(session, verdict_of([[0]] * len(texts)))  # the prompt's verdict changes nothing
    for nodes in (7, 1, 4, 12, 1, 9):
        play(target, session, model, rng, texts, nodes, BOUND[attention])


@pytest.mark.parametrize("attention", ["sdpa", TREE_ATTENTION])
@torch.inference_mode()
def test_rows_leave_and_change_places(attention: str) -> None:
    model, rng = model_of("llama", attention), random.Random(1)
    target = TextTarget(model)
    texts, inputs = prompts(rng, [4, 9, 2, 6])
    session = target.prefill(inputs, Needs()).session
    for live in ([0, 1, 2, 3], [3, 0, 2], [1, 2], [1], [0]):
        texts = [texts[row] for row in live]
        target.select(session, torch.tensor(live))
        for nodes in (5, 8):
            play(target, session, model, rng, texts, nodes, BOUND[attention])


@torch.inference_mode()
def test_a_long_run_outgrows_its_pools() -> None:
    model, rng = model_of("llama", "sdpa"), random.Random(2)
    target = TextTarget(model)
    texts, inputs = prompts(rng, [3, 5])
    session = target.prefill(inputs, Needs()).session
    for _ in range(12):  # 12 chains of 14, all accepted in the first row and half of them in the second
        draft = random_draft(rng, 2, 14)
        chains = Draft(draft.tokens, torch.arange(-1, 13).expand(2, -1), torch.full((2,), 14))
        target.score(session, chains)
        paths = [list(range(14)), list(range(7))]
        for row, path in enumerate(paths):
            texts[row] += chains.tokens[row, path].tolist()
        target.commit(session, verdict_of(paths))
    assert session.rows.ends == [len(text) + start for text, start in zip(texts, [2, 0], strict=True)]
    draft = random_draft(rng, 2, 6)
    assert furthest(model, draft, target.score(session, draft).logits, texts) < BOUND["sdpa"]


@torch.inference_mode()
def test_padding_in_the_middle_of_a_row_is_closed() -> None:
    model, rng = model_of("qwen2", "sdpa"), random.Random(3)
    target = TextTarget(model)
    ids = torch.tensor([[rng.randrange(VOCABULARY) for _ in range(8)] for _ in range(2)])
    mask = torch.tensor([[1, 1, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 1, 1, 1]])
    texts = [row[seen.bool()].tolist() for row, seen in zip(ids, mask, strict=True)]
    output = target.prefill({"input_ids": ids, "attention_mask": mask}, Needs())
    session, scores = output.session, output.scores
    for row, text in enumerate(texts):
        torch.testing.assert_close(scores.logits[row, 0], logits_of_text(model, text), rtol=1e-10, atol=1e-10)
    for nodes in (6, 6):
        draft = random_draft(rng, 2, nodes)
        assert furthest(model, draft, target.score(session, draft).logits, texts) < BOUND["sdpa"]
        target.commit(session, verdict_of([[0], [0]]))
        for row, text in enumerate(texts):
            text.append(int(draft.tokens[row, 0]))


@torch.inference_mode()
def test_an_ignored_mask_is_caught() -> None:
    """The negative control: without its mask a tree is scored as a chain, far beyond the bound."""
    model, rng = model_of("llama", "sdpa"), random.Random(4)
    target = TextTarget(model)
    texts, inputs = prompts(rng, [6])
    session = target.prefill(inputs, Needs()).session
    draft = random_draft(rng, 1, 8)
    chain = Draft(draft.tokens, torch.arange(-1, 7)[None], draft.size)
    assert furthest(model, draft, target.score(session, chain).logits, texts) > 1e-3
