"""Tests drafts with soft nodes: they are read as embeddings, never accepted, and change no text and no distribution."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import mmdec
from mmdec.core.drafter_runner import DrafterRunner
from mmdec.core.timing import CPU, RoundTimer
from mmdec.core.tree import height, trees_from_lists
from mmdec.drafters.prompt_tokens.drafter import PromptTokensDrafter
from mmdec.drafters.prompt_tokens.network import PromptTokens, PromptTokensConfig
from mmdec.targets.text import TextTarget
from mmdec.types import Context, Draft, Needs, Plan
from tests.exactness.enumeration import chi_square
from tests.support.families import model_of
from tests.support.tiny_text import language_model
from tests.support.toy_target import Scripted

FAMILIES = ("LlamaForCausalLM", "GPT2LMHeadModel", "GPTNeoForCausalLM", "DeepseekV2ForCausalLM", "GemmaForCausalLM")


def drafter_for(model: Any, **options: Any) -> PromptTokensDrafter:
    torch.manual_seed(2)
    config = model.config.get_text_config(decoder=True)
    options = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size, **options}
    return PromptTokensDrafter(PromptTokens(PromptTokensConfig(**options)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_soft_node_with_a_tokens_embedding_is_scored_as_the_token(family: str) -> None:
    model: Any = model_of(family)
    target = TextTarget(model, checked=True)
    embed = model.get_input_embeddings()
    logits = list[Tensor]()
    for is_soft in (False, True):
        # nodes 2 and 3 are the chain 9, 11 below node 1; as soft nodes their tokens are others
        tokens = [8, 5, 6, 10] if is_soft else [8, 9, 11, 10]
        draft = trees_from_lists(torch.tensor([7, 7]), [(tokens, [0, 1, 2, 1])] * 2)
        if is_soft:
            soft = torch.zeros(2, 5, embed.weight.shape[1])
            soft[:, 2:4] = embed(torch.tensor([9, 11])).detach()
            draft = replace(draft, soft=soft)
        ids = torch.tensor([[3, 4, 5, 6], [6, 5, 4, 3]])
        session = target.prefill({"input_ids": ids}, Needs()).session
        logits.append(target.score(session, draft).logits)
    assert torch.equal(logits[0], logits[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_texts_of_batches_equal_stock(family: str) -> None:
    model: Any = model_of(family)
    rng = random.Random(family)
    for batch, copies in ((1, 1), (3, 2)):
        ids = torch.tensor([[rng.randrange(3, 40) for _ in range(4)] * 3 for _ in range(batch)])
        mask = torch.ones_like(ids)
        for row in range(1, batch):
            mask[row, : 4 * row - 1] = 0
        inputs = {"input_ids": ids, "attention_mask": mask}
        options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": 2}
        expected = model.generate(**inputs, **options)
        for nodes in (1, 5, (9, 3), (31, 5), None):
            result = mmdec.generate(
                model, inputs, drafter_for(model, copies=copies), num_speculative_tokens=nodes, **options
            )
            assert torch.equal(result.sequences, expected)


def test_soft_nodes_are_read_from_the_device_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = model_of("LlamaForCausalLM")
    soft_nodes: Any = vars(Draft)["soft_nodes"]
    read, reads = soft_nodes.func, list[Draft]()

    def count(draft: Draft) -> Any:
        reads.append(draft)
        return read(draft)

    monkeypatch.setattr(soft_nodes, "func", count)
    ends = [lambda ids, scores: torch.tensor([ids.shape[1] >= 40])]  # before the maximum length cuts any draft
    ids = torch.tensor([[3, 4, 5, 3, 4, 5]])
    options: dict[str, Any] = {
        "max_new_tokens": 90,
        "do_sample": False,
        "eos_token_id": None,
        "stopping_criteria": ends,
    }
    result = mmdec.generate(model, ids, drafter_for(model), num_speculative_tokens=(9, 3), **options)
    assert len(reads) == len(result.rounds)
    assert any(draft.soft is not None for draft in reads)


def test_rows_that_join_and_leave_keep_their_texts() -> None:
    model: Any = model_of("LlamaForCausalLM")
    rng = random.Random(4)
    asked: list[Any] = [torch.tensor([[rng.randrange(3, 40) for _ in range(3 + row)]]) for row in range(7)]
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    alone = [mmdec.generate(model, ids, None, **options).sequences for ids in asked]
    together = mmdec.generate(model, asked, drafter_for(model), num_speculative_tokens=(15, 4), batch_size=3, **options)
    assert all(
        torch.equal(generation.sequences, expected) for generation, expected in zip(together, alone, strict=True)
    )
    assert max(max(round_.accepted) for generation in together for round_ in generation.rounds) > 0


@pytest.mark.parametrize("rule", ["residual", "traversal", "sampled"])
def test_sampled_texts_have_the_targets_distribution(rule: Any) -> None:
    model: Any = language_model(vocab_size=5)
    drafter, count, length = drafter_for(model), 1500, 3
    ids = torch.tensor([[3, 4, 1]]).repeat(count, 1)
    options: dict[str, Any] = {"max_new_tokens": length, "min_new_tokens": length, "do_sample": True, "top_k": 0}
    options |= {"pad_token_id": 0, "eos_token_id": None, "attention_mask": torch.ones_like(ids)}
    inputs = {"input_ids": ids}
    drawn = mmdec.generate(
        model, inputs, drafter, rule=rule, num_speculative_tokens=(9, 2), seed=3, **options
    ).sequences[:, 3:]
    expected = dict[tuple[int, ...], float]()
    texts = torch.cartesian_prod(*[torch.arange(5)] * length)
    with torch.no_grad():
        logits = model(torch.cat([ids[:1].expand(len(texts), -1), texts], 1)).logits[:, 2:-1]
    probabilities = logits.log_softmax(-1).gather(2, texts[..., None])[..., 0].sum(1).exp()
    expected = {
        tuple(text): float(probability) for text, probability in zip(texts.tolist(), probabilities, strict=True)
    }
    assert chi_square(Counter(map(tuple, drawn.tolist())), expected) < 5


def test_a_soft_node_is_not_accepted_for_its_token() -> None:
    """The soft nodes' tokens are those that the model says next."""
    model: Any = model_of("LlamaForCausalLM")
    ids = torch.tensor([[3, 4, 5, 6]])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = mmdec.generate(model, ids, None, **options).sequences

    class SoftTruth(Scripted):
        def __init__(self) -> None:
            super().__init__(lambda *_: ([], []))

        def propose(self, state: Any, roots: Tensor, plan: Plan) -> Draft:
            at = len(state.rows[0])
            tail = expected[0, at : at + 3].tolist()
            draft = trees_from_lists(roots, [(tail, list(range(len(tail))))])
            soft = torch.ones(1, len(tail) + 1, model.config.hidden_size)
            soft[:, 0] = 0
            return replace(draft, soft=soft)

    result = mmdec.generate(model, ids, SoftTruth(), num_speculative_tokens=4, **options)
    assert torch.equal(result.sequences, expected)
    assert all(round_.accepted == [0] and round_.drafted == [0] for round_ in result.rounds)


