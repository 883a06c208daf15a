"""Tests how prompt tokens are drafted: which nodes are soft, what is read there, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mmdec
from mmdec.core.tree import trees_from_lists
from mmdec.drafters.prompt_tokens.drafter import PromptTokensDrafter, divide_nodes
from mmdec.drafters.prompt_tokens.network import PromptTokens, PromptTokensConfig
from mmdec.errors import InputError
from mmdec.pretrained.drafters import save_network
from mmdec.types import Plan, Scores, Verdict
from tests.support.recurrent import recurrent_model
from tests.support.tiny_text import language_model, prompts

MODEL: Any = language_model()
PROBABILITIES = [[0.6, 0.2, 0.1], [0.4, 0.2, 0.1]]


def network(**options: Any) -> PromptTokens:
    torch.manual_seed(1)
    return PromptTokens(PromptTokensConfig.like(MODEL.config, **options))


def test_without_guesses_all_nodes_are_soft_ones_of_the_root() -> None:
    assert divide_nodes(PROBABILITIES, 0, Plan(7, 4)) == {(): 2}


def test_nodes_go_where_they_are_expected_to_gain_most() -> None:
    # gains: token (0,) 0.6; its first soft node 0.6 * 0.6; token (0, 0) 0.24, below it 0.24 * 0.6; token (1,) 0.2;
    # the root's first soft node (1 - 0.6) * 0.6
    assert divide_nodes(PROBABILITIES, 2, Plan(1, 1)) == {(): 0, (0,): 0}
    assert divide_nodes(PROBABILITIES, 2, Plan(2, 2)) == {(): 0, (0,): 1}
    assert divide_nodes(PROBABILITIES, 2, Plan(4, 4)) == {(): 1, (0,): 1, (0, 0): 0}
    assert set(divide_nodes(PROBABILITIES, 2, Plan(40, 1))) == {(), (0,), (1,), (2,)}


@pytest.mark.parametrize("nodes", range(1, 20))
@pytest.mark.parametrize("copies", [1, 2])
def test_a_plan_is_not_exceeded(nodes: int, copies: int) -> None:
    for guessed in range(3):
        places = divide_nodes(PROBABILITIES, guessed, Plan(nodes, 2), copies)
        assert len(places) - 1 + copies * sum(places.values()) <= nodes
        assert all(path[:-1] in places for path in places if path)
        assert max(map(len, places)) <= guessed


@pytest.mark.parametrize("nodes", range(1, 20))
@pytest.mark.parametrize("copies", [1, 2])
def test_a_draft_has_the_planned_soft_nodes_with_the_inputs_of_their_places(nodes: int, copies: int) -> None:
    drafter = PromptTokensDrafter(network(tokens=2, copies=copies, ranks=PROBABILITIES))
    state: Any = drafter.start(_Context())  # type: ignore[arg-type] # only what is read
    state.guesses = [[[11, 12, 13], [14, 15, 16]]]
    places = divide_nodes(state.shape.probabilities(), 2, Plan(nodes, 2), copies)
    draft = drafter.propose(state, torch.tensor([7]), Plan(nodes, 2))
    soft_nodes = copies * sum(places.values())
    assert draft.soft is not None
    assert draft.soft.any(-1).tolist() == [[False] * len(places) + [True] * soft_nodes]
    place = [-1] * len(places)  # of each node's input, counted from the token above
    embeddings = drafter.network.embeddings.tolist()
    for node in range(len(places), len(places) + soft_nodes):
        place.append(place[int(draft.parents[0, node])] + 1)
        assert embeddings.index(draft.soft[0, node].tolist()) % 2 == place[node]


def test_the_soft_nodes_below_the_last_accepted_node_are_read() -> None:
    drafter = PromptTokensDrafter(network(tokens=2, copies=2))
    draft = trees_from_lists(torch.tensor([7]), [([8, 7, 7, 7, 7, 7], [0, 0, 1, 3, 1, 5])])
    soft = drafter.network.inputs_of(torch.tensor([[-1, -1, 0, 0, 1, 2, 3]]))
    logits = torch.randn(1, 7, MODEL.config.vocab_size)
    state: Any = drafter.start(_Context())  # type: ignore[arg-type] # only what is read
    verdict = Verdict(
        torch.tensor([[0, 1]]), torch.tensor([9]), torch.tensor([False]), torch.tensor([[8, 9]]), torch.tensor([2])
    )
    drafter.update(state, replace(draft, soft=soft), Scores(logits), verdict)
    first, second = logits[0, [3, 5]].mean(0), logits[0, [4, 6]].mean(0)
    assert [ranked[0] for ranked in state.guesses[0]] == [int(first.argmax()), int(second.argmax())]


class _Context:
    tree_shape = None
    tokens = torch.zeros(1, 3)


def test_guesses_are_drafted_without_changing_the_text() -> None:
    inputs = prompts(1)
    drafter = PromptTokensDrafter(network(copies=2))
    plain = mmdec.generate(MODEL, inputs, None, max_new_tokens=60, do_sample=False)
    drafted = mmdec.generate(MODEL, inputs, drafter, num_speculative_tokens=(31, 5), max_new_tokens=60, do_sample=False)
    assert torch.equal(drafted.sequences, plain.sequences)
    assert drafted.rounds[1].drafted == [0]  # the first draft has soft nodes only
    assert max(map(max, (round_.drafted for round_ in drafted.rounds))) > 3


def test_targets_that_cannot_read_soft_nodes_are_refused() -> None:
    model: Any = recurrent_model("Mamba2")
    own = PromptTokens(PromptTokensConfig(hidden_size=model.config.hidden_size, vocab_size=model.config.vocab_size))
    with pytest.raises(InputError, match="without recurrent layers"):
        mmdec.generate(model, torch.tensor([[3, 4, 5]]), PromptTokensDrafter(own), max_new_tokens=4)
    other: Any = language_model(hidden_size=64)
    with pytest.raises(InputError, match="must fit a model with 64 channels"):
        mmdec.generate(other, torch.tensor([[3, 4, 5]]), PromptTokensDrafter(network()), max_new_tokens=4)


def test_a_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    saved = network(tokens=2, ranks=PROBABILITIES)
    drafter: Any = mmdec.load_drafter(save_network(saved, tmp_path / "tokens"), MODEL)
    assert torch.equal(drafter.network.embeddings, saved.embeddings)
    assert drafter.needs.prior.ranks == tuple(map(tuple, PROBABILITIES))
    assert drafter.needs.prior.is_measured


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"tokens": 0}, "`tokens`"),
        ({"tokens": 5}, "embeddings"),
        ({"copies": 99}, "`copies`"),
        ({"ranks": [[2.0]]}, "`ranks`"),
        ({"ranks": [[0.5]]}, "a row for each of 3"),
        ({"ranks": "high"}, "rows of numbers"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], match: str, tmp_path: Path) -> None:
    folder = save_network(network(), tmp_path / "tokens")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    with pytest.raises(InputError, match=match):
        mmdec.load_drafter(folder, MODEL)


def test_a_tensor_of_another_name_is_refused(tmp_path: Path) -> None:
    folder = save_network(network(), tmp_path / "tokens")
    weights = load_file(folder / "model.safetensors")
    save_file({"prompts": weights["embeddings"]}, folder / "model.safetensors")
    with pytest.raises(InputError, match="lacks 'embeddings'"):
        mmdec.load_drafter(folder, MODEL)
