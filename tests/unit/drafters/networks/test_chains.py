"""Tests chains of a draft network: drafted token by token or as tree levels, at full length or until it is unsure."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import mmdec
from mmdec.compat import CACHE_ARGUMENT
from mmdec.core.budget import Budget
from mmdec.drafters.eagle.cpu_step import Eagle3Step, EagleStep
from mmdec.drafters.flash.cpu_step import SlotStep
from mmdec.drafters.networks.drafter import NetworkDrafter
from mmdec.targets.text import TextTarget
from mmdec.types import Draft, Plan
from tests.support.compressing_drafters import SYSTEMS
from tests.support.draft_networks import PROMPTS, from_scratch, start_drafter, tree_growing
from tests.support.grid import sample, slow_but
from tests.support.tiny_text import language_model
from tests.support.tiny_vlm import Picture, batch_of, second_turn, vision_model
from tests.support.toy_target import padded

ROOTS = [6, 14, 21, 33]


def proposed(drafter: Any, model: Any, rows: list[int], plan: Plan) -> Draft:
    roots = [ROOTS[row] for row in rows]
    with torch.inference_mode():
        return drafter.propose(
            start_drafter(model, drafter, [PROMPTS[row] for row in rows], roots), torch.tensor(roots), plan
        )


@pytest.mark.parametrize("system", ["eagle", "msd", "specvlm", "vispec", "eagle3", "flash", "flash-unrefined"])
@pytest.mark.parametrize("threshold", [0.0, 0.2])
def test_a_chain_drafted_token_by_token_equals_one_by_levels(
    system: str, threshold: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, steps = language_model(), []
    kind: Any = SlotStep if "flash" in system else Eagle3Step if system == "eagle3" else EagleStep
    changes: dict[str, Any] = {"slots": 4, "refine": system == "flash"} if "flash" in system else {}
    drafter = tree_growing(system.removesuffix("-unrefined"), model, **changes)
    made = kind.for_network.__func__
    monkeypatch.setattr(kind, "for_network", classmethod(lambda *given: steps.append(made(*given)) or steps[-1]))
    stepwise = [proposed(drafter, model, [row], Plan(20, 20, threshold=threshold)) for row in range(4)]
    assert len(steps) == 4
    assert all(steps)
    monkeypatch.setattr(kind, "for_network", classmethod(lambda *_: None))
    for row, draft in enumerate(stepwise):
        levels = proposed(drafter, model, [row], Plan(20, 20, threshold=threshold))
        for part in ("tokens", "parents", "size"):
            assert torch.equal(getattr(draft, part), getattr(levels, part))


@pytest.mark.parametrize(
    ("system", "threshold", "rows"),
    slow_but(
        itertools.product(("eagle", "eagle3", "flash"), (0.001, 0.05, 0.3, 1.0), ([0], [2], [0, 1, 2, 3])),
        slice(None, None, 5),
    ),
)
def test_a_chain_ends_with_its_first_unlikely_token(system: str, threshold: float, rows: list[int]) -> None:
    model = language_model()
    drafter = tree_growing(system, model)
    whole = proposed(drafter, model, rows, Plan(8, 8))
    ended = proposed(drafter, model, rows, Plan(8, 8, threshold=threshold))
    length = 0
    while length < 8:
        length += 1
        paths = [whole.tokens[index, 1 : length + 1].tolist() for index in range(len(rows))]
        sure = [probabilities(drafter, model, row, path) for row, path in zip(rows, paths, strict=True)]
        if sum(sure) < threshold * len(rows):
            break
    assert ended.size.tolist() == [1 + length] * len(rows)
    assert torch.equal(ended.tokens, whole.tokens[:, : 1 + length])
    assert torch.equal(ended.parents, whole.parents[:, : 1 + length])


def probabilities(drafter: Any, model: Any, row: int, path: list[int]) -> float:
    """Return the probability of a path, with each token's score computed from scratch."""
    context = TextTarget(model).prefill(padded([PROMPTS[row]]), drafter.needs).context
    features = torch.cat([context.features[layer][0] for layer in drafter.needs.layers], -1)
    text = [*PROMPTS[row], ROOTS[row]]
    scores = [from_scratch(drafter, context, features, text, tuple(path[:end])) for end in range(len(path))]
    return math.exp(sum(float(score[token]) for score, token in zip(scores, path, strict=True)))


class Noted:
    """A drafter whose proposals a test can see."""

    def __init__(self, drafter: NetworkDrafter) -> None:
        self.drafter, self.needs, self.name = drafter, drafter.needs, drafter.name
        self.check, self.start, self.select = drafter.check, drafter.start, drafter.select
        self.update: Any = drafter.update
        self.drafts: list[list[int]] = []

    def propose(self, state: Any, roots: torch.Tensor, plan: Plan) -> Draft:
        draft = self.drafter.propose(state, roots, plan)
        self.drafts += draft.tokens.tolist()
        return draft


