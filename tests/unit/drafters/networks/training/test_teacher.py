"""Tests the teacher (the target in training): in batches it gives the same features as for each row alone, for every
kind of model, and its last features are the LM head's input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mmdec.core.tree_shape import MAX_RANKS
from mmdec.drafters.networks.drafter import NetworkDrafter
from mmdec.drafters.networks.training.module import rank_texts
from mmdec.drafters.networks.training.samples import append
from mmdec.drafters.networks.training.simulation import measure
from mmdec.drafters.networks.training.teacher import FeatureStore, TargetFeatures, Teacher
from mmdec.drafters.networks.training.unroll import unroll_inputs, unroll_steps
from mmdec.generation.generate import generate
from mmdec.targets.media import MediaTarget
from mmdec.types import Needs
from tests.support.draft_networks import draft_network
from tests.support.tiny_vlm import KINDS, SIZES, Picture, batch_of, vision_model

LAST = Needs(layers=(-1,), embeds=True)
BOTH = Needs(layers=(0, -1), embeds=True)
ANSWERS = [[7, 8, 9, 10], [11, 12], [13, 14, 15, 16, 17]]


def prompts(kind: str) -> list[dict[str, torch.Tensor]]:
    """Return one picture; no picture; two pictures of other sizes, and a video."""
    first, second, third = (Picture.random(seed, size) for seed, size in enumerate(SIZES))
    film = Picture.random(9, (16, 16), frames=4)
    rows = [[[20, 21], first, [22]], [[23, 24, 25]], [second, [26], third, film, [27, 28]]]
    return [batch_of(kind, [row]) for row in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_equals_its_rows_alone(kind: str) -> None:
    model = vision_model(kind)
    teacher = Teacher(model)
    asked = prompts(kind)
    batch = teacher.compute_features(asked, ANSWERS, BOTH)
    for prompt, answer, result in zip(asked, ANSWERS, batch, strict=True):
        (single,) = teacher.compute_features([prompt], [answer], BOTH)
        assert result.prompt == prompt["input_ids"].shape[1]
        assert len(result.features) == result.prompt + len(answer) - 1
        torch.testing.assert_close(result.features, single.features, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(result.embeds, single.embeds, atol=1e-4, rtol=1e-4)
        assert torch.equal(result.visual, single.visual)
        text = torch.cat([prompt["input_ids"][0], torch.tensor(answer[:-1])])
        plain = teacher.embed(text)[~result.visual]
        torch.testing.assert_close(result.embeds[~result.visual], plain)
        with torch.no_grad():
            logits = model(**prompt).logits[0]
        torch.testing.assert_close(teacher.logits(single.features[: result.prompt, 32:]), logits, atol=1e-4, rtol=1e-4)
    assert [bool(features.visual.any()) for features in batch] == [True, False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_generate(kind: str) -> None:
    model = vision_model(kind)
    teacher = Teacher(model)
    teacher.ends = frozenset(range(30, 40))  # made up: a random model has no end
    asked = prompts(kind)
    for prompt, answer in zip(asked, teacher.answer(asked, 8), strict=True):
        made = model.generate(**prompt, do_sample=False, max_new_tokens=8)[0, prompt["input_ids"].shape[1] :].tolist()
        end = next((place for place, token in enumerate(made) if token in teacher.ends), len(made) - 1)
        assert answer == made[: end + 1]


def test_answers_are_sampled_as_asked() -> None:
    model, asked = vision_model("llava"), prompts("llava")[1:2]
    teacher, sampling = Teacher(model), {"temperature": 1.5, "top_k": 0, "top_p": 0.9}
    torch.manual_seed(3)
    (answer,) = teacher.answer(asked, 8, sampling)
    torch.manual_seed(3)
    made = model.generate(**asked[0], do_sample=True, max_new_tokens=8, pad_token_id=teacher.pad, **sampling)
    assert answer == made[0, asked[0]["input_ids"].shape[1] :].tolist()[: len(answer)]
    assert answer != teacher.answer(asked, 8)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_training_reads_the_layers_of_decoding(kind: str) -> None:
    """Also within Qwen3-VL's DeepStack, and the last layer before the final norm: what a drafter reads while decoding;
    placeholders have their own embeddings where the drafter reads these; positions are the target's."""
    model = vision_model(kind)
    teacher, target, needs = Teacher(model), MediaTarget(model), Needs(layers=(0, 1, 2, -1))
    for prompt, answer in zip(prompts(kind), ANSWERS, strict=True):
        (result,) = teacher.compute_features([prompt], [answer], needs)
        whole = append(prompt, answer[:-1])
        context = target.prefill(whole, needs).context
        expected = torch.cat([context.features[layer][0] for layer in needs.layers], -1)
        torch.testing.assert_close(result.features, expected)
        assert not torch.allclose(result.features[:, 64:96], result.features[:, 96:])  # before and after the norm
        torch.testing.assert_close(result.embeds, teacher.embed(whole["input_ids"][0]))
        axes = context.positions[:, 0]
        assert (result.positions is None) == (len(axes) == 1)
        if result.positions is not None:
            assert torch.equal(result.positions, axes)