class Proposing(Scripted):
    """Proposes one draft."""

    def __init__(self, draft: Draft) -> None:
        super().__init__(lambda *_: ([], []))
        self.draft = draft

    def start(self, context: Context) -> Any:
        return None

    def propose(self, state: Any, roots: Tensor, plan: Plan) -> Draft:
        return self.draft


def proposed(draft: Draft, plan: Plan, room: int) -> Draft:
    roots = draft.tokens[:, :1]
    context = Context(roots, torch.ones_like(roots, dtype=torch.bool), torch.zeros_like(roots)[None], roots[:, 0])
    return DrafterRunner(Proposing(draft), context, 50, RoundTimer(CPU)).propose(roots[:, 0], plan, [room])


def test_soft_nodes_count_as_nodes_and_not_as_depth() -> None:
    soft = torch.zeros(1, 5, 4)
    soft[:, 2:] = torch.arange(1.0, 4.0)[:, None]
    draft = replace(trees_from_lists(torch.tensor([7]), [([8, 7, 7, 7], [0, 1, 2, 3])]), soft=soft)
    assert height(draft) == 1
    assert torch.equal(proposed(draft, Plan(4, 1), 9).tokens, draft.tokens)
    for plan, room in ((Plan(3, 1), 9), (Plan(4, 4), 4)):  # a node too many; a node beyond the last position
        cut = proposed(draft, plan, room)
        assert cut.soft is not None
        assert torch.equal(cut.soft, soft[:, :4])


@pytest.mark.parametrize("soft", [torch.ones(1, 2, 4), torch.full((1, 2, 4), torch.nan), torch.zeros(1, 3, 4)])
def test_wrong_soft_nodes_end_the_drafting(soft: Tensor) -> None:
    draft = replace(trees_from_lists(torch.tensor([7]), [([8], [0])]), soft=soft)
    with pytest.warns(RuntimeWarning, match="soft nodes"):
        assert proposed(draft, Plan(4, 4), 9).tokens.shape == (1, 1)