@pytest.mark.parametrize("system", ["specvlm", "vispec"])
def test_another_picture_changes_what_a_step_reads(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """ViSpec's global vector is that of the last picture so far. In a batch no step is used until one row is left."""
    model = vision_model("llava")
    row, more = [[5, 6], Picture.random(1), [7, 8, 9]], [[20], Picture.random(2), [21, 22]]
    options: dict[str, Any] = {"num_speculative_tokens": 6, "do_sample": False, "eos_token_id": 45}

    def drafts() -> list[list[int]]:
        noted, cache = Noted(tree_growing(system, model, **SYSTEMS[system])), DynamicCache(config=model.config)
        first = batch_of("llava", [row])
        answer = mmdec.generate(model, first, noted, **{CACHE_ARGUMENT: cache}, max_new_tokens=8, **options).sequences
        whole, _ = second_turn("llava", [row], [more], answer, first["attention_mask"])
        mmdec.generate(model, whole, noted, **{CACHE_ARGUMENT: cache}, max_new_tokens=8, **options)
        both = batch_of("llava", [row, [Picture.random(3), [20, 21]], [Picture.random(4), [30]]])
        mmdec.generate(model, both, noted, max_new_tokens=30, **options)
        return noted.drafts

    stepwise = drafts()
    monkeypatch.setattr(EagleStep, "for_network", classmethod(lambda *_: None))
    assert drafts() == stepwise


@pytest.mark.parametrize("slots", sample((1, 2, 4), (1, 4)))
def test_flash_blocks_equal_recomputation_over_pictures_and_turns(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that accept some, drafts of several blocks, a second turn, and a row that is left of a batch.
    With one slot the weights explode, which is no warning."""
    model = vision_model("llava")
    row, more = [[5, 6], Picture.random(1), [7, 8, 9]], [[20], [21, 22]]
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": 45}

    def drafts() -> list[list[int]]:
        noted = Noted(tree_growing("flash", model, slots=slots, latents=3))
        cache, chain = DynamicCache(config=model.config), {"num_speculative_tokens": 7}
        first = batch_of("llava", [row])
        answer = mmdec.generate(model, first, noted, **{CACHE_ARGUMENT: cache}, max_new_tokens=24, **chain, **options)
        both = torch.cat([answer.sequences, torch.tensor([[20, 21, 22]])], 1)
        whole = {**first, "input_ids": both, "attention_mask": torch.ones_like(both)}
        mmdec.generate(model, whole, noted, **{CACHE_ARGUMENT: cache}, max_new_tokens=24, **chain, **options)
        three = batch_of("llava", [row, more, [Picture.random(4), [30]]])
        mmdec.generate(model, three, noted, max_new_tokens=30, **chain, **options)
        return noted.drafts

    stepwise = drafts()
    assert len(stepwise) > 20
    monkeypatch.setattr(SlotStep, "for_network", classmethod(lambda *_: None))
    assert drafts() == stepwise


@pytest.mark.parametrize("slots", [2, 4])
def test_flashs_chains_and_trees_share_a_cache(slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = language_model()
    ids = torch.tensor([[5, 6, 7, 8, 5, 6]])
    plans = [Plan(6, 6), Plan(3, 3), Plan(9, 3), Plan(0, 0), Plan(1, 1), Plan(0, 0), Plan(0, 0), Plan(8, 8)]

    def drafts() -> list[list[int]]:
        inner = tree_growing("flash", model, slots=slots)
        inner.tree = True
        noted, counted = Noted(inner), iter(plans * 20)
        monkeypatch.setattr(Budget, "plan", lambda *_: next(counted))
        out = mmdec.generate(model, ids, noted, max_new_tokens=40, do_sample=False, eos_token_id=60)
        assert torch.equal(out.sequences, model.generate(ids, max_new_tokens=40, do_sample=False, eos_token_id=60))
        return noted.drafts

    stepwise = drafts()
    assert len(stepwise) > 10
    monkeypatch.setattr(SlotStep, "for_network", classmethod(lambda *_: None))
    assert drafts() == stepwise


@pytest.mark.parametrize("system", ["eagle", "flash"])
def test_a_step_is_built_once_for_each_run(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where none can be built; weights may change between two runs of a chat."""
    model, asked = language_model(), []
    kind: Any = SlotStep if system == "flash" else EagleStep
    made = kind.for_network.__func__
    for result in (True, False):
        asked.clear()
        monkeypatch.setattr(
            kind,
            "for_network",
            classmethod(lambda *given, result=result: asked.append(1) or (made(*given) if result else None)),
        )
        drafter, cache = tree_growing(system, model), DynamicCache(config=model.config)
        options: dict[str, Any] = {
            "num_speculative_tokens": 3,
            "do_sample": False,
            CACHE_ARGUMENT: cache,
            "eos_token_id": 60,
        }
        ids = torch.tensor([[5, 6, 7, 8]])
        for turn in range(1, 3):
            out = mmdec.generate(
                model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, drafter, max_new_tokens=12, **options
            )
            assert len(out.rounds) > 3
            assert len(asked) == turn
            ids = torch.cat([out.sequences, ids], 1)


@pytest.mark.parametrize("system", ["eagle", "flash"])
def test_the_fast_path_is_not_used_with_gradients_or_autocast(system: str) -> None:
    model = language_model()
    drafter, roots = tree_growing(system, model), torch.tensor(ROOTS[:1])
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        assert (
            int(drafter.propose(start_drafter(model, drafter, PROMPTS[:1], ROOTS[:1]), roots, Plan(4, 4)).size[0]) == 5
        )
    assert int(drafter.propose(start_drafter(model, drafter, PROMPTS[:1], ROOTS[:1]), roots, Plan(4, 4)).size[0]) == 5


def test_a_network_with_its_own_fusion_has_no_fast_step() -> None:
    class Squashed(type(tree_growing("eagle", language_model()).network)):  # type: ignore[misc]
        def fuse(self, embeds: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
            return super().fuse(embeds, features).tanh()

    model = language_model()
    drafter = tree_growing("eagle", model)
    parts = drafter.network.pack_weights(), drafter.embedding, drafter.output
    assert EagleStep.for_network(drafter.network, *parts) is not None
    drafter.network.__class__ = Squashed
    assert EagleStep.for_network(drafter.network, *parts) is None