CONVENTIONS: list[dict[str, Any]] = [
    {"positions": "temporal", "pictures": "placeholder"},
    {"positions": "axes", "pictures": "placeholder", "mrope_section": (2, 1, 1)},
    {"positions": "text", "pictures": "projected"},
    {"pictures": "dropped"},
]


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("stored", [False, True])
def test_training_columns_equal_decoding(convention: dict[str, Any], stored: bool, tmp_path: Path) -> None:
    """EAGLE-3's columns of a text with pictures: the layer's inputs and positions that the drafter's cache is made of,
    by each convention; features in half precision where they are stored."""
    model = vision_model("qwen2_5_vl")
    network = draft_network("eagle3", model, **convention)
    drafter = NetworkDrafter(network, model.get_input_embeddings(), model.get_output_embeddings())
    teacher, prompt = Teacher(model), prompts("qwen2_5_vl")[2]
    (text,) = teacher.compute_features([prompt], [ANSWERS[2]], drafter.needs)
    if stored:
        store = FeatureStore(tmp_path, teacher, drafter.needs, False)
        ids = append(prompt, ANSWERS[2][:-1])["input_ids"][0].tolist()
        store.add({"one": (ids, text)})
        text = store.get("one", ANSWERS[2])
    columns = unroll_inputs(network, [text])
    context = MediaTarget(model).prefill(prompt, drafter.needs).context
    state = drafter.start(context)
    (waiting,) = state.queue
    states, positions, _ = drafter._advance_over_prompt(state, waiting)  # type: ignore[arg-type]
    near = 3e-2 if stored else 1e-4
    torch.testing.assert_close(columns.states, states, atol=near, rtol=near)
    assert torch.equal(columns.prompt_positions, positions)
    first = columns.positions[..., 0].flatten().tolist()
    assert first == [state.positions[0]] * len(first)
    assert torch.equal(columns.positions.diff(dim=-1), torch.ones_like(columns.positions[..., 1:]))
    torch.testing.assert_close(columns.embeds[0], teacher.embed(torch.tensor(ANSWERS[2][:-1])))


def test_stored_readings_equal_fresh_ones(tmp_path) -> None:
    teacher = Teacher(vision_model("llava"))
    asked = prompts("llava")
    store = FeatureStore(tmp_path, teacher, LAST, False)
    result = teacher.compute_features(asked, ANSWERS, LAST)
    tokens = [
        torch.cat([prompt["input_ids"][0], torch.tensor(answer[:-1])]).tolist()
        for prompt, answer in zip(asked, ANSWERS, strict=True)
    ]
    rounded = store.add({str(n): (tokens[n], computed) for n, computed in enumerate(result)})
    for again in (store, FeatureStore(tmp_path, teacher, LAST, False)):
        for number, computed in enumerate(result):
            stored: TargetFeatures = again.get(str(number), ANSWERS[number])
            assert stored.prompt == computed.prompt
            assert stored.answer == ANSWERS[number]
            assert torch.equal(stored.visual, computed.visual)
            assert torch.equal(stored.features, rounded[str(number)].features)
            assert torch.equal(stored.embeds, rounded[str(number)].embeds)
            torch.testing.assert_close(stored.features, computed.features, atol=2e-3, rtol=2e-3)
    assert "3" not in store


@pytest.mark.parametrize("system", ["eagle", "msd"])
def test_simulated_chains_equal_decoding(system: str) -> None:
    """Rounds counted from the ranks are those that decoding takes, text by text."""
    model = vision_model("llava")
    teacher, depth = Teacher(model), 3
    network = draft_network(system, model)
    with torch.no_grad():  # a drafter that is often right: the feature of this token, moved towards that of the next
        network.fc.weight.mul_(0.1)
        network.fc.weight[:, :32] += torch.eye(32)
    drafter = NetworkDrafter(network, model.get_input_embeddings(), model.get_output_embeddings())
    accepted = 0
    for prompt in prompts("llava"):
        begin = prompt["input_ids"].shape[1]
        decoded = generate(model, prompt, drafter, num_speculative_tokens=depth, max_new_tokens=40)
        answer = decoded.sequences[0, begin:].tolist()
        texts = teacher.compute_features([prompt], [answer], LAST)
        columns = unroll_inputs(network, texts)
        ranks = rank_texts(columns, unroll_steps(network, columns, depth), lambda states, _: teacher.logits(states))
        assert ranks[0].shape == (len(answer) - 1, depth)
        assert int(ranks[0].min()) >= 0
        assert int(ranks[0].max()) <= MAX_RANKS
        chain, _, _ = measure(ranks, depth, 0)
        rounds = len(decoded.rounds) - 1  # the first is the prompt's
        assert chain == pytest.approx((len(answer) - 1) / rounds)
        accepted += len(answer) - 1 - rounds
    assert accepted > 0  # else nothing was compared
