"""The tree-growing drafter on tiny language models, against drafts recomputed from scratch."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import mmdec
from mmdec.core.tree import ancestors, root_only, sort_depth_first
from mmdec.drafters.networks.drafter import NetworkDrafter
from mmdec.errors import InputError
from mmdec.types import Context, Draft, Plan, Scores, Verdict
from tests.support.draft_networks import (
    PROMPTS,
    Checked,
    draft_network,
    from_scratch,
    overfitted,
    paths,
    rounds_of,
    start_drafter,
    texts,
    tree_growing,
)
from tests.support.draft_warps import warp_at
from tests.support.tiny_text import VOCABULARY, language_model
from tests.support.toy_target import RandomBudget, padded
from tests.support.trees import is_chain

NO_IMAGE = Context(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1), torch.zeros(1))


@pytest.mark.parametrize("system", ["eagle", "msd"])
@pytest.mark.parametrize("rows", [1, 4])
def test_the_cache_equals_recomputing_everything(system: str, rows: int) -> None:
    """Through rejections, plain rounds, ragged rows and rows that end: every draft, in float64."""
    model = language_model().double()
    checked = Checked(tree_growing(system, model, width=3), model)
    rounds = rounds_of(model, checked, RandomBudget(Random(rows)), PROMPTS[:rows], 24)
    plain = rounds_of(model, None, RandomBudget(Random(rows), 0), PROMPTS[:rows], 24)
    assert checked.compared > 8
    assert texts(rounds, rows) == texts(plain, rows)
    assert sum(sum(round_.accepted) for round_ in rounds) > 0  # else nothing was ever kept of a draft
    assert any(took < drawn for round_ in rounds for took, drawn in zip(round_.accepted, round_.drafted, strict=True))


def test_features_of_several_layers_are_read_together() -> None:
    model = language_model(num_hidden_layers=4).double()
    checked = Checked(tree_growing("eagle", model, layers=(0, 2, -1), width=3), model)
    rounds_of(model, checked, RandomBudget(Random(5)), PROMPTS[:2])
    assert checked.compared > 4


@pytest.mark.parametrize("plan", [Plan(4, 4), Plan(9, 3), Plan(25, 5)])
def test_ragged_rows_are_drafted_as_alone(plan: Plan) -> None:
    model = language_model().double()
    drafter = tree_growing("eagle", model, width=4)
    roots = [6, 14, 21, 33]
    with torch.inference_mode():
        together = drafter.propose(start_drafter(model, drafter, PROMPTS, roots), torch.tensor(roots), plan)
        for row, prompt in enumerate(PROMPTS):
            own = torch.tensor(roots[row : row + 1])
            single = drafter.propose(start_drafter(model, drafter, [prompt], own.tolist()), own, plan)
            assert torch.equal(together.tokens[row], single.tokens[0])
            assert torch.equal(together.parents[row], single.parents[0])


@pytest.mark.parametrize("temperature", [None, 0.7])
@pytest.mark.parametrize(("nodes", "depth"), [(0, 0), (1, 1), (4, 4), (5, 9), (7, 2), (12, 3), (60, 7)])
def test_drafts_are_trees_within_the_plan(nodes: int, depth: int, temperature: float | None) -> None:
    model = language_model()
    drafter, roots = tree_growing("eagle", model, width=4), torch.tensor([6, 14, 21])
    generator = torch.Generator().manual_seed(5)
    memory = start_drafter(model, drafter, PROMPTS[:3], roots.tolist())
    warp = None if temperature is None else warp_at(temperature)
    draft = drafter.propose(memory, roots, Plan(nodes, depth, warp, generator))
    assert draft.tokens[:, 0].tolist() == roots.tolist()
    for row in range(3):
        result = paths(draft, row)
        assert len(result) <= nodes
        assert max(map(len, result), default=0) <= depth
        if depth >= nodes:
            assert len(result) == nodes
    if depth >= nodes:
        assert is_chain(draft)


def test_a_draft_is_rolled_back_exactly() -> None:
    """After any draft, the next one equals that of a run that never made it."""
    model = language_model().double()
    drafter, roots = tree_growing("eagle", model), torch.tensor([6, 14])
    with torch.inference_mode():
        one, other = (start_drafter(model, drafter, PROMPTS[:2], roots.tolist()) for _ in range(2))
        first = drafter.propose(one, roots, Plan(40, 6))
        again = drafter.propose(start_drafter(model, drafter, PROMPTS[:2], roots.tolist()), roots, Plan(40, 6))
        assert torch.equal(first.tokens, again.tokens)
        assert one.cache.lengths == [7, 3]
        drafter.propose(other, roots, Plan(2, 2))
        features = {-1: torch.randn(2, 1, 32, dtype=torch.float64)}
        verdict = Verdict(
            torch.zeros(2, 1, dtype=torch.long), roots + 1, roots < 0, (roots + 1)[:, None], torch.ones_like(roots)
        )
        drafts = []
        for memory in (one, other):
            drafter.update(memory, root_only(roots), Scores(torch.zeros(2, 1, VOCABULARY), features), verdict)
            drafts.append(drafter.propose(memory, roots + 1, Plan(20, 4)))
            assert memory.cache.lengths == [8, 4]
        assert torch.equal(drafts[0].tokens, drafts[1].tokens)
        assert torch.equal(drafts[0].parents, drafts[1].parents)


def drafted_by_bias(bias: dict[int, float], plan: Plan) -> Draft:
    """Draft with a head whose logits are its bias, 0 at other tokens, whatever the network's states are."""
    model = language_model()
    drafter = tree_growing("eagle", model, width=3)
    drafter.output = torch.nn.Linear(32, VOCABULARY)
    with torch.inference_mode():
        drafter.output.weight.zero_()
        drafter.output.bias.zero_()
        for token, value in bias.items():
            drafter.output.bias[token] = value
        return drafter.propose(start_drafter(model, drafter, PROMPTS[:1], [6]), torch.tensor([6]), plan)


def test_of_equally_likely_nodes_the_eldest_are_drafted() -> None:
    result = paths(drafted_by_bias({}, Plan(5, 3)), 0)
    assert len(result) == 5
    for path in result:
        assert len(path) == 1 or path[:-1] in result
    assert sum(len(path) == 1 for path in result) == 3  # the whole first level, then the eldest of the second


def test_a_certain_childs_ancestors_are_drafted_in_spite_of_rounding() -> None:
    draft = drafted_by_bias({0: 2000.0, 1: 1000.0, 2: 1000.0}, Plan(7, 4))
    result = paths(draft, 0)
    assert (0, 0, 0, 0) in result
    seen = ancestors(draft.parents)[0]
    assert bool((seen.sum(1) == torch.tensor([1, *(len(path) + 1 for path in result)])).all())


def test_without_pruning_the_best_paths_of_all_are_kept() -> None:
    model = language_model().double()
    drafter = tree_growing("eagle", model, width=VOCABULARY)
    with torch.inference_mode():
        draft = drafter.propose(start_drafter(model, drafter, PROMPTS[:1], [6]), torch.tensor([6]), Plan(VOCABULARY, 2))
        text = [*PROMPTS[0], 6]
        states = model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0, :-1]
        first = from_scratch(drafter, NO_IMAGE, states, text, ())
        probabilities = {(token,): float(first[token]) for token in range(VOCABULARY)}
        for token in range(VOCABULARY):
            second = from_scratch(drafter, NO_IMAGE, states, text, (token,))
            probabilities |= {(token, other): float(first[token] + second[other]) for other in range(VOCABULARY)}
    best = sorted(probabilities, key=lambda path: -probabilities[path])[:VOCABULARY]
    assert set(paths(draft, 0)) == set(best)
    assert max(map(len, best)) == 2


def test_nodes_are_sorted_depth_first_by_likelihood() -> None:
    # kept 0, 1 below the root; 2 below 1 (number 1 is node 0); 3 below node 2's number
    tokens, parents = sort_depth_first([0, 4, 1, 7], [10, 20, 30, 40], [0, 1, 0, 5])
    assert tokens == [10, 20, 40, 30]
    assert parents == [0, 1, 2, 0]


class Counting(torch.nn.Module):
    """An embedding that notes how often it is read."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.embedding, self.calls = embedding, 0

    def forward(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        return self.embedding(tokens)


def test_a_run_without_drafts_runs_no_network() -> None:
    model = language_model()
    counting = Counting(model.get_input_embeddings())
    drafter = NetworkDrafter(draft_network("eagle", model), counting, model.get_output_embeddings())  # type: ignore[arg-type]
    rounds_of(model, drafter, RandomBudget(Random(0), 0), PROMPTS)
    assert not counting.calls
    rounds_of(model, drafter, RandomBudget(Random(0)), PROMPTS)
    assert counting.calls


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("nodes", [3, (7, 3), (30, 6), None])
def test_random_weights_do_not_change_the_output(batch: int, nodes: Any) -> None:
    model = language_model()
    inputs = padded(PROMPTS[:batch])
    options = {"max_new_tokens": 20, "do_sample": False}
    expected = model.generate(**inputs, **options)  # type: ignore[operator]
    for system in ("eagle", "msd"):
        result = mmdec.generate(model, inputs, tree_growing(system, model), num_speculative_tokens=nodes, **options)
        assert torch.equal(result.sequences, expected)


def test_drawn_children_come_with_what_they_were_drawn_from() -> None:
    model = language_model().double()
    drafter, roots = tree_growing("eagle", model), torch.tensor([6, 14])
    generator = torch.Generator().manual_seed(7)
    with torch.inference_mode():
        memory = start_drafter(model, drafter, PROMPTS[:2], roots.tolist())
        draft = drafter.propose(memory, roots, Plan(9, 3, warp_at(1.5), generator))
        assert draft.probs is not None
        assert draft.probs.shape == (*draft.tokens.shape, VOCABULARY)
        for row in range(2):
            text, parents = [*PROMPTS[row], int(roots[row])], draft.parents[row].tolist()
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0, :-1]
            for node, path in enumerate([(), *paths(draft, row)]):
                if node in parents[1:]:
                    expected = from_scratch(drafter, NO_IMAGE, states, text, path).float() / 1.5
                    torch.testing.assert_close(draft.probs[row, node], expected.softmax(-1))


@pytest.mark.parametrize("nodes", [(7, 3), 4])
def test_drawn_drafts_are_accepted_by_residual_sampling(nodes: Any) -> None:
    model = language_model()
    drafter = tree_growing("eagle", model)
    out = mmdec.generate(
        model, padded(PROMPTS), drafter, rule="residual", num_speculative_tokens=nodes, seed=3, max_new_tokens=20
    )
    assert out.lossless
    assert out.tokens_per_round > 1


def test_a_drafter_of_another_model_is_refused() -> None:
    model, other, ids = language_model(), language_model(vocab_size=VOCABULARY + 1), torch.tensor([[5]])
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(output, torch.nn.Linear)
    with pytest.raises(InputError, match="`drafter` must fit a model with 32 channels and 62 tokens"):
        mmdec.generate(other, ids, tree_growing("eagle", model), max_new_tokens=3)
    with pytest.raises(InputError, match="`output` must be"):
        NetworkDrafter(draft_network("eagle", other), embedding, output)
    double = NetworkDrafter(draft_network("eagle", model).double(), embedding, output)
    with pytest.raises(InputError, match="`drafter` must be on"):
        mmdec.generate(model, ids, double, max_new_tokens=3)
    with pytest.raises(InputError, match="`width`"):
        tree_growing("eagle", model, width=0)


@pytest.mark.parametrize("system", ["eagle", "eagle3"])
def test_a_drafter_that_knows_the_text_saves_passes(system: str) -> None:
    """Trained on what the model writes, three steps ahead: more than three tokens per round."""
    model, ids = language_model(), torch.tensor([[5, 6, 7, 8, 9, 5, 6]])
    options: Any = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": 60}
    text = model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
    drafter = overfitted(system, model, text)
    for nodes in (4, (12, 4)):
        out = mmdec.generate(model, ids, drafter, num_speculative_tokens=nodes, **options)
        assert torch.equal(out.sequences, text)
        assert out.tokens_per_round > 3
